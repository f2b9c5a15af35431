"""`ckptstore.ray.wrap`: a checkpoint of Ray's that was made through ckptstore, as a `Checkpoint` of ckptstore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, CheckpointGone
from ckptstore.integrations.ray.context import current_worker
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.integrations.ray.group import RayWorkers
from ckptstore.integrations.ray.pointer import POINTER_NAME
from ckptstore.layout import MANIFEST_NAME
from ckptstore.load import CheckpointFiles
from ckptstore.manifest import Manifest
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer
from ckptstore.verify import check_sizes


def wrap(ray_checkpoint: Any, *, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open what `ckptstore.ray.report` or `upload_fn` stored, from the checkpoint that Ray hands back for it.

    In the driver, in workers and anywhere else; one download per node for `as_directory`, whoever asks, every byte
    checked. In a worker `load` is collective over the workers. `storage_options` replace what the checkpoint's file
    system says of endpoint and credentials.

    Raises CheckpointGone when nothing is there, CheckpointDamaged when it is not whole: no manifest (it was not stored
    through ckptstore, or the ranks that were left after a preemption reported it), a file that is missing or has
    another size, or files that are not in the manifest (of another attempt).
    """
    config = StoreConfig.from_env()
    place = place_of(ray_checkpoint.filesystem, ray_checkpoint.path, storage_options=storage_options)
    worker = current_worker()
    files = files_at(place.open(config), config, group=RayWorkers(worker) if worker else None)
    _check_whole(files)
    return Checkpoint(files)


def files_at(storage: Storage, config: StoreConfig, *, prefix: str = "", group: object = None) -> CheckpointFiles:
    """The files of a checkpoint that no log knows of."""
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    return CheckpointFiles(
        storage=storage, transfer=transfer, config=config, prefix=prefix, record=None, given_group=group
    )


def _check_whole(files: CheckpointFiles) -> None:
    manifest = _manifest_of(files)
    problems = check_sizes(manifest.files, files.stored_sizes(manifest))
    if problems:
        shown = "; ".join(map(str, problems[:5]))
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointDamaged(
            f"{files.uri} is not what was stored there: {shown}{more}",
            step=manifest.step,
            file=problems[0].file,
            rank=problems[0].rank,
        )


def _manifest_of(files: CheckpointFiles) -> Manifest:
    try:
        manifest = files.read_manifest()[0]
        if manifest.store_id:  # else it was made up from a listing
            return manifest
    except CheckpointGone:
        pass
    names = sorted(file.key for file in files.storage.list(files.prefix))
    if not names:
        raise CheckpointGone(f"There is nothing at {files.uri}: Ray has deleted the checkpoint", file=MANIFEST_NAME)
    is_pointer = POINTER_NAME in names
    raise CheckpointDamaged(
        f"{files.uri} has {len(names)} files and no manifest: it was not stored through ckptstore, or it never was "
        "complete",
        file=MANIFEST_NAME,
        hint="It is a pointer to a store: open it with ckptstore.ray.resolve" if is_pointer else None,
    )
