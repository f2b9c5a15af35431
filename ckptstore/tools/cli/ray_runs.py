"""Find the checkpoints of a run of Ray Train whose files Ray keeps: its directory has an identity, and no log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.log.identity import KEPT_BY_RAY, read_store_json
from ckptstore.store import CheckpointStore
from ckptstore.upkeep.ray_snapshot import ROOT_NAME


def checkpoints_of_ray(store: CheckpointStore, storage_options: Mapping[str, Any]) -> list[Checkpoint]:
    """Return the checkpoints of such a run, oldest first; of a store with a log of its own none.

    Raises CheckpointDamaged for one that is not whole.
    """
    storage = job_of(store).storage
    identity = read_store_json(storage)
    if identity is None or identity.kept_by != KEPT_BY_RAY:
        return []
    end, own = f"/{MANIFEST_NAME}", f"{ROOT_NAME}/"
    names = [file.key for file in storage.list("") if file.key.endswith(end) and not file.key.startswith(own)]
    found = [
        Checkpoint.from_uri(f"{store.uri}/{name.removesuffix(end)}", storage_options=storage_options) for name in names
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.created_at)
