"""The facts about a thinned checkpoint, from which some items of the state were dropped after its save. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckptstore.format.encoding import check_seconds
from ckptstore.format.layout import Attempt

_PLAIN = re.compile(r"[^*?\[]*")
"""The beginning of a pattern that stands for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """The keys that a checkpoint lacks, and what it was before. Its manifest and its record have this."""

    dropped: tuple[str, ...]
    """The patterns of the keys that were dropped; `*` stands for anything."""
    attempt: str
    """The directory of the whole checkpoint. Copies of both are known by its step and suffix."""
    size_bytes: int
    """The bytes of all files of the whole checkpoint."""
    thinned_at: float
    """Seconds since the epoch by the clock of the process that thinned it; for people, never for decisions."""

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.thinned_at, UTC)
        return f"was thinned at {at:%Y-%m-%d %H:%M} UTC, and lacks {', '.join(self.dropped)}"

    def meets(self, patterns: Iterable[str]) -> bool:
        """Return True if there can be a key that fits one of these patterns and was dropped."""
        heads = {_PLAIN.match(pattern)[0] for pattern in self.dropped}  # type: ignore[index]
        wanted = {_PLAIN.match(pattern)[0] for pattern in patterns}  # type: ignore[index]
        return any(one.startswith(other) or other.startswith(one) for one in heads for other in wanted)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as an object of a manifest or a record."""
        return {
            "dropped": list(self.dropped),
            "attempt": self.attempt,
            "size_bytes": self.size_bytes,
            "thinned_at": self.thinned_at,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Thinning:
        """Return the facts of such an object; raise KeyError, TypeError or ValueError if it is not one."""
        dropped, attempt, size_bytes = value["dropped"], value["attempt"], value["size_bytes"]
        if type(dropped) is not list or not dropped or not all(type(pattern) is str for pattern in dropped):
            raise ValueError("what was dropped is not a list of patterns")
        if type(attempt) is not str or Attempt.parse(attempt) is None:
            raise ValueError("an attempt is not the name of a directory")
        if type(size_bytes) is not int or size_bytes < 0:
            raise ValueError("a size is not a number of at least 0")
        return Thinning(
            dropped=tuple(dropped),
            attempt=attempt,
            size_bytes=size_bytes,
            thinned_at=check_seconds(value["thinned_at"]),
        )
