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

from ckptstore.runtime.shown import show_move, show_seconds, show_size

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The root of all events."""

    level: ClassVar[int] = logging.INFO

    def log_level(self) -> int:
        """The level of its line in the log; 0 if it has none."""
        return self.level

    def line(self) -> str:
        """What the log says of it."""
        fields = asdict(self)
        return f"{type(self).__name__} {' '.join(f'{name}={value}' for name, value in fields.items())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A rank begins to write what the ranks have agreed on."""

    level: ClassVar[int] = logging.DEBUG
    step: int
    attempt: str
    rank: int
    num_files: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStaged(Event):
    """An asynchronous save holds a copy of the state; training goes on."""

    level: ClassVar[int] = logging.DEBUG
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
class SavePhase(Event):
    """A phase of a save has ended on this rank. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int
    attempt: str
    rank: int
    phase: str
    """"agree", "stage" (asynchronous saves alone), "upload", "wait" or "commit"."""
    started_at: float
    """When it began, in seconds since the epoch by this machine's clock."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint is visible. The log of rank 0 has its line at INFO, that of others at DEBUG."""

    step: int
    number: int
    rank: int
    size_bytes: int
    """Of all ranks together."""
    seconds: float
    """From the call of the save to its end, the wait for a copy in the background included."""
    world_size: int = 1
    slowest_rank: int | None = None
    """The rank that took longest to store its files; None with one rank, and where it is not known."""
    slowest_by_seconds: float = 0.0
    """How much longer it took than the rank in the middle."""

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        text = f"step {self.step} saved: {show_move(self.size_bytes, self.seconds)}"
        if self.world_size > 1:
            text += f", {self.world_size} ranks"
        if self.slowest_rank is not None:
            text += f", slowest rank {self.slowest_rank} by {show_seconds(self.slowest_by_seconds)}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save ended with an error."""

    level: ClassVar[int] = logging.ERROR
    step: int
    rank: int
    error: str

    def line(self) -> str:
        return f"step {self.step} was not saved: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Event):
    """A resume passed over a checkpoint that cannot be used."""

    level: ClassVar[int] = logging.WARNING
    step: int
    number: int
    reason: str

    def line(self) -> str:
        return f"step {self.step} is passed over: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResumed(Event):
    """A job goes on from a checkpoint. The log of rank 0 has its line at INFO, that of others at DEBUG."""

    step: int
    number: int
    rank: int
    epoch: int

    def line(self) -> str:
        return f"resumed from step {self.step}"

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeForgotten(Event):
    """A job that did not resume makes its first save, and the store's latest checkpoint is of this or a later step."""

    level: ClassVar[int] = logging.WARNING
    step: int
    latest_step: int
    hint: str

    def line(self) -> str:
        return f"step {self.step} is the first save of this job, and step {self.latest_step} is there. {self.hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPruned(Event):
    """Checkpoints were deleted for good."""

    steps: tuple[int, ...]
    size_bytes: int
    seconds: float

    def line(self) -> str:
        return (
            f"pruned {len(self.steps)} checkpoints ({_listed(self.steps)}): {show_size(self.size_bytes)} in "
            f"{show_seconds(self.seconds)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneFailed(Event):
    """Deleting failed; it is tried again after the next commit."""

    level: ClassVar[int] = logging.WARNING
    error: str

    def line(self) -> str:
        return f"deleting from the trash failed, it is tried again after the next commit: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried(Event):
    """A request to the storage failed and is tried again."""

    level: ClassVar[int] = logging.WARNING
    what: str
    error: str
    attempt: int
    wait_seconds: float

    def line(self) -> str:
        return f"{self.what} failed, try {self.attempt + 1} comes in {show_seconds(self.wait_seconds)}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyChanged(Event):
    """A transfer has fewer requests in flight than before, because the storage throttles, or more again."""

    limit: int
    """The most requests in flight from now on."""
    reason: str

    def line(self) -> str:
        return f"at most {self.limit} requests at once from now on: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadStarted(Event):
    """This process downloads a checkpoint for its node."""

    step: int
    size_bytes: int

    def line(self) -> str:
        return f"downloading step {self.step}, {show_size(self.size_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadWaited(Event):
    """This process waited for another one's download."""

    step: int
    holder: str
    seconds: float

    def line(self) -> str:
        return f"waited {show_seconds(self.seconds)} for {self.holder} to download step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadFinished(Event):
    """The download is complete and verified."""

    step: int
    size_bytes: int
    seconds: float

    def line(self) -> str:
        return f"step {self.step} downloaded: {show_move(self.size_bytes, self.seconds)}"


def _listed(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"steps {shown}, ..." if len(steps) > 5 else f"step {shown}" if len(steps) == 1 else f"steps {shown}"


Listener = Callable[[Event], None]

_listeners: list[Listener] = []


def log_event(event: Event) -> None:
    """The default listener: one log line for each event, for people; the record's `event` attribute is the event."""
    level = event.log_level()
    if level and logger.isEnabledFor(level):
        logger.log(level, "%s", event.line(), extra={"event": event})


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
