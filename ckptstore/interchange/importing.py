"""The import story: files of other tools become a state checkpoint, under the keys that they have there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig
from ckptstore.errors import FileMissing, InvalidInput, InvalidSource
from ckptstore.format.layout import DCP_METADATA_NAME, check_step
from ckptstore.interchange.from_files import read_dcp, read_safetensors, read_torch_file
from ckptstore.interchange.selection import KINDS, Kind
from ckptstore.saving.log_keeper import LogKeeper
from ckptstore.saving.request import Request
from ckptstore.saving.state_shard import StateShard
from ckptstore.saving.story import save
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.write.agree import Negotiator
from ckptstore.storage.open import open_storage
from ckptstore.storage.retried import with_retries
from ckptstore.storage.uri import local_path
from ckptstore.store import CheckpointStore
from ckptstore.transfer import Transfer


def import_state(
    source: str | os.PathLike[str],
    store: CheckpointStore,
    step: int,
    *,
    kind: Kind,
    metrics: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    exists: str = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Commit a state that other tools wrote as a checkpoint of `step`. For one process alone.

    Like any save it claims the store, so that a job that is writing to it is fenced. No code in the source is run.

    Args:
        source: a file of `torch.save`; a safetensors file, or a directory of them with or without an index; for "dcp"
            the directory, or a URI of it. The first two are read from a disk as they are written, a DCP directory is
            held in memory.
        kind: "torch", "safetensors" or "dcp".
        metrics, metadata: as for `CheckpointStore.save`.
        exists: "error" when a checkpoint of that step is refused, "replace" to put it into the trash.
        storage_options: for the storage of a DCP directory.

    Raises InvalidInput, FileMissing, CheckpointDamaged before anything is written; then what a save raises.
    """
    if kind not in KINDS:
        raise InvalidInput(f"kind is {kind!r}, it is one of {', '.join(KINDS)}")
    check_step(step)
    if kind == "torch":
        flat = read_torch_file(Path(local_path(source, "The source")))
    elif kind == "safetensors":
        flat = read_safetensors(Path(local_path(source, "The source")))
    else:
        flat = _read_dcp(os.fspath(source), storage_options)
    job = store._in_turn(max_failures=0)
    if job.group.world_size != 1:
        raise InvalidInput(f"An import is for one process, and there are {job.group.world_size}")
    request = Request.of(kind="state", step=step, metrics=metrics, metadata=metadata, exists=exists)
    shard = StateShard(
        lambda: flat, rank=0, world_size=1, negotiator=Negotiator(), storage=job.storage, upload=job.transfer.upload
    )
    return store._checkpoint(save(job.group, LogKeeper(job), shard, request))


def _read_dcp(uri: str, storage_options: Mapping[str, Any] | None) -> FlatState:
    config = StoreConfig.from_env()
    storage = with_retries(open_storage(uri, storage_options=storage_options), config.retry)
    with closing(storage), closing(Transfer(storage, config=config.transfer, retry=config.retry)) as transfer:
        sizes = {file.key: file.size_bytes for file in storage.list("")}
        try:
            metadata = storage.read(DCP_METADATA_NAME)
        except FileMissing:
            raise InvalidSource(f"{storage.uri} has no {DCP_METADATA_NAME}, so it is no DCP directory") from None
        return read_dcp(metadata, transfer.read, sizes)
