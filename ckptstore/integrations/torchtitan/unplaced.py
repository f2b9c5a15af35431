"""Warn of keys of a checkpoint that no rank loads: layers that the model lacks, positions of unused data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection

from torchtitan.tools.logging import logger

from ckptstore.checkpoint import Checkpoint
from ckptstore.integrations.torchtitan.together import on_all_ranks, on_leader, rank_of
from ckptstore.store import CheckpointStore

_SHOWN = 5


def warn_of_unplaced(
    store: CheckpointStore, checkpoint: Checkpoint, keys: Collection[str], left_out: Collection[str]
) -> None:
    """Warn, on rank 0, of keys of a checkpoint that no rank has loaded. Collective.

    torchtitan's managers ignore them silently. `keys` are those of this rank, `left_out` the names of states that were
    left out on purpose. Ranks with the same keys, as all are without a pipeline, send them once.
    """
    mine = sorted(keys)
    digests = on_all_ranks(store, "digests of keys", hashlib.sha256(json.dumps(mine).encode()).hexdigest)
    is_first = digests.index(digests[rank_of(store)]) == rank_of(store)
    parts = on_all_ranks(store, "keys", lambda: mine if is_first else [])

    def warn() -> None:
        held = {key for part in parts for key in part}
        excluded = tuple(f"{name}." for name in left_out)
        stored = checkpoint.keys()
        unplaced = [key for key in stored if key not in held and not key.startswith(excluded)]
        if unplaced:
            shown = ", ".join(unplaced[:_SHOWN]) + (", ..." if len(unplaced) > _SHOWN else "")
            logger.warning(f"{len(unplaced)} keys of {checkpoint.uri} have no place in this training: {shown}")

    on_leader(store, "look at what is left", warn)
