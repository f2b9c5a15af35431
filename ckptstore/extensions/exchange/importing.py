"""The import story: commit files of other tools as a state checkpoint, under the keys that they have there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.boundary import boundary
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import FileMissing, InvalidInput, InvalidSource
from ckptstore.extensions.exchange.from_files import read_dcp, read_safetensors, read_torch_file
from ckptstore.extensions.exchange.intake import EXPANDED_BYTES, Intake, Rename
from ckptstore.extensions.exchange.places import on_this_machine, opened_folder
from ckptstore.extensions.exchange.selection import KINDS, Kind
from ckptstore.format.layout import DCP_METADATA_NAME, check_step
from ckptstore.job import Job
from ckptstore.saving.request import Request
from ckptstore.saving.state_shard import StateOptions, StateShard
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.storage.disk.posix import translated
from ckptstore.store import CheckpointStore, save_shard


@boundary
def import_state(
    source: str | os.PathLike[str],
    store: CheckpointStore,
    step: int,
    *,
    kind: Kind,
    metrics: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    exists: str = "error",
    include: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    state: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    allow_bytes: int = EXPANDED_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Commit a state that other tools wrote as a checkpoint of `step`. For one process alone.

    Like any save it claims the store, so that a job that is writing to it is fenced. No code in the source is run,
    unless `allow_pickle` says so.

    Args:
        source: a path or a URI: a file of `torch.save`; a safetensors file, or a directory of them with or without an
            index; a directory of torch's DCP. The first two are read from a disk as they are written, and downloaded
            to the temporary directory first where they are remote. A DCP directory is held in memory.
        kind: "torch", "safetensors" or "dcp".
        metrics, metadata: as for `CheckpointStore.save`.
        exists: where there is a checkpoint of that step, "error" refuses, and "replace" puts it into the trash.
        include: only keys of the source that fit a pattern ("model.*") or one of several. An optimizer is taken whole.
        rename: new names for keys. A mapping gives old and new beginnings ({"model_state_dict": "model"}), each for a
            key and all keys below it. A function gives the new name of each key.
        state: the live state that will be resumed. `optimizer.state_dict()` numbers the parameters; the optimizer and
            the module in this state name them. It is not changed.
        allow_pickle: read and store values that are pickles; they can execute anything.
        allow_bytes: the most bytes of a tensor whose elements share memory. A file of a few bytes may hold one of many
            GiB, all of which an import writes.
        storage_options: for the storage of a source that is a URI.

    Raises InvalidInput, FileMissing, CheckpointDamaged before anything is written; then the errors of a save.
    """
    if kind not in KINDS:
        raise InvalidInput(f"kind is {kind!r}, it is one of {', '.join(KINDS)}")
    check_step(step)
    if type(allow_bytes) is not int or allow_bytes < 0:
        raise InvalidInput(f"allow_bytes is {allow_bytes!r}, it is an integer of at least 0")
    intake = Intake(include=include, rename=rename, state=state, allow_pickle=allow_pickle, allow_bytes=allow_bytes)
    options: dict[str, Any] = {"step": step, "metrics": metrics, "metadata": metadata, "exists": exists}
    with _read(source, kind, intake, storage_options) as flat:

        def make(job: Job) -> tuple[Request, StateShard]:
            if job.group.world_size != 1:
                raise InvalidInput(f"An import is for one process, and there are {job.group.world_size}")
            shard = StateShard(
                lambda: flat,
                rank=0,
                world_size=1,
                memo=SaveMemo(),
                storage=job.storage,
                upload=job.transfer.upload,
                options=StateOptions(allow_pickle=allow_pickle, algorithm=job.transfer.algorithm),
            )
            return Request.of(kind="state", **options), shard

        return save_shard(store, make)


@contextmanager
def _read(
    source: str | os.PathLike[str], kind: Kind, intake: Intake, storage_options: Mapping[str, Any] | None
) -> Iterator[FlatState]:
    """Read the source. Its tensors may map files that exist until the context ends."""
    if kind == "dcp":
        with opened_folder(os.fspath(source), storage_options) as folder:
            try:
                metadata = folder.storage.read(DCP_METADATA_NAME)
            except FileMissing:
                where = folder.storage.uri
                raise InvalidSource(f"{where} has no {DCP_METADATA_NAME}, so it is no DCP directory") from None
            flat = read_dcp(metadata, folder.transfer.read, folder.sizes_bytes(), intake)
        yield flat
    elif kind == "torch":
        with on_this_machine(source, storage_options) as path:
            with translated("Reading", path):
                flat = read_torch_file(path, intake)
            yield flat
    else:
        suffixes = (".safetensors", ".safetensors.index.json")
        of_folder = None if os.fspath(source).endswith(suffixes[0]) else lambda name: name.endswith(suffixes)
        with on_this_machine(source, storage_options, of_folder=of_folder) as path:
            with translated("Reading", path):
                flat = read_safetensors(path, intake)
            yield flat
