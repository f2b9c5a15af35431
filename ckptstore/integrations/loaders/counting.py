"""Passes over data that count what the training loop was given, not what workers have fetched ahead."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ckptstore.errors import InvalidInput, InvalidState, StateMismatch

logger = logging.getLogger("ckptstore")

_LATER = {"data", "turn"}
"""Names that a state may lack: it may be of an earlier version."""
_WAYS_OUT = (
    "Give the loader what it was saved with; or leave it out of the load with include=, and it begins an epoch; or "
    "save under the old arguments at the end of an epoch first"
)


class CountingLoader(ABC):
    """A loader that goes on where it is: after a load, and after a `break` out of a pass too.

    One pass is under way at a time. It counts a batch when the loop gets it, so a save in the body of the loop counts
    the batch of that body. A pass that ends begins the next epoch.
    """

    def __init__(self, batch_size: int, *, seed: int, rank: int | None, world_size: int | None) -> None:
        _check_number("batch_size", batch_size, 1)
        _check_number("seed", seed, 0)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self.rank, self.world_size = _own_place(rank, world_size)
        self._pass = object()
        self._is_complete = self._is_epoch_set = self._is_past = False
        self._first_epoch = 0
        self._generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is of, and go to its beginning unless it is under way: then the position stays.
        The pass of an epoch that was over when the position was saved is empty, so that a loop may count from 0."""
        _check_number("epoch", epoch, 0)
        self._is_past = epoch < self._first_epoch
        if epoch != self.epoch and not self._is_past:
            self._go_to(epoch)
        self._is_epoch_set = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the epoch that are left; those of the next epoch if this process was given all of it.
        Raises InvalidState in a pass that another one, a load or `set_epoch` has replaced."""
        if self._is_past:
            logger.warning(
                "a pass over a %s is empty: its epoch was over when the position was saved, in epoch %d. To train on "
                "it again, leave the loader out of the load with include=",
                *(type(self).__name__, self._first_epoch),
            )
            return
        if self._is_complete:  # who counts the batches never asks for one more, which would have ended the epoch
            self._go_to(self.epoch + 1)
        own = self._pass = object()
        # A seed of its own: torch's loader would draw one from the random numbers of the training at each start.
        self._generator.manual_seed(hash((self.seed, self.epoch, self._place(), self.rank)) & (1 << 62) - 1)
        was_under_way = self._place() > 0 or not self._has_more()
        counted = None
        for batch in self._batches():
            self._check_own(own)
            counted = self._counted(batch)
            self._is_complete = not self._has_more()
            try:
                yield counted
            except GeneratorExit:  # the loop has left the pass, by `break` for instance
                if self._is_complete and self._pass is own:
                    self._go_to(self.epoch + 1)
                raise
        self._check_own(own)
        if counted is None and was_under_way and not self._is_epoch_set:
            logger.warning(
                "a pass over a %s is empty: it is the rest of epoch %d, all of which was given before the save. The "
                "next pass is epoch %d. A loop that counts epochs itself says so with set_epoch, and loses none",
                *(type(self).__name__, self.epoch, self.epoch + 1),
            )
        self._go_to(self.epoch + 1)

    def _check_own(self, own: object) -> None:
        if self._pass is not own:
            raise InvalidState(
                f"this pass over a {type(self).__name__} is not the newest: the loader has been iterated over anew, "
                "loaded, or set to another epoch since",
                hint="Begin a new pass after a load; one that counts its batches cannot run beside another",
            )

    def _loaded(self, state: Mapping[str, Any]) -> None:
        """Take over the epoch of a state that was checked; a pass that is under way ends."""
        self._go_to(state["epoch"])
        self._first_epoch, self._is_past = self.epoch, False

    def _go_to(self, epoch: int) -> None:
        self._pass, self._is_complete, self._is_epoch_set = object(), False, False
        self._begin(epoch)

    def _check_state(self, state: Any) -> None:
        """Raise StateMismatch unless a state is one of this kind of loader, over the same data in the same order."""
        mine = self.state_dict()
        if not isinstance(state, Mapping) or state.keys() | _LATER != mine.keys() | _LATER:
            raise StateMismatch(
                f"it is not the state of a {type(self).__name__}, which has {', '.join(mine)}",
                hint="Begin its epoch anew: leave the loader out of the load with include=",
            )
        different = [name for name in self._fixed() if state[name] != mine[name]]
        if different:
            shown = ", ".join(f"{name} {state[name]!r}, and is {mine[name]!r} now" for name in different)
            raise StateMismatch(f"it was saved with {shown}: its samples would be others", hint=_WAYS_OUT)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, which counts the batches that the loop was given."""

    @abstractmethod
    def _fixed(self) -> tuple[str, ...]:
        """Return the names in the state that have to be the same at a load."""

    @abstractmethod
    def _place(self) -> int:
        """Return a number that says how far the epoch is."""

    @abstractmethod
    def _has_more(self) -> bool:
        """Return True if this rank has batches left in the epoch."""

    @abstractmethod
    def _begin(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""

    @abstractmethod
    def _batches(self) -> Iterator[Any]:
        """Yield what is left of the epoch from torch's loader."""

    @abstractmethod
    def _counted(self, batch: Any) -> Any:
        """Move the position behind a batch, and return what the loop gets of it."""


def check_options(options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raise InvalidInput for an option of torch's DataLoader that the loader decides itself; `own` says why."""
    for name in options:
        if name in own:
            raise InvalidInput(f"{name} is no option of this loader: {own[name]}")


def _check_number(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise InvalidInput(f"{name} is {value!r}, it must be a whole number of at least {least}")


def _own_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank of this process among those that have samples of their own, and their number."""
    if (rank is None) != (world_size is None):
        raise InvalidInput("rank and world_size are given together, or neither")
    if rank is not None and world_size is not None:
        _check_number("world_size", world_size, 1)
        _check_number("rank", rank, 0)
        if rank >= world_size:
            raise InvalidInput(f"rank is {rank}, and there are {world_size} ranks")
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        raise InvalidState(
            f"WORLD_SIZE is {launched}, and torch.distributed is not initialised: each rank would read everything",
            hint="Make the loader after init_process_group, or give it rank= and world_size=",
        )
    return 0, 1
