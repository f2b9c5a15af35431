"""Events: what ckptstore does, as it does it, for whoever listens.

A listener is any callable that takes an event. It is called on the thread where the event happens, so it is quick and
does not raise: what it raises is logged and dropped. Without a listener of your own, events go to the log
"ckptstore", at the level of their class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
    """From the call of the save to its end, the wait for a copy in the background included. Of a fast checkpoint: how
    long it took to bring it into the store."""
    world_size: int = 1
    slowest_rank: int | None = None
    """The rank that took longest to store its files; None with one rank, and where it is not known."""
    slowest_by_seconds: float = 0.0
    """How much longer it took than the rank in the middle."""
    store: str = ""
    """The root of the store, without secrets."""
    attempt: str = ""
    """The name of its directory below `checkpoints/` in the store."""
    manifest_sha256: str = ""
    """As the record has it: what tells the checkpoint from any other one."""
    created_at: float = 0.0
    """Seconds since the epoch by the leader's clock."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

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
class FastCommitted(Event):
    """A fast checkpoint is whole on the nodes, and not in the store (yet). The log of rank 0 has its line at INFO."""

    step: int
    attempt: str
    rank: int
    size_bytes: int
    """Of all ranks together, each file once."""
    seconds: float
    """From the call of the save to its end, the wait for a copy in the background included."""
    world_size: int
    num_nodes: int
    """On how many nodes the files lie."""
    slowest_rank: int | None
    """The rank that took longest to store its files; None with one rank, and where it is not known."""
    slowest_by_seconds: float
    """How much longer it took than the rank in the middle."""
    save_number: int
    """Its number among the saves of its job."""
    store: str
    """The root of the store that it belongs to, without secrets."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        text = f"step {self.step} is on the disks of {self.num_nodes} nodes: {show_move(self.size_bytes, self.seconds)}"
        if self.slowest_rank is not None:
            text += f", slowest rank {self.slowest_rank} by {show_seconds(self.slowest_by_seconds)}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFull(Event):
    """A disk of a node is full, so a save goes to the store directly."""

    level: ClassVar[int] = logging.WARNING
    step: int
    rank: int
    error: str

    def line(self) -> str:
        return f"step {self.step} goes to the store directly, since the disk of a node is full: {self.error}"


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
class SaveEnded(Event):
    """A save has ended on this rank, well or not. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int
    attempt: str
    """Empty when the ranks have not agreed on one."""
    rank: int
    store: str
    """The URI, without secrets."""
    started_at: float
    """When it was called, in seconds since the epoch by this machine's clock."""
    seconds: float
    """From the call to the end, on this rank."""
    stalled_seconds: float
    """How much of that the training was held up: all of it, but for a save in the background."""
    in_background: bool
    size_bytes: int
    """What this rank stored."""
    requests: int
    """Tries of requests to the storage, on this rank."""
    retries: int
    """Those of them that were made again."""
    error_type: str | None
    """The class of the error that it ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPhase(Event):
    """A phase of a load has ended on this rank. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int | None
    """None as long as it is not known which checkpoint is loaded."""
    number: int | None
    rank: int
    load: str
    """Which load of this process."""
    phase: str
    """"open" (find out what is stored), "read" (move the bytes) or "apply" (finish modules and optimizers). Of damaged
    checkpoints that were tried before there are phases too."""
    started_at: float
    """When it began, in seconds since the epoch by this machine's clock."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnded(Event):
    """A load has ended on this rank, well or not. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int | None
    """None when no checkpoint was found."""
    number: int | None
    rank: int
    load: str
    """Which load of this process: that of its phases."""
    store: str
    """The URI, without secrets."""
    started_at: float
    """When it was called, in seconds since the epoch by this machine's clock."""
    seconds: float
    size_bytes: int
    """What this rank read."""
    requests: int
    """Tries of requests to the storage, on this rank."""
    retries: int
    """Those of them that were made again."""
    error_type: str | None
    """The class of the error that it ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Event):
    """A resume passed over a checkpoint that cannot be used."""

    level: ClassVar[int] = logging.WARNING
    step: int
    number: int | None
    """None for one that no record has: it is on the disks of nodes alone."""
    reason: str

    def line(self) -> str:
        return f"step {self.step} is passed over: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResumed(Event):
    """A job goes on from a checkpoint. The log of rank 0 has its line at INFO, that of others at DEBUG."""

    step: int
    number: int | None
    """None for one that no record has: it is on the disks of nodes alone."""
    rank: int
    epoch: int
    store: str
    """The URI, without secrets."""
    created_at: float
    """When it was committed, in seconds since the epoch by the clock of its leader."""

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

_listeners: list[tuple[Listener, tuple[type[Event], ...]]] = []
"""With the classes of events that each wants."""


def log_event(event: Event) -> None:
    """The default listener: one log line for each event, for people; the record's `event` attribute is the event."""
    level = event.log_level()
    if level and logger.isEnabledFor(level):
        logger.log(level, "%s", event.line(), extra={"event": event})


_LOG: tuple[Listener, tuple[type[Event], ...]] = (log_event, (Event,))


def is_heard(event: type[Event]) -> bool:
    """Whether anybody would notice an event of that class: for those that come by the thousand."""
    for _, wanted in _listeners:
        if issubclass(event, wanted):
            return True
    return event.level > 0 and logger.isEnabledFor(event.level)


def emit(event: Event) -> None:
    """Give an event to all listeners."""
    for listener, wanted in (_LOG, *_listeners):
        try:
            if isinstance(event, wanted):
                listener(event)
        except Exception:  # a listener must never fail a save
            logger.exception("a listener failed on %s", type(event).__name__)


@contextmanager
def listening(listener: Listener, *wanted: type[Event]) -> Iterator[None]:
    """Have `listener` called with every event of this process, or those of some classes, while the context lasts.

    Events that come by the thousand, such as `FileStored`, are not even made where nobody wants them.
    """
    entry = (listener, wanted or (Event,))
    _listeners.append(entry)
    try:
        yield
    finally:
        _listeners.remove(entry)
