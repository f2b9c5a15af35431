"""Open the checkpoint that Ray hands back: `resume` in the training function, `resolve` and `wrap` anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.errors import CheckpointGone, FileMissing, InvalidInput
from ckptstore.integrations.ray.context import current_worker
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.integrations.ray.kept_by_ray.tuning import refuse_in_tune
from ckptstore.integrations.ray.kept_by_ray.wrapping import kept_files
from ckptstore.integrations.ray.pointer import has_pointer, pointed_place, read_pointer
from ckptstore.integrations.ray.ray_snapshot import ROOT_NAME
from ckptstore.integrations.ray.ray_store import Prefer, RayStore, current_store
from ckptstore.integrations.ray.worker_group import RayWorkers
from ckptstore.opening import open_store


def resume(
    state: Mapping[str, Any] | None = None, store: RayStore | None = None, prefer: Prefer = "newest", **options: Any
) -> Checkpoint | None:
    """`RayStore.resume`: claim the store for this start of the run and load the checkpoint to resume from. Collective.

    Args:
        state: what to load into; None to get the checkpoint alone, for directories.
        store: that of `ckptstore.ray.store`; by default the one that was opened last, or else the default one.
        prefer, options: as for `RayStore.resume`.
    """
    refuse_in_tune("ckptstore.ray.resume")
    store = current_store() if store is None else store
    return store.resume(state, prefer=prefer, **options)


def _checkpoint_in(ray_checkpoint: Any) -> Any:
    """Return the checkpoint of Ray's itself, the latest one of a result. Raises InvalidInput where it is None."""
    root = f"<storage_path>/<run name>/{ROOT_NAME}"
    if hasattr(ray_checkpoint, "best_checkpoints"):
        root = place_of(ray_checkpoint.filesystem, f"{ray_checkpoint.path}/{ROOT_NAME}").uri
        ray_checkpoint = ray_checkpoint.checkpoint
    if ray_checkpoint is None:
        raise InvalidInput(
            "Ray knows of no checkpoint of this run, it gives None",
            hint="None was reported, or the run ended before Ray had taken a report. What ckptstore.ray.store saved is "
            f"there all the same: ckptstore.open_store({root!r}).latest()",
        )
    return ray_checkpoint


def wrap(ray_checkpoint: Any, *, storage_options: Mapping[str, Any] | None = None, group: object = None) -> Checkpoint:
    """Open the checkpoint of `ckptstore.ray.report`, of `upload_fn`, or of a store's pointer, from Ray's checkpoint or
    from a whole result, whose latest one it is.

    In the driver, in workers and anywhere else; one download per node for `as_directory`, whoever calls it, every byte
    checked. In a worker `load` is collective over the workers; with `group="solo"` one of them loads alone.
    `storage_options` replace the endpoint and the credentials of the checkpoint's file system.

    Raises CheckpointGone when nothing is there, CheckpointDamaged when it is not whole: a manifest or a file that is
    missing, a file that has another size or is not in the manifest (of another attempt). Raises InvalidSource for files
    that Ray stored itself, InvalidInput for None; and the errors of `resolve`.
    """
    ray_checkpoint, worker = _checkpoint_in(ray_checkpoint), current_worker()
    if group is None and worker is not None:
        group = RayWorkers(worker)
    if has_pointer(ray_checkpoint):
        return resolve(ray_checkpoint, storage_options=storage_options, group=group)
    config = StoreConfig.from_env()
    return Checkpoint(kept_files(ray_checkpoint, config, storage_options=storage_options, group=group))


def resolve(
    ray_checkpoint: Any, *, storage_options: Mapping[str, Any] | None = None, group: object = None
) -> Checkpoint:
    """Open the checkpoint to which a checkpoint of Ray's points: `result.checkpoint`, or `result` itself; one of
    `result.best_checkpoints`, or the argument of a validation function or a Serve deployment. In any process that can
    read the run's storage.

    `storage_options` are for a store with a root of its own: they are not stored with it. For the default root those of
    Ray's file system are used. `group="solo"` is for one worker that loads alone.

    Raises CheckpointGone, which names the live ones, when the store's retention has dropped it and its grace period is
    over, or when its save failed; InvalidInput when `ray_checkpoint` holds no pointer, or is None, with the way to what
    the store has.
    """
    ray_checkpoint = _checkpoint_in(ray_checkpoint)
    try:
        pointer = read_pointer(ray_checkpoint, retry=RetryConfig.from_env())
    except FileMissing as error:
        raise CheckpointGone(f"Ray's directory of the checkpoint was removed: {ray_checkpoint.path}") from error
    place = pointed_place(ray_checkpoint, pointer, storage_options)
    return RayStore(job_of(open_store(place.uri, storage_options=place.storage_options, group=group))).at(pointer)
