"""The story of a store as its records tell it, one after another: what came, what went, and how much was freed. Pure.

Records are added as they are read, so that whoever follows a store reads each of them once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError
from ckptstore.format.changes import (
    EMPTY,
    CheckpointEntry,
    Claim,
    Commit,
    Pin,
    Remove,
    Restore,
    StoreState,
    Unpin,
)
from ckptstore.format.encoding import shortened
from ckptstore.format.record import Record
from ckptstore.log.chain import record_problem
from ckptstore.log.reader import Probed
from ckptstore.report.document import SeenChange, SizePoint, Status

MOST_NAMED = 8
"""Of more checkpoints than so many, the text of a change names the first alone."""


@dataclass(slots=True)
class Life:
    """What became of one checkpoint."""

    number: int
    entry: CheckpointEntry
    status: Status = "live"
    removed_by: int = 0
    """The record that put it in the trash, or else dropped it; 0 while it is live."""
    removed_at: float | None = None
    removed_because: str = ""
    resumed_by: list[int] = field(default_factory=list)


class History:
    """What the records from 1 on tell, those that cannot be read apart."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        """Every checkpoint, by its number."""
        self.changes: list[SeenChange] = []
        """Every record."""
        self.sizes: list[SizePoint] = []
        """After every record that changed them."""
        self.problems: list[str] = []
        """What is wrong with the records or with their order."""
        self.newest: Record | None = None
        """The last one that could be read."""
        self._is_whole = True
        self._latest: int | None = None
        self._bytes: dict[Status, int] = {"live": 0, "trash": 0, "deleted": 0}

    @property
    def state(self) -> StoreState:
        """What the store holds. Raises CheckpointDamaged when the newest record does not say so."""
        return self.newest.state if self.newest else EMPTY

    def add(self, found: Probed) -> None:
        """What was found at the next number."""
        number = len(self.changes) + 1
        self.problems += record_problem(number, self.newest if self._is_whole else None, found)
        if not isinstance(found, Record):
            self._is_whole = False
            text = found.message if isinstance(found, CkptstoreError) else "the record is missing"
            at = self.changes[-1].at if self.changes else 0.0
            self.changes.append(SeenChange(number=number, at=at, kind="unreadable", text=shortened(text)))
            return
        before = dict(self._bytes)
        self.changes.append(self._told(found))
        if not self._is_whole:
            self._make_whole(found)
        self.newest, self._is_whole = found, True
        if self._bytes != before:
            self.sizes.append(
                SizePoint(
                    at=found.created_at,
                    number=number,
                    live_bytes=self._bytes["live"],
                    trash_bytes=self._bytes["trash"],
                    freed_bytes=self._bytes["deleted"],
                )
            )

    def _told(self, record: Record) -> SeenChange:
        """Follow one record, and say what it did."""
        change = record.change
        if isinstance(change, Claim):
            return self._claimed(record, change)
        if isinstance(change, Commit):
            return self._committed(record, change)
        if isinstance(change, Remove):
            return self._removed(record, change)
        if isinstance(change, Restore):
            for number in change.numbers:
                self._move(number, "live", record)
            text = f"{self._named(change.numbers)} brought back from the trash{', pinned' if change.pin else ''}"
            return _change(record, "restore", text, numbers=change.numbers, epoch=change.epoch)
        if isinstance(change, Pin | Unpin):
            kind: ChangeKind = "pin" if isinstance(change, Pin) else "unpin"
            text = f"{self._named(change.numbers)} {kind}ned"
            return _change(record, kind, text, numbers=change.numbers, epoch=change.epoch)
        return _change(record, "noop", "nothing: it takes the number of a write whose fate was unknown")

    def _claimed(self, record: Record, change: Claim) -> SeenChange:
        source = self.lives.get(self._latest or 0)
        self._epoch = max(self._epoch, change.above_epoch) + 1
        if source is not None:
            source.resumed_by.append(self._epoch)
        ranks = "1 rank" if change.world_size == 1 else f"{change.world_size} ranks"
        found = f"the latest was {self._named([source.number])}" if source else "nothing was live"
        text = f"a job of {ranks} took the store over; {found}"
        return _change(record, "claim", text, numbers=[source.number] if source else (), epoch=self._epoch)

    def _committed(self, record: Record, change: Commit) -> SeenChange:
        entry = change.entry
        self.lives[record.number] = Life(record.number, entry)
        self._bytes["live"] += entry.size_bytes
        replaced = [number for number in change.replaces if number not in self._pinned]
        for number in replaced:
            self._move(number, "trash", record, f"step {entry.step} was saved again, as number {record.number}")
        for number in change.drops:
            self._move(number, "trash", record, change.reasons.get(number) or "retention dropped it")
        self._latest = record.number
        text = f"step {entry.step} committed"
        gone = [*replaced, *change.drops]
        if gone:
            text += f"; {self._named(gone)} to the trash"
        return _change(record, "commit", text, numbers=[record.number, *gone], epoch=entry.epoch)

    def _removed(self, record: Record, change: Remove) -> SeenChange:
        is_roll_back = self._latest in change.trash
        for number in change.trash:
            self._move(number, "trash", record, change.reason)
        for number in change.drop:
            self._move(number, "deleted", record, change.reason)
        parts = []
        if change.trash:
            parts.append(f"{self._named(change.trash)} to the trash")
        if change.drop:
            parts.append(f"{self._named(change.drop)} dropped for good")
        kind: ChangeKind = "rollback" if is_roll_back else "remove" if change.trash else "prune"
        text = "; ".join(parts) + (f": {change.reason}" if change.reason else "")
        return _change(record, kind, text, numbers=[*change.trash, *change.drop], epoch=change.epoch)
