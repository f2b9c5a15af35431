"""Drafts: checkpoints that are being written, as all ranks of a job see them; and their commit, the work of a rename.

    checkpoints/<attempt>/<file>                               the bytes
    group/<token>/drafts/<name>/<try>/f=<file>                 the receipt of a file: it is stored whole
    group/<token>/drafts/<name>/<try>/d=<directory>            a directory that a rank made
    group/<token>/drafts/<name>/<try>.sealed                   its commit has begun: nothing is written to it any more

A listing of receipts is the directory. The keys below `group/` are removed with the commit; `ckptstore gc` removes
those of a dead job.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import quote, unquote

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing, StorageError
from ckptstore.format.digest import BLOCK_BYTES, column_bytes, unpacked
from ckptstore.format.encoding import as_text, parse_json, shortened
from ckptstore.format.layout import GROUP_PREFIX, Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.integrations.torch_checkpointing.paths import BLOCKS_NAME, METADATA_KEY, StoredPath
from ckptstore.integrations.torch_checkpointing.streams import CheckedFile
from ckptstore.job import Job
from ckptstore.runtime.parallel import mapped
from ckptstore.saving.commit import commit, tell
from ckptstore.saving.log_publisher import prune_behind
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents
from ckptstore.storage.base import Storage
from ckptstore.transfer import Stored, Transfer
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import MemorySource

logger = logging.getLogger("ckptstore")

_SEALED = ".sealed"
_READERS = 16


def encoded_blocks(stored: Stored) -> str:
    """Return the digest of each block of 1 MiB: little-endian integers in base64."""
    return base64.b64encode(b"".join(stored.block_digests)).decode()


def checked_file(prefix: str, receipt: Receipt, blocks: str | None) -> CheckedFile:
    """Return the file below `prefix` with the digests of its blocks. Raises CheckpointDamaged if they are damaged."""
    try:
        data = base64.b64decode(as_text(blocks), validate=True)
    except ValueError:
        data = b"?"
    if receipt.digest is None or len(data) != column_bytes(receipt.digest.algorithm, receipt.size_bytes):
        raise CheckpointDamaged(f"The digests of the blocks of {receipt.name} are damaged", file=receipt.name)
    digests = unpacked(receipt.digest.algorithm, data)
    return CheckedFile(prefix + receipt.name, receipt.size_bytes, digests)


@dataclass(frozen=True, slots=True)
class JobStart:
    """One start of a job, as one of its ranks knows it."""

    token: str
    """Equal on all ranks, new for every start."""
    since: int
    """The number of a record that was in the log before any rank wrote; 0 for an empty log."""
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Draft:
    """One try at writing a checkpoint."""

    storage: Storage
    name: str
    prefix: str
    """The prefix of its receipts' keys."""
    number: int
    """The number of the try, from 0."""

    @staticmethod
    def current(storage: Storage, token: str, name: str) -> Draft:
        """Return the open try: the first one that is not sealed. All ranks find the same, whichever comes first."""
        prefix = f"{GROUP_PREFIX}{token}/drafts/{quote(name, safe='')}/"
        listed = [file.key.removeprefix(prefix) for file in storage.list(prefix)]
        number = sum(key.endswith(_SEALED) and "/" not in key for key in listed)
        return Draft(storage, name, f"{prefix}{number}", number)

    def attempt(self, step: int, epoch: int, token: str) -> Attempt:
        """Return the directory of its bytes: the same on all ranks of one job, and unique to this try."""
        return Attempt(step, epoch, sha256(f"{token}/{self.name}/{self.number}".encode()).hexdigest()[:8])

    def entries(self) -> tuple[set[str], set[str]]:
        """Return the files and the directories. Without directories there is no draft."""
        files: set[str] = set()
        directories: set[str] = set()
        for file in self.storage.list(f"{self.prefix}/"):
            kind, _, name = file.key.removeprefix(f"{self.prefix}/").partition("=")
            (files if kind == "f" else directories).add(unquote(name))
        return files, directories

    def make_directories(self, names: Iterable[str]) -> None:
        """Create directories, "" is that of the draft itself; existing ones are no error."""
        for name in names:
            self._put(f"d={quote(name, safe='')}", b"{}")

    def store(self, transfer: Transfer, attempt: Attempt, name: str, views: Sequence[memoryview], *, rank: int) -> None:
        """Store a file. Its receipt is written after its bytes, and an earlier one is removed before."""
        self.forget(name)
        size_bytes = sum(map(len, views))
        source = MemorySource(views, payloads=((0, size_bytes),) if size_bytes else ())
        stored = transfer.upload([PlannedFile(attempt.key(name), source)])[0]
        receipt = Receipt(name, size_bytes, stored.digest, rank, attempt=str(attempt))
        value = {"receipt": receipt.to_json(), "blocks": encoded_blocks(stored)}
        self._put(self._file(name), json.dumps(value).encode())

    def read(self, name: str) -> tuple[Receipt, str]:
        """Return the receipt of a file, with the directory of its bytes, and the digests of its blocks, as
        `encoded_blocks` writes them. Raises FileMissing, CheckpointDamaged."""
        data = self.storage.read(f"{self.prefix}/{self._file(name)}")
        try:
            value = parse_json(data)
            return Receipt.from_json(value["receipt"]), as_text(value["blocks"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = shortened(repr(error))
            raise CheckpointDamaged(f"What was noted of {name} is not in the format: {what}", file=name) from None

    def read_all(self, names: Iterable[str]) -> list[tuple[Receipt, str]]:
        """Read many files, several at a time."""
        return mapped(self.read, list(names), num_threads=_READERS, name="ckptstore-drafts")

    def forget(self, name: str) -> None:
        """Remove the receipt of a file, if there is one."""
        self.storage.delete([f"{self.prefix}/{self._file(name)}"])

    def seal(self) -> None:
        """Close the draft: later ranks open the next try."""
        self._write(f"{self.prefix}{_SEALED}", b"{}")

    def remove(self) -> None:
        """Remove its receipts and directories. The seal stays: it determines the number of the next try."""
        self.storage.delete([file.key for file in self.storage.list(f"{self.prefix}/")])
        self.storage.remove_directories(self.prefix)

    def _file(self, name: str) -> str:
        return f"f={quote(name, safe='')}"

    def _put(self, name: str, data: bytes) -> None:
        self._write(f"{self.prefix}/{name}", data)

    def _write(self, key: str, data: bytes) -> None:
        self.storage.write(key, [memoryview(data)])
        self.storage.persist([key])


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
    value = json.dumps({"version": 1, "block_bytes": BLOCK_BYTES, "files": blocks}).encode()  # to check parts of files
    stored = job.transfer.upload([PlannedFile(attempt.key(BLOCKS_NAME), MemorySource([memoryview(value)]))])[0]
    receipts.append(Receipt(BLOCKS_NAME, stored.size_bytes, stored.digest, start.rank))
    occupied = {name[:at] for name in (*names, *directories) for at, char in enumerate(name) if char == "/"}
    empty = sorted(directories - occupied - {""})
    request = Request(step=place.step, kind="directory", metadata={METADATA_KEY: {"name": place.name}})
    record = commit(job, request, attempt, Contents(receipts, empty))
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
