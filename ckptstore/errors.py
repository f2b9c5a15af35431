"""Every error that ckptstore raises, in one tree, grouped by what a handler would do about it.

    CkptstoreError
    +-- InvalidInput (also ValueError)      mend the call; nothing was written
    |   +-- InvalidStep
    |   +-- InvalidName
    |   +-- InvalidMetric
    |   +-- InvalidMetadata
    |   +-- InvalidSource                   a directory or file that cannot be saved
    |   +-- InvalidState                    a state that cannot be stored
    |   +-- StepExists
    +-- StateMismatch                       the checkpoint does not fit the state it is loaded into
    |   +-- CheckpointThinned               it lacks what thinning dropped; load the rest with include=
    +-- SourceChanged                       a file changed or vanished while it was read; save again
    +-- CheckpointDamaged                   use another checkpoint; `ckptstore verify` names the files
    |   +-- RecordMissing                   a record of the log is lost, or has not arrived yet in a replica
    +-- CheckpointGone                      it was removed; the message names what is left
    +-- NoUsableCheckpoint                  every candidate failed; the message says why each did
    +-- StoreMissing                        no store at that URI
    +-- StoreFenced                         a newer job owns the store; stop this one
    +-- StoreForked                         the log has two histories; writing is refused
    +-- StoreNotShared                      the ranks do not see the same directory
    +-- UnsupportedVersion                  written by a newer ckptstore; upgrade
    +-- RankFailed                          another rank raised an error that is not one of these
    |   +-- RankTimeout                     a rank gave no sign of life
    +-- GroupMissing                        several processes, but nothing says how they reach each other
    +-- SaveBusy                            an asynchronous save is still in flight
    +-- NotDurable                          a fast checkpoint is not in the store; it is on the disks of the nodes
    +-- CacheError                          the node cache cannot be used
    +-- StorageError (also OSError)
        +-- FileMissing (also FileNotFoundError)
        +-- AccessDenied (also PermissionError)
        +-- StorageFull
        +-- StorageArchived                 in an archive class: readable once it was restored from there
        +-- StorageUnavailable              timed out, reset, in trouble: worth another try
            +-- StorageThrottled            too many requests: worth another try, and fewer at once

`code` and `exit_code` are stable: they are added to, never renamed. Every error survives pickling, and travels
between ranks as JSON (`to_wire`, `from_wire`), never as a pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

logger = logging.getLogger("ckptstore")

_WIRE_FIELDS = {"step": int, "rank": int, "file": str, "hint": str, "committed": bool, "ranks": list}


class CkptstoreError(Exception):
    """The root of the tree.

    `step`, `rank` and `file` say where it happened, `hint` what to do about it, `ranks` which ranks are concerned.
    `committed` is False when the checkpoint that was being saved cannot become visible, True when it is visible,
    None when that is not known.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        file: str | None = None,
        hint: str | None = None,
        committed: bool | None = False,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.rank = rank
        self.file = file
        self.hint = hint
        self.committed = committed
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        places = (("step", self.step), ("rank", self.rank), ("file", self.file))
        where = ", ".join(f"{word} {value}" for word, value in places if value is not None)
        text = f"{self.message.removesuffix('.')} ({where})" if where else self.message
        if not self.hint:
            return text
        return f"{text} {self.hint}" if text.endswith((".", "?")) else f"{text}. {self.hint}"

    def at(self, *, step: int | None = None, rank: int | None = None, file: str | None = None) -> CkptstoreError:
        """Fill in the places that are still unknown, and return the same error."""
        self.step = step if self.step is None else self.step
        self.rank = rank if self.rank is None else self.rank
        self.file = file if self.file is None else self.file
        return self

    def to_wire(self) -> dict[str, Any]:
        """Return the error as JSON, for another rank."""
        fields = {name: getattr(self, name) for name in _WIRE_FIELDS if getattr(self, name) not in (None, ())}
        return {"code": self.code, "message": self.message, "committed": self.committed, **fields}


class InvalidInput(CkptstoreError, ValueError):
    """An argument cannot be used as it is. Nothing was written."""

    code, exit_code = "invalid-input", 2


class InvalidStep(InvalidInput):
    """A step is negative or not an integer, or differs between ranks."""

    code = "invalid-step"


class InvalidName(InvalidInput):
    """A file name is absolute, leaves its directory, collides with another one, is too long or is reserved."""

    code = "invalid-name"


class InvalidMetric(InvalidInput):
    """A metric is not a number, or one that retention ranks by is missing."""

    code = "invalid-metric"


class InvalidMetadata(InvalidInput):
    """Metadata has something that JSON cannot hold."""

    code = "invalid-metadata"


class InvalidSource(InvalidInput):
    """A directory or file cannot be saved: it is missing, unreadable, a device, or a link that leads outside."""

    code = "invalid-source"


class InvalidState(InvalidInput):
    """A state holds a value that cannot be stored; the message gives its path."""

    code = "invalid-state"


class StepExists(InvalidInput):
    """The step is committed already, and `exists="error"` forbids to replace it."""

    code, exit_code = "step-exists", 6


class StateMismatch(CkptstoreError):
    """The checkpoint and the state that it is loaded into differ; the first ten keys of each difference are listed."""

    code, exit_code = "state-mismatch", 8


class CheckpointThinned(StateMismatch):
    """The checkpoint lacks keys that were dropped from it after its save; the message has the patterns and the time."""

    code, exit_code = "checkpoint-thinned", 26


