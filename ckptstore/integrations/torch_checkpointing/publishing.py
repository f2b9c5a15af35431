"""Publish a draft as a checkpoint: the work of a rename."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError, FileMissing, StorageError
from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.integrations.torch_checkpointing.committed import METADATA_KEY
from ckptstore.integrations.torch_checkpointing.drafts import Draft
from ckptstore.integrations.torch_checkpointing.job_start import JobStart
from ckptstore.integrations.torch_checkpointing.paths import BLOCKS_NAME, StoredPath
from ckptstore.job import Job
from ckptstore.saving.commit import tell
from ckptstore.saving.log_publisher import LogPublisher, prune_behind
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import MemorySource

logger = logging.getLogger("ckptstore")


@dataclass(slots=True)
class Writing:
    """A draft that this process writes to."""

    draft: Draft
    attempt: Attempt
    directories: set[str] = field(default_factory=set)
    """The directories that are known to exist."""
    is_sealed: bool = False
    """True once this process has begun to commit it."""


def publish(job: Job, start: JobStart, writing: Writing, place: StoredPath) -> None:
    """Commit the draft. It is sealed first, so that no rank that goes on to another save writes into it.

    Raises FileNotFoundError if nothing was written, and the errors of a commit.
    """
    began = time.monotonic()
    draft, attempt = writing.draft, writing.attempt
    names, directories = draft.entries()
    if not directories:
        raise FileMissing(f"There is no directory {place.path} in {job.storage.uri}", file=place.path)
    writing.is_sealed = True
    draft.seal()
    names, directories = draft.entries()
    files = draft.read_all(sorted(names))
    receipts = [_of_attempt(receipt, attempt) for receipt, _ in files]
    blocks = {receipt.name: blocks for receipt, blocks in files}
    receipts.append(_write_blocks(job, attempt, blocks, rank=start.rank))
    occupied = {name[:at] for name in names for at, char in enumerate(name) if char == "/"}
    empty = _leaves(directories - occupied - {""})
    request = Request(step=place.step, kind="directory", metadata={METADATA_KEY: {"name": place.name}})
    record = LogPublisher(job, world_size=start.world_size).commit(request, attempt, Contents(receipts, empty))
    tell(record, job.storage, rank=start.rank, seconds=time.monotonic() - began)
    try:
        draft.remove()
    except CkptstoreError as error:
        logger.warning("%s is committed; what its ranks left at %s stays: %s", place.name, draft.prefix, error)
    prune_behind(job)


def _of_attempt(receipt: Receipt, attempt: Attempt) -> Receipt:
    if receipt.attempt != str(attempt):
        raise StorageError(f"{receipt.name} was stored in {receipt.attempt}, not in {attempt}", rank=receipt.rank)
    return receipt._replace(attempt=None)


def _leaves(directories: set[str]) -> list[str]:
    """Return the directories without other directories in them."""
    return sorted(name for name in directories if not any(other.startswith(f"{name}/") for other in directories))


def _write_blocks(job: Job, attempt: Attempt, blocks: dict[str, str], *, rank: int) -> Receipt:
    """Write the digests of all blocks as one file of the checkpoint, by which parts of files are checked."""
    value = {"version": 1, "block_bytes": BLOCK_BYTES, "files": blocks}
    source = MemorySource([memoryview(json.dumps(value).encode())])
    stored = job.transfer.upload([PlannedFile(attempt.key(BLOCKS_NAME), source)])[0]
    return Receipt(BLOCKS_NAME, stored.size_bytes, stored.digest, rank)
