"""The one order of all saves of a store, and which fast checkpoints are void (format-v1, "The order of saves"). Pure.

A save is known by its writer epoch and its number within that epoch. A job that goes on from a save leaves behind what
is newer: those saves lead to a future that did not happen. What is left behind is an open interval of the order, so
neither a clock nor a request to the job that made it is needed to tell it. The log keeps such intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_VOIDS = 16
"""A record holds no more. Above it the two oldest become one, with what lies between them."""
_MOST = 10**18
"""Epochs and numbers of saves are at most this."""


class SaveOrder(NamedTuple):
    """The place of one save among all saves of its store. Compares as the saves follow on each other."""

    epoch: int
    """The writer epoch of the job that made it."""
    save_number: int
    """From 1 within the epoch; 0 is before all saves of the epoch."""

    def __str__(self) -> str:
        return f"save {self.save_number} of epoch {self.epoch}"

    @staticmethod
    def of(epoch: Any, save_number: Any) -> SaveOrder:
        """Check both; raises ValueError."""
        for value in (epoch, save_number):
            if type(value) is not int or not 0 <= value <= _MOST:
                raise ValueError("an epoch or the number of a save is no number from 0 on")
        return SaveOrder(epoch, save_number)


BEGINNING = SaveOrder(0, 0)
"""Before every save."""


@dataclass(frozen=True, slots=True, order=True)
class Void:
    """Every fast checkpoint strictly between two places is void: nobody may resume from it."""

    after: SaveOrder
    """What the job went on from."""
    before: SaveOrder
    """Where what came of that begins."""

    def __post_init__(self) -> None:
        if not self.after < self.before:
            raise ValueError(f"nothing lies between {self.after} and {self.before}")

    def __contains__(self, order: SaveOrder) -> bool:
        return self.after < order < self.before

    def to_json(self) -> list[int]:
        """As records have it."""
        return [*self.after, *self.before]

    @staticmethod
    def from_json(value: Any) -> Void:
        """Raises ValueError when it is not one."""
        if not isinstance(value, list) or len(value) != 4:
            raise ValueError("an interval is not a list of four numbers")
        return Void(SaveOrder.of(*value[:2]), SaveOrder.of(*value[2:]))


def with_void(voids: Iterable[Void], more: Void) -> tuple[Void, ...]:
    """The intervals with one more, in order and apart from each other.

    The oldest are joined where there would be more than `MAX_VOIDS`. That voids some that were not: as many starts ago,
    nothing is lost that anybody would resume from.
    """
    joined: list[Void] = []
    for void in sorted([*voids, more]):
        if joined and void.after < joined[-1].before:
            joined[-1] = Void(joined[-1].after, max(joined[-1].before, void.before))
        else:
            joined.append(void)
    while len(joined) > MAX_VOIDS:
        joined[:2] = [Void(joined[0].after, joined[1].before)]
    return tuple(joined)


def void_of(voids: Iterable[Void], order: SaveOrder) -> Void | None:
    """The interval in which a save lies, None if it is not void."""
    return next((void for void in voids if order in void), None)
