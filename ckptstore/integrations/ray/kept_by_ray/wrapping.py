"""Open the files of a checkpoint that Ray keeps in its own directory, and that ckptstore stored there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidSource
from ckptstore.format.layout import DCP_METADATA_NAME, MANIFEST_NAME
from ckptstore.format.manifest import Manifest
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.verify import check_sizes
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer


def kept_files(
    ray_checkpoint: Any,
    config: StoreConfig,
    *,
    storage_options: Mapping[str, Any] | None = None,
    group: object = None,
) -> CheckpointFiles:
    """Open the files of a checkpoint that `report` or `upload_fn` stored.

    Raises CheckpointGone, CheckpointDamaged, InvalidSource as `wrap` does.
    """
    place = place_of(ray_checkpoint.filesystem, ray_checkpoint.path, storage_options=storage_options)
    files = files_at(place.open(config), config, group=group)
    check_whole(files)
    return files


def files_at(storage: Storage, config: StoreConfig, *, prefix: str = "", group: object = None) -> CheckpointFiles:
    """Open the files of a checkpoint without a log."""
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    return CheckpointFiles(storage=storage, transfer=transfer, config=config, prefix=prefix, given_group=group)


def check_whole(files: CheckpointFiles) -> None:
    """Raise CheckpointGone, CheckpointDamaged or InvalidSource unless every file of its manifest exists."""
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
        if manifest.store_id:  # else it was made from a listing
            return manifest
    except CheckpointGone:
        pass
    names = sorted(file.key for file in files.storage.list(files.prefix))
    if not names:
        raise CheckpointGone(f"There is nothing at {files.uri}: Ray has deleted the checkpoint", file=MANIFEST_NAME)
    if INDEX_NAME in names or any(name.startswith("state-rank=") for name in names):  # only ckptstore writes those
        raise CheckpointDamaged(
            f"{files.uri} has {len(names)} files and no manifest: storing it never ended, or the ranks that were left "
            "after a preemption reported it",
            file=MANIFEST_NAME,
        )
    hint = "Read its files with the as_directory() of Ray's checkpoint"
    if DCP_METADATA_NAME in names:
        hint += ", or load it as what DCP wrote: ckptstore.Checkpoint.from_uri(...)"
    raise InvalidSource(
        f"{files.uri} has {len(names)} files and no manifest: Ray stored it itself, or storing it never ended",
        file=MANIFEST_NAME,
        hint=hint,
    )
