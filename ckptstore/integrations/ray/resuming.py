"""From what Ray hands back to a checkpoint: `resume` in the training function, `resolve` anywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import RetryConfig
from ckptstore.errors import CheckpointGone, CkptstoreError, FileMissing, InvalidInput
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.integrations.ray.pointer import read_pointer
from ckptstore.integrations.ray.ray_store import ROOT_NAME, RayStore, current_store
from ckptstore.opening import open_store
from ckptstore.resume import newest_first

logger = logging.getLogger("ckptstore.ray")

Prefer = Literal["newest", "ray"]


def resume(
    state: Mapping[str, Any] | None = None, store: RayStore | None = None, prefer: Prefer = "newest", **options: Any
) -> Checkpoint | None:
    """Claim the store for this start of the run and load the checkpoint to go on from. Collective.

    All ranks get the same one; None, and the state as it was, when there is none. A damaged one is passed over, and so
    is a save that failed.

    Args:
        state: what to load into; None to be given the checkpoint alone, for directories.
        store: that of `ckptstore.ray.store`; the one that was opened last, or the default one, when it is not given.
        prefer: "newest" for the newest checkpoint in the store, which may be ahead of what Ray has registered when the
            run died in between; "ray" for the one that `ray.train.get_checkpoint()` points to, and from there on older
            ones, then newer ones. Outside of Ray Train there is only the newest.
        options: the keywords of `CheckpointStore.resume`: `include`, `strict`, `device`, `read_once`, `per_rank`,
            `allow_pickle`.

    Raises NoUsableCheckpoint and StateMismatch as `CheckpointStore.resume` does.
    """
    if prefer not in ("newest", "ray"):
        raise InvalidInput(f"prefer is {prefer!r}, it is 'newest' or 'ray'")
    store = current_store() if store is None else store
    if prefer == "newest" or store.worker is None:
        return store.resume(state, **options)

    def order(numbers: Sequence[int]) -> Iterable[int]:
        from ray.train import get_checkpoint

        handed = get_checkpoint()
        pointed = None if handed is None else _number_of(handed, root=store.pointer_root)
        if pointed is None:
            return newest_first(numbers)
        return sorted(numbers, key=lambda number: (number > pointed, -number))

    return store.resume_in_order(order, state, **options)


def resolve(ray_checkpoint: Any, *, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
    """The checkpoint that a checkpoint of Ray's points to: `result.checkpoint`, one of `result.best_checkpoints`, what
    a validation function or a Serve deployment is given. In any process that can read the run's storage.

    `storage_options` are for a store that was given a root of its own: they are not stored with it. For the default
    root the ones of Ray's file system are used.

    Raises CheckpointGone, which names what is left, when the store's retention has dropped it or when its save failed;
    InvalidInput when `ray_checkpoint` holds no pointer.
    """
    try:
        pointer = read_pointer(ray_checkpoint, retry=RetryConfig.from_env())
    except FileMissing as error:
        raise CheckpointGone(f"Ray's directory of the checkpoint was removed: {ray_checkpoint.path}") from error
    uri = pointer.root
    if uri == ROOT_NAME:
        run_path = ray_checkpoint.path.rstrip("/").rpartition("/")[0]
        place = place_of(ray_checkpoint.filesystem, f"{run_path}/{ROOT_NAME}", storage_options=storage_options)
        uri, storage_options = place.uri, place.storage_options
    opened = RayStore(open_store(uri, storage_options=storage_options)._job)
    return opened.at(pointer)


def _number_of(ray_checkpoint: Any, *, root: str) -> int | None:
    """The number of the record that Ray's checkpoint points to; None, and a warning, when there is none at `root`."""
    try:
        pointer = read_pointer(ray_checkpoint, retry=RetryConfig.from_env())
    except CkptstoreError as error:
        logger.warning("what Ray hands back is passed over: %s", error)
        return None
    if pointer.number is None:
        logger.warning("what Ray hands back is passed over: the save of step %d failed", pointer.step)
    elif pointer.root != root:
        logger.warning("what Ray hands back is passed over: it lies in another store, %s", pointer.root)
        return None
    return pointer.number
