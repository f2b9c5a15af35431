"""What an event is, and who hears of it."""

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

    def log_level(self) -> int:
        """The level of its line in the log; 0 if it has none."""
        return self.level

    def line(self) -> str:
        """What the log says of it."""
        fields = asdict(self)
        return f"{type(self).__name__} {' '.join(f'{name}={value}' for name, value in fields.items())}"


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
