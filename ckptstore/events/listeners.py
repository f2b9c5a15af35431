"""Define events, and deliver them to listeners and to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform

logger = logging.getLogger("ckptstore")

T = TypeVar("T", bound="Event")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The root of all events."""

    level: ClassVar[int] = logging.INFO
    only_rank_0: ClassVar[bool] = False
    template: ClassVar[str] = ""

    def log_level(self) -> int:
        """Return the level of its line in the log; 0 if it has none."""
        is_quiet = self.only_rank_0 and getattr(self, "rank", 0) != 0
        return logging.DEBUG if is_quiet else self.level

    def line(self) -> str:
        """Return its line in the log."""
        fields = asdict(self)
        if self.template:
            return self.template.format_map(fields)
        return f"{type(self).__name__} {' '.join(f'{name}={value}' for name, value in fields.items())}"

    def to_json(self) -> dict[str, Any]:
        """Return its fields, and the name of its class as "event"; `json.dumps` takes them all."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def event(*, level: int = logging.INFO, only_rank_0: bool = False, line: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class of events: a frozen dataclass with keywords alone.

    `line` is its line in the log, with fields in braces; a class whose line is not constant defines the method instead.
    With `only_rank_0` the lines of other ranks are logged at DEBUG.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.level, made.only_rank_0, made.template = level, only_rank_0, line
        return made

    return decorate


@event(level=logging.NOTSET)
class EndEvent(Event):
    """The root of the events of a save or load that has ended on this rank, well or not."""

    rank: int
    store: str
    """The URI, without secrets."""
    started_at: float
    """The time of the call, in seconds since the epoch by this machine's clock."""
    seconds: float
    """From the call to the end, on this rank."""
    size_bytes: int
    """Stored or read by this rank."""
    requests: int
    """Tries of requests to the storage, on this rank."""
    retries: int
    """Those of them that were made again."""
    error_type: str | None
    """The class of the error that it ended with."""


Listener = Callable[[Event], None]

_listeners: list[tuple[Listener, tuple[type[Event], ...]]] = []
"""Each with the classes of events that it wants."""


def log_event(event: Event) -> None:
    """Log one line for an event, the default listener; the record's `event` attribute is `to_json` of the event."""
    level = event.log_level()
    if level and logger.isEnabledFor(level):
        # Handlers of others put the attributes into JSON, and print a traceback for each that does not fit.
        logger.log(level, "%s", event.line(), extra={"event": event.to_json()})


_LOG: tuple[Listener, tuple[type[Event], ...]] = (log_event, (Event,))


def is_heard(event: type[Event]) -> bool:
    """Return True if a listener or the log takes events of that class; check it before making them by the thousand."""
    for _, wanted in _listeners:
        if issubclass(event, wanted):
            return True
    return event.level > 0 and logger.isEnabledFor(event.level)


def emit(event: Event) -> None:
    """Deliver an event to all listeners."""
    for listener, wanted in (_LOG, *_listeners):
        try:
            if isinstance(event, wanted):
                listener(event)
        except Exception:  # a listener must never fail a save
            logger.exception("a listener failed on %s", type(event).__name__)


@contextmanager
def listening(listener: Listener, *wanted: type[Event]) -> Iterator[None]:
    """Call `listener` with every event of this process, or those of some classes, while the context lasts.

    Events that come by the thousand, such as `FileStored`, are not even made where nobody wants them.
    """
    entry = (listener, wanted or (Event,))
    _listeners.append(entry)
    try:
        yield
    finally:
        _listeners.remove(entry)