class SourceChanged(CkptstoreError):
    """A file changed or vanished while it was read."""

    code, exit_code = "source-changed", 7


class CheckpointDamaged(CkptstoreError):
    """Stored bytes are not those that were written: missing, truncated, flipped or swapped."""

    code, exit_code = "checkpoint-damaged", 3


class RecordMissing(CheckpointDamaged):
    """Newer records of the log are there, and this one is not: it is lost, or has not arrived yet in a replica."""

    code, exit_code = "record-missing", 27


class CheckpointGone(CkptstoreError):
    """The checkpoint existed and was removed."""

    code, exit_code = "checkpoint-gone", 4


class NoUsableCheckpoint(CkptstoreError):
    """No checkpoint could be used; the message says why for each one that was tried."""

    code, exit_code = "no-usable-checkpoint", 5


class StoreMissing(CkptstoreError):
    """There is no store at that URI, or it went away while it was used."""

    code, exit_code = "store-missing", 10


class StoreFenced(CkptstoreError):
    """A job with a higher writer epoch has claimed the store. Nothing of this job can be committed any more."""

    code, exit_code = "store-fenced", 11


class StoreForked(CkptstoreError):
    """The chain of digests in the log does not hold. The store can be read, not written."""

    code, exit_code = "store-forked", 12


class StoreNotShared(CkptstoreError):
    """The root is not one and the same place for all ranks."""

    code, exit_code = "store-not-shared", 13


class UnsupportedVersion(CkptstoreError):
    """An object was written in a newer major version of the format."""

    code, exit_code = "unsupported-version", 14


class RankFailed(CkptstoreError):
    """A rank failed with an error of its own; the message carries its type and text."""

    code, exit_code = "rank-failed", 20


class RankTimeout(RankFailed):
    """A rank gave no sign of life until the deadline; `ranks` names those that were waited for."""

    code, exit_code = "rank-timeout", 21


class GroupMissing(CkptstoreError):
    """WORLD_SIZE says that there are several processes, but there is no group to reach them."""

    code, exit_code = "group-missing", 22


class SaveBusy(CkptstoreError):
    """An asynchronous save is in flight, and `on_busy="error"` forbids to wait."""

    code, exit_code = "save-busy", 23


class CacheError(CkptstoreError):
    """The node cache directory is not safe to use, or a download in it did not end in time."""

    code, exit_code = "cache-error", 24


class NotDurable(CkptstoreError):
    """The job ended before a fast checkpoint was in the store. It stays on the disks of the nodes."""

    code, exit_code = "not-durable", 25


class StorageError(CkptstoreError, OSError):
    """A storage refused or failed in a way that has no class of its own."""

    code, exit_code = "storage-error", 30


class FileMissing(StorageError, FileNotFoundError):
    """A file is not there."""

    code, exit_code = "file-missing", 31


class AccessDenied(StorageError, PermissionError):
    """The storage does not let this process do it."""

    code, exit_code = "access-denied", 32


class StorageFull(StorageError):
    """No space or quota is left; the message has the bytes needed and free where they are known."""

    code, exit_code = "storage-full", 33


class StorageArchived(StorageError):
    """An object lies in an archive class, and cannot be read before it is restored from there."""

    code, exit_code = "storage-archived", 36


class StorageUnavailable(StorageError):
    """Throttling, a timeout, a reset, a server error: the same request may go through later."""

    code, exit_code = "storage-unavailable", 34
    retryable = True


class StorageThrottled(StorageUnavailable):
    """The storage asks for fewer requests. They may go through later, and sooner when fewer come at once."""

    code, exit_code = "storage-throttled", 35


@contextmanager
def besides(first: BaseException | None) -> Iterator[None]:
    """Log an error of the context, and note it in `first`, if there is one: an interrupt, or the user's own error, is
    what the program has to hear of. Without one, raise the error."""
    try:
        yield
    except CkptstoreError as error:
        if first is None or error is first:
            raise
        first.add_note(f"Besides: {error}")
        logger.error("besides a %s: %s", type(first).__name__, error)


def _subclasses(cls: type[CkptstoreError]) -> list[type[CkptstoreError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


def all_errors() -> dict[str, type[CkptstoreError]]:
    """Return every class of the tree by its code; one that has that of its parent, as those of storages may, stands for
    it."""
    return {cls.code: cls for cls in _subclasses(CkptstoreError) if "code" in vars(cls)}


def to_wire(error: BaseException, *, rank: int, step: int | None = None) -> dict[str, Any]:
    """Convert any exception to JSON for other ranks; what is not a CkptstoreError becomes a RankFailed."""
    if not isinstance(error, CkptstoreError):
        error = RankFailed(f"{type(error).__name__}: {error}")
    return error.at(rank=rank, step=step).to_wire()


def from_wire(wire: Mapping[str, Any]) -> CkptstoreError:
    """Return the error that `to_wire` described. An unknown code becomes a RankFailed with the same text.

    A field that is not what `to_wire` writes is left out, and then it is not known whether anything was committed.
    """
    cls = all_errors().get(str(wire.get("code")), RankFailed)
    fields = {name: wire[name] for name in _WIRE_FIELDS if _is_wire_field(name, wire.get(name))}
    return cls(str(wire.get("message")), **{"committed": None, **fields, "ranks": tuple(fields.get("ranks", ()))})


def _is_wire_field(name: str, value: Any) -> bool:
    if name == "ranks":
        return isinstance(value, list | tuple) and all(type(rank) is int for rank in value)
    return type(value) is _WIRE_FIELDS[name]
