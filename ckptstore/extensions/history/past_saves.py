"""The history of a store: every save that was committed, as the records of its log tell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ckptstore.boundary import boundary
from ckptstore.format.changes import EMPTY, Annotate, Commit, Remove
from ckptstore.format.record import Record
from ckptstore.log import Log
from ckptstore.upkeep.prune import backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSave:
    """One save that was committed, whatever became of it."""

    number: int
    step: int
    epoch: int
    """The writer epoch of the job: it grows with every start."""
    created_at: float
    """The time of the commit, in seconds since the epoch by the leader's clock."""
    world_size: int
    size_bytes: int
    kind: str
    status: Literal["live", "trash", "deleted"]
    """Live, in the trash, or dropped for good together with its files."""
    removed_because: str
    """The reason for which it is not live; empty if it is."""
    metrics: Mapping[str, float]
    """Those of the save, and those that it was annotated with."""


class SaveHistory(list[PastSave]):
    """Every save of a store, in the order of the commits."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each save: its facts, and its metrics under their own names.

        A metric that has the name of a fact is called "metrics." and its name.
        """
        names = [item.name for item in fields(PastSave) if item.name != "metrics"]
        return [
            {name: getattr(save, name) for name in names}
            | {f"metrics.{name}" if name in names else name: value for name, value in save.metrics.items()}
            for save in self
        ]

    @boundary
    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`, NaN for a metric that a save lacks. Raises InvalidInput without
        pandas."""
        import pandas

        return pandas.DataFrame(self.rows())


def past_saves(log: Log) -> SaveHistory:
    """Return every save that the log has; see `Catalogue.history`."""
    newest = log.newest()
    if newest is None:
        return SaveHistory()
    state = newest.state
    standing = {state.place(number): number for number in state.live}
    """The live form of each save, whole or thinned, by the number of the whole one."""
    in_trash = set(map(state.place, state.trash))
    reasons: dict[int, str] = {}
    removed: list[tuple[int, str]] = []
    """All that records put in the trash, the last first, each with the reason."""
    places: dict[int, int] = {}
    """The places of the thinned checkpoints that ever were."""
    commits: list[Record] = []
    annotated: dict[int, Mapping[str, float]] = {}
    for record in backwards(log, newest, may_lack=True):
        removed.extend(removals(record))
        if isinstance(record.change, Annotate):
            annotated.setdefault(record.change.number, record.change.metrics)  # the last one has them all
        if isinstance(record.change, Commit) and record.change.thins is None:
            commits.append(replace(record, annotated=annotated.get(record.number, {})))
        elif isinstance(record.change, Commit):
            places[record.number] = record.place
    for number, reason in removed:
        reasons.setdefault(places.get(number, number), reason)
    thinned = [number for number in standing.values() if number in state.thinned]
    sizes = {record.place: record.entry.size_bytes for record in log.readable(thinned)}
    return SaveHistory(
        PastSave(
            number=number,
            step=entry.step,
            epoch=entry.epoch,
            created_at=entry.created_at,
            world_size=entry.world_size,
            size_bytes=sizes.get(number, entry.size_bytes),
            kind=entry.kind,
            status="live" if number in standing else "trash" if number in in_trash else "deleted",
            removed_because="" if number in standing else reasons.get(number, ""),
            metrics=dict(entry.metrics),
        )
        for number, entry in ((record.number, record.entry) for record in reversed(commits))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The bytes that a store takes: the files of its checkpoints, each counted once."""

    live_bytes: int
    trash_bytes: int
    bytes_per_day: float | None
    """The growth of both together over the last week, or since the first record; None in the first hour."""

    def price_per_month(self, price: float | None) -> float | None:
        """Return the price of both together, where `price` is that of a TB for a month; None without one."""
        return None if price is None else (self.live_bytes + self.trash_bytes) / 1e12 * price


_DAY_SECONDS = 86400.0


def usage(log: Log) -> Usage:
    """Return what a store takes, and how fast it grows. Reads all records, once."""
    newest = log.newest()
    held: dict[int, int] = {}
    taken = 0
    points: list[tuple[float, int]] = []
    for record in reversed(list(backwards(log, newest, may_lack=True))) if newest else ():
        if isinstance(record.change, Commit):
            held[record.number] = record.entry.held_bytes
            taken += record.entry.held_bytes
        if isinstance(record.change, Remove):
            for number in record.change.drop:
                taken -= held.pop(number, 0)
        points.append((record.created_at, taken))
    state = newest.state if newest else EMPTY
    return Usage(
        live_bytes=sum(held.get(number, 0) for number in state.live),
        trash_bytes=sum(held.get(number, 0) for number in state.trash),
        bytes_per_day=growth_per_day(points),
    )


def growth_per_day(points: Sequence[tuple[float, int]]) -> float | None:
    """Return the growth of the last week in bytes per day, from times and sizes; None for less than an hour."""
    if not points:
        return None
    end, now_bytes = points[-1]
    begin, then_bytes = next((point for point in points if point[0] >= end - 7 * _DAY_SECONDS), points[-1])
    seconds = end - begin
    return None if seconds < 3600 else (now_bytes - then_bytes) / seconds * _DAY_SECONDS


def removals(record: Record) -> Iterable[tuple[int, str]]:
    """Yield what a record put in the trash, with the reason."""
    change = record.change
    if isinstance(change, Remove):
        yield from ((number, change.reason) for number in change.trash)
    if isinstance(change, Commit):
        yield from ((number, change.reasons.get(number) or "retention dropped it") for number in change.drops)
        yield from ((number, f"step {change.entry.step} was saved again") for number in change.replaces)
