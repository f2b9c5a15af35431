"""The entry of one checkpoint in the record that commits it, and the facts about a thinned one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from ckptstore.errors import InvalidInput, InvalidMetric, InvalidStep
from ckptstore.format.encoding import check_seconds, is_sha256, shortened
from ckptstore.format.layout import CHECKPOINT_PREFIX, MAX_STEP, Attempt
from ckptstore.format.order import SaveOrder

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


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """The facts about one checkpoint in the log, so that a list of checkpoints opens no manifest."""

    step: int
    epoch: int
    """The writer epoch of the job that saved it."""
    attempt: str
    """The name of its directory below `checkpoints/`."""
    manifest_sha256: str
    """The SHA-256 of the manifest's exact bytes, hexadecimal."""
    kind: Literal["directory", "state"]
    world_size: int
    size_bytes: int
    """The bytes of all files, without the manifest."""
    num_files: int
    created_at: float
    """Seconds since the epoch by the leader's clock; for people, never for decisions."""
    own_bytes: int | None = None
    """The bytes of the files in its own directory; None if all are there, and in earlier records."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    bases: tuple[int, ...] = ()
    """The numbers of live checkpoints whose files it refers to."""
    committed_at: float | None = None
    """The time at which the original of a copy was committed, by the clock of the storage that it was copied from."""
    save_number: int = 0
    """Its number among the saves of its epoch, from 1; 0 in records from before saves were counted."""
    thinned: Thinning | None = None
    """The facts on what was dropped from it after its save; None if it is whole."""

    @property
    def order(self) -> SaveOrder:
        """Its place among all saves of the store."""
        return SaveOrder(self.epoch, self.save_number)

    @property
    def held_bytes(self) -> int:
        """The bytes in its own directory."""
        return self.size_bytes if self.own_bytes is None else self.own_bytes

    @property
    def prefix(self) -> str:
        """The key prefix of its files, with its trailing slash."""
        return f"{CHECKPOINT_PREFIX}{self.attempt}/"

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise InvalidStep(f"The step is {self.step!r}, it must be from 0 to {MAX_STEP}")
        if (
            min(self.size_bytes, self.num_files, self.save_number, self.own_bytes or 0) < 0
            or self.epoch < 1
            or self.world_size < 1
        ):
            raise InvalidInput(
                f"An epoch, number of a save, world size, size or number of files is out of range in {self!r}"
            )
        if Attempt.parse(self.attempt) is None:
            raise InvalidInput(f"{self.attempt!r} is not the name of an attempt directory")
        if not is_sha256(self.manifest_sha256):
            raise InvalidInput(f"{self.manifest_sha256!r} is not a SHA-256")
        if self.kind not in ("directory", "state"):
            raise InvalidInput(f"{self.kind!r} is not a kind of checkpoint")
        check_metrics(self.metrics)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise InvalidMetric for a value that is no number."""
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidMetric(f"The metric {shortened(repr(name))} is a {type(value).__name__}, not a number")
