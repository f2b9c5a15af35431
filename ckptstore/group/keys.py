"""Where the messages of one lane lie on the board. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DRAIN_LANE = "drain"
"""The lane in which ranks bring fast checkpoints into the store, beside the saves that go on."""

_LANES_LIFE = "lane."
"""Before the keys of the signs of life in all other lanes but the main one: a rank is in one of them at a time."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one lane. The name of the main one is empty."""

    lane: str
    world_size: int
    fan_in: int | None = None
    """How many ranks make a block, if their answers go through a tree."""

    def answer(self, call: int, rank: int, again: int = 0) -> str:
        """What a rank answers; after `again` refusals."""
        return f"{self._exchange(call)}.{rank:05d}" + (f".{again}" if again else "")

    def behind(self, call: int, rank: int, again: int) -> str:
        """The leader's refusal of that answer."""
        return f"{self.answer(call, rank, again)}.behind"

    def result(self, call: int) -> str:
        """What the leader makes of the answers."""
        return f"{self._exchange(call)}.result"

    def bundles(self, call: int) -> dict[str, list[str]]:
        """By the key of each bundle of a tree, those of the answers in it. Empty where all ranks are one block."""
        if self.fan_in is None or self.world_size <= self.fan_in:
            return {}
        firsts = range(0, self.world_size, self.fan_in)
        return {self._bundle(call, first): self._block(call, first, self.fan_in) for first in firsts}

    def bundle_of_head(self, call: int, rank: int) -> tuple[str, list[str]] | None:
        """What a rank that is the head of a block posts, and the answers in it."""
        if self.fan_in is None or self.world_size <= self.fan_in:
            return None
        first = rank - rank % self.fan_in
        if rank != max(1, first):
            return None
        return self._bundle(call, first), self._block(call, first, self.fan_in)

    def _bundle(self, call: int, first: int) -> str:
        return f"{self._exchange(call)}.bundle.{first:05d}"

    def _block(self, call: int, first: int, fan_in: int) -> list[str]:
        return [self.answer(call, rank) for rank in range(max(1, first), min(first + fan_in, self.world_size))]

    def gone(self, call: int) -> str:
        """Left by a rank that has given up waiting for the result."""
        return f"{self._exchange(call)}.gone"

    def of_call(self, call: int, refused: Mapping[int, int]) -> list[str]:
        """All keys of an exchange; `refused` has the number of refusals by rank."""
        keys = [self.result(call)] if self.lane else [self.result(call), self.gone(call)]
        keys += [self.answer(call, rank) for rank in range(1, self.world_size)]
        keys += self.bundles(call)
        for rank, times in refused.items():
            keys += [self.answer(call, rank, again) for again in range(1, times + 1)]
            keys += [self.behind(call, rank, again) for again in range(times)]
        return keys

    def life(self, rank: int) -> str:
        """The signs of life of a rank. Who drains and hangs in a save must not seem to live in that save."""
        before = f"{DRAIN_LANE}." if self.lane == DRAIN_LANE else _LANES_LIFE if self.lane else ""
        return f"{before}life.{rank:05d}"

    def _exchange(self, call: int) -> str:
        return f"{self.lane}.{call:08d}" if self.lane else f"{call:08d}"
