"""Find the checkpoints of a run of Ray Train whose files Ray keeps: its directory has an identity, and no log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointDamaged, CheckpointGone
from ckptstore.integrations.ray.ray_snapshot import uris_in_run
from ckptstore.runtime.shown import printable
from ckptstore.store import CheckpointStore


def _tell(uri: str, error: CheckpointDamaged) -> None:
    click.echo(printable(f"left out: {uri}: {error.message}"), err=True)


def checkpoints_of_ray(
    store: CheckpointStore,
    storage_options: Mapping[str, Any],
    *,
    damaged: Callable[[str, CheckpointDamaged], None] = _tell,
) -> list[Checkpoint] | None:
    """Return the checkpoints of such a run, oldest first; None of a store with a log of its own.

    One that is not whole is left out: `damaged` is called with its URI and why, and says so on stderr by default.
    """
    uris = uris_in_run(job_of(store).storage)
    if uris is None:
        return None
    found = []
    for uri in uris:
        try:
            found.append(Checkpoint.from_uri(uri, storage_options=storage_options))
        except CheckpointDamaged as error:
            damaged(uri, error)
        except CheckpointGone:  # Ray has deleted it meanwhile
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.created_at)
