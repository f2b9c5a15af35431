"""Events: what ckptstore does, as it does it, for whoever listens.

A listener is any callable that takes an event. It is called on the thread where the event happens, so it is quick and
does not raise: what it raises is logged and dropped. Without a listener of your own, events go to the log
"ckptstore", at the level of their class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The root of all events."""

    level: ClassVar[int] = logging.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """The ranks have agreed on what to write."""

    step: int
    attempt: str
    rank: int
    num_files: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStaged(Event):
    """An asynchronous save holds a copy of the state; training goes on."""

    step: int
    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved(Event):
    """Progress of a transfer, several times for a large file. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    key: str
    size_bytes: int
    total_bytes: int
    """Of the whole transfer that this belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStored(Event):
    """One file is stored."""

    level: ClassVar[int] = logging.DEBUG
    key: str
    size_bytes: int
    seconds: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint is visible."""

    step: int
    number: int
    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save ended with an error."""

    level: ClassVar[int] = logging.ERROR
    step: int
    rank: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Event):
    """A resume passed over a checkpoint that cannot be used."""

    level: ClassVar[int] = logging.WARNING
    step: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResumed(Event):
    """A job goes on from a checkpoint."""

    step: int
    number: int
    rank: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPruned(Event):
    """Checkpoints were deleted for good."""

    steps: tuple[int, ...]
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneFailed(Event):
    """Deleting failed; it is tried again after the next commit."""

    level: ClassVar[int] = logging.WARNING
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried(Event):
    """A request to the storage failed and is tried again."""

    level: ClassVar[int] = logging.WARNING
    what: str
    error: str
    attempt: int
    wait_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyChanged(Event):
    """A transfer has fewer requests in flight than before, because the storage throttles, or more again."""

    limit: int
    """The most requests in flight from now on."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadStarted(Event):
    """This process downloads a checkpoint for its node."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadWaited(Event):
    """This process waited for another one's download."""

    step: int
    holder: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadFinished(Event):
    """The download is complete and verified."""

    step: int
    size_bytes: int
    seconds: float


Listener = Callable[[Event], None]

_listeners: list[Listener] = []


def log_event(event: Event) -> None:
    """The default listener: one log line for each event, the fields in the record's `event` attribute."""
    if event.level and logger.isEnabledFor(event.level):
        fields = asdict(event)
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        logger.log(event.level, "%s %s", type(event).__name__, text, extra={"event": event})


def is_heard(event: type[Event]) -> bool:
    """Whether anybody would notice an event of that class: for those that come by the thousand."""
    return bool(_listeners) or (event.level > 0 and logger.isEnabledFor(event.level))


def emit(event: Event) -> None:
    """Give an event to all listeners."""
    for listener in (log_event, *_listeners):
        try:
            listener(event)
        except Exception:  # a listener must never fail a save
            logger.exception("a listener failed on %s", type(event).__name__)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have `listener` called with every event of this process while the context lasts."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
