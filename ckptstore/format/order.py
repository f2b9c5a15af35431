"""The one order of all saves of a store, and the intervals of void fast checkpoints (format-v1, "The order of saves").

A save is known by its writer epoch and its number within that epoch. A job that goes on from a save abandons all newer
ones: they lead to a future that did not happen. The abandoned saves form an open interval of the order, so neither a
clock nor a request to the job that made them is needed to find them. The log keeps such intervals. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptstore.format.encoding import as_list

MAX_VOIDS = 16
"""The most intervals in a record. Above it the two oldest are joined, with everything between them."""
_MOST = 10**18
"""The highest epoch and number of a save."""


class SaveOrder(NamedTuple):
    """The place of one save among all saves of its store. Compares as the saves follow on each other."""

    epoch: int
    """The writer epoch of the job that made it."""
    save_number: int
    """The number from 1 within the epoch; 0 is before all saves of the epoch."""

    def __str__(self) -> str:
        return f"save {self.save_number} of epoch {self.epoch}"

    @staticmethod
    def of(epoch: Any, save_number: Any) -> SaveOrder:
        """Check both values and return the place. Raises ValueError."""
        for value in (epoch, save_number):
            if type(value) is not int or not 0 <= value <= _MOST:
                raise ValueError("an epoch or the number of a save is no number from 0 on")
        return SaveOrder(epoch, save_number)


BEGINNING = SaveOrder(0, 0)
"""The place before every save."""


@dataclass(frozen=True, slots=True, order=True)
class Void:
    """Every fast checkpoint strictly between two places is void: nobody may resume from it."""

    after: SaveOrder
    """The place of the save that the job went on from."""
    before: SaveOrder
    """The place at which the saves that continue it begin."""

    def __post_init__(self) -> None:
        if not self.after < self.before:
            raise ValueError(f"nothing lies between {self.after} and {self.before}")

    def __contains__(self, order: SaveOrder) -> bool:
        return self.after < order < self.before

    def to_json(self) -> list[int]:
        """Return the interval as records have it."""
        return [*self.after, *self.before]

    @staticmethod
    def from_json(value: Any) -> Void:
        """Read the interval of a record. Raises ValueError or TypeError if it is not one."""
        epoch, save_number, *before = as_list(value)
        return Void(SaveOrder.of(epoch, save_number), SaveOrder.of(*before))


def with_void(voids: Iterable[Void], more: Void) -> tuple[Void, ...]:
    """Return the intervals with one more, in order and disjoint.

    If there would be more than `MAX_VOIDS`, the oldest are joined, which voids the saves between them too. They are so
    many starts old that nobody would resume from them.
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
    """Return the interval in which a save lies, None if it is not void."""
    return next((void for void in voids if order in void), None)
