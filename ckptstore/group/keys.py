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

    def answer(self, call: int, rank: int, again: int = 0) -> str:
        """What a rank answers; after `again` refusals."""
        return f"{self._meeting(call)}.{rank:05d}" + (f".{again}" if again else "")

    def behind(self, call: int, rank: int, again: int) -> str:
        """The leader's refusal of that answer."""
        return f"{self.answer(call, rank, again)}.behind"

    def result(self, call: int) -> str:
        """What the leader makes of the answers."""
        return f"{self._meeting(call)}.result"

    def gone(self, call: int) -> str:
        """Left by a rank that has given up waiting for the result."""
        return f"{self._meeting(call)}.gone"

    def of_call(self, call: int, refused: Mapping[int, int]) -> list[str]:
        """Return all keys of a meeting; `refused` has the number of refusals by rank."""
        keys = [self.result(call)] if self.lane else [self.result(call), self.gone(call)]
        keys += [self.answer(call, rank) for rank in range(1, self.world_size)]
        for rank, times in refused.items():
            keys += [self.answer(call, rank, again) for again in range(1, times + 1)]
            keys += [self.behind(call, rank, again) for again in range(times)]
        return keys

    def life(self, rank: int) -> str:
        """The signs of life of a rank. Who drains and hangs in a save must not seem to live in that save."""
        before = f"{DRAIN_LANE}." if self.lane == DRAIN_LANE else _LANES_LIFE if self.lane else ""
        return f"{before}life.{rank:05d}"

    def _meeting(self, call: int) -> str:
        return f"{self.lane}.{call:08d}" if self.lane else f"{call:08d}"
