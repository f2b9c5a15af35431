"""The signs of life that ranks of a `StorageGroup` give in the store, as somebody sees them who is no rank."""

from __future__ import annotations

import re
from collections.abc import Hashable

from ckptstore.format.layout import AGAIN, GROUP_PREFIX
from ckptstore.storage.base import Storage, StoredFile
from ckptstore.tools.watching.look import SeenSigns


class SignsOfLife:
    """The signs of the ranks of one job so far. A sign is new when its file has changed since the last look."""

    def __init__(self, storage: Storage, start_token: str) -> None:
        self._storage = storage
        self._prefix = f"{GROUP_PREFIX}{start_token}"
        self._sign = re.compile(rf"{re.escape(self._prefix)}(?:{AGAIN}[0-9]+)?/(?:lane\.)?life\.([0-9]{{5,9}})")
        self._last: dict[int, tuple[Hashable, float]] = {}

    def look(self, *, now: float, wall_seconds: float) -> SeenSigns | None:
        """Ask once more; one listing. `now` is of a clock that is never set, `wall_seconds` is the time.

        None where no rank has ever given a sign. Raises StorageError.
        """
        signs: dict[int, list[StoredFile]] = {}
        for file in self._storage.list(self._prefix):
            match = self._sign.fullmatch(file.key)
            if match is not None:
                signs.setdefault(int(match[1]), []).append(file)
        for rank, found in signs.items():
            sign, known = frozenset(found), self._last.get(rank)
            if known is None:
                age_seconds = max(0.0, wall_seconds - max(file.modified_seconds for file in found))
                self._last[rank] = (sign, now - age_seconds)
            elif known[0] != sign:
                self._last[rank] = (sign, now)
        if not self._last:
            return None
        oldest = min(self._last, key=lambda rank: self._last[rank][1])
        return SeenSigns(
            num_ranks=len(self._last),
            last_seconds=max(0.0, now - max(at for _, at in self._last.values())),
            oldest_rank=oldest,
            oldest_seconds=max(0.0, now - self._last[oldest][1]),
        )
