"""The story of a store as its records tell it, one after another: what came, what went, and how much was freed. Pure.

Records are added as they are read, so that whoever follows a store reads each of them once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace

from ckptstore.errors import CheckpointDamaged, CkptstoreError
from ckptstore.extensions.history.past_saves import Usage, growth_per_day
from ckptstore.format.changes import (
    EMPTY,
    Annotate,
    Claim,
    Commit,
    Pin,
    Remove,
    Restore,
    Resumed,
    StoreState,
    Unpin,
)
from ckptstore.format.encoding import shortened
from ckptstore.format.entry import CheckpointEntry
from ckptstore.format.layout import Attempt, record_key
from ckptstore.format.record import Record
from ckptstore.log.reader import Probed, link_problem, record_problem
from ckptstore.tools.report.document import ChangeKind, SeenChange, SeenResume, SeenUsage, SizePoint, Status

MOST_NAMED = 8
"""The most checkpoints that the text of a change names."""


@dataclass(slots=True)
class Life:
    """The life of one checkpoint, from its commit to its deletion."""

    number: int
    entry: CheckpointEntry
    committed_at: float = 0.0
    """The time of its record, by the writer's clock."""
    saves_before: int = 0
    """The number of saves of its job since the checkpoint before that have no record."""
    status: Status = "live"
    removed_by: int = 0
    """The record that put it in the trash, or else dropped it; 0 while it is live."""
    removed_at: float | None = None
    removed_because: str = ""
    resumed_by: list[int] = field(default_factory=list)


class History:
    """The history that the records from 1 on tell, those that cannot be read apart."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        """Every checkpoint, by its number."""
        self.changes: list[SeenChange] = []
        """Every record."""
        self.sizes: list[SizePoint] = []
        """After every record that changed them."""
        self.resumes: list[SeenResume] = []
        """From where jobs with a fast tier went on."""
        self.problems: list[str] = []
        """Faults of the records or of their order."""
        self.newest: Record | None = None
        """The last one that could be read."""
        self._is_whole = True
        """True if the record before the next one could be read."""
        self._epoch = 0
        self._saves: dict[int, int] = {}
        """By writer epoch, the highest number of a save that was committed."""
        self._numbers: dict[str, int] = {}
        """The numbers of the checkpoints, by attempt."""
        self._live: set[int] = set()
        self._places: dict[int, int] = {}
        """The numbers of whole checkpoints by those of the thinned ones that have their places."""
        self._pinned: set[int] = set()
        self._bytes: dict[Status, int] = {"live": 0, "trash": 0, "deleted": 0}
        self._held_bytes = 0
        self._held: list[tuple[float, int]] = []
        """The bytes that live checkpoints and those in the trash take, each file counted once, after every record."""

    def add(self, found: Probed) -> None:
        """Take note of what was found at the next number."""
        number = len(self.changes) + 1
        if not isinstance(found, Record):
            self._is_whole = False
            self.problems += record_problem(number, None, found)
            text = found.message if isinstance(found, CkptstoreError) else "the record is missing"
            at = self.changes[-1].at if self.changes else 0.0
            self.changes.append(SeenChange(number=number, at=at, kind="unreadable", text=shortened(text)))
            return
        problem = link_problem(self.newest, found) if self._is_whole else None
        self.problems += [problem] if problem else []
        before = dict(self._bytes)
        self.changes.append(self._follow(found))
        if not self._is_whole:
            self._catch_up(found)
        self.newest, self._is_whole = found, True
        self._held.append((found.created_at, self._held_bytes))
        if self._bytes != before:
            live, trash, freed = self._bytes["live"], self._bytes["trash"], self._bytes["deleted"]
            point = SizePoint(at=found.created_at, number=number, live_bytes=live, trash_bytes=trash, freed_bytes=freed)
            self.sizes.append(point)

    def _follow(self, record: Record) -> SeenChange:
        """Follow one record, and say what it did."""
        change = record.change
        if isinstance(change, Claim):
            return self._claimed(record, change)
        if isinstance(change, Commit):
            return self._committed(record, change)
        if isinstance(change, Remove):
            return self._removed(record, change)
        if isinstance(change, Restore):
            places = {self._places.get(number, number): number for number in change.numbers}
            pins = set(change.numbers if change.pin else ())
            for other in [other for other in self._live if self._places.get(other, other) in places]:
                pins |= {places[self._places.get(other, other)]} if other in self._pinned else set()
                self._move(other, "trash", record, "another form of it was restored")
            for number in change.numbers:
                self._move(number, "live", record)
            self._pinned |= pins
            text = f"{self._named(change.numbers)} brought back from the trash{', pinned' if change.pin else ''}"
            return _seen(record, "restore", text, numbers=change.numbers, epoch=change.epoch)
        if isinstance(change, Pin):
            self._pinned.update(change.numbers)
            text = f"{self._named(change.numbers)} pinned"
            return _seen(record, "pin", text, numbers=change.numbers, epoch=change.epoch)
        if isinstance(change, Unpin):
            self._pinned.difference_update(change.numbers)
            text = f"{self._named(change.numbers)} no longer pinned"
            return _seen(record, "unpin", text, numbers=change.numbers, epoch=change.epoch)
        if isinstance(change, Resumed):
            return self._resumed(record, change)
        if isinstance(change, Annotate):
            return self._annotated(record, change)
        return _seen(record, "noop", "nothing changed: it took the number of a write whose fate was unknown")

    def _claimed(self, record: Record, change: Claim) -> SeenChange:
        source = self.lives.get(self._latest())
        self._epoch = max(self._epoch, change.above_epoch) + 1
        if source is not None:
            source.resumed_by.append(self._epoch)
        ranks = "1 rank" if change.world_size == 1 else f"{change.world_size} ranks"
        found = f"the latest was {self._named([source.number])}" if source else "nothing was live"
        text = f"a job of {ranks} took the store over; {found}"
        return _seen(record, "claim", text, numbers=[source.number] if source else (), epoch=self._epoch)

    def _resumed(self, record: Record, change: Resumed) -> SeenChange:
        attempt = Attempt.parse(change.attempt)
        source = self._numbers.get(change.attempt)
        self.resumes.append(
            SeenResume(
                number=record.number,
                at=record.created_at,
                epoch=change.epoch,
                attempt=change.attempt,
                step=attempt.step if attempt else None,
                source=source,
            )
        )
        where = f"number {source}" if source else "which the nodes had and the store had not"
        found = f"went on from {f'step {attempt.step}' if attempt else change.source}, {where}"
        text = f"the job of writer epoch {change.epoch} {found if change.source else 'found nothing and began anew'}"
        return _seen(record, "resume", text, numbers=[source] if source else (), epoch=change.epoch)

    def _annotated(self, record: Record, change: Annotate) -> SeenChange:
        for life in self.lives.values() if self._places else filter(None, [self.lives.get(change.number)]):
            if self._places.get(life.number, life.number) == change.number:
                life.entry = replace(life.entry, metrics={**life.entry.metrics, **change.metrics})
        names = ", ".join(map(shortened, sorted(change.metrics)[:MOST_NAMED]))
        text = f"{self._named([change.number])} annotated with {names}"
        return _seen(record, "annotate", text, numbers=[change.number], epoch=change.epoch)

    def _committed(self, record: Record, change: Commit) -> SeenChange:
        entry = change.entry
        before, after = self._saves.get(entry.epoch, 0), entry.save_number
        self._saves[entry.epoch], self._numbers[entry.attempt] = max(before, after), record.number
        saves_before = max(0, after - before - 1)
        self.lives[record.number] = Life(record.number, entry, record.created_at, saves_before)
        self._live.add(record.number)
        self._bytes["live"] += entry.size_bytes
        self._held_bytes += entry.held_bytes
        replaced = [number for number in change.replaces if number not in self._pinned]
        for number in replaced:
            self._move(number, "trash", record, f"step {entry.step} was saved again, as number {record.number}")
        for number in change.drops:
            self._move(number, "trash", record, change.reasons.get(number) or "retention dropped it")
        if change.thins is not None:
            return self._thinned(record, change.thins)
        gone = [*replaced, *change.drops]
        text = f"step {entry.step} committed" + (f"; {self._named(gone)} to the trash" if gone else "")
        return _seen(record, "commit", text, numbers=[record.number, *gone], epoch=entry.epoch)

    def _thinned(self, record: Record, whole: int) -> SeenChange:
        self._places[record.number] = self._places.get(whole, whole)
        is_pinned, before, life = whole in self._pinned, self.lives.get(whole), self.lives[record.number]
        if before is not None:  # what it was annotated with
            life.entry = replace(life.entry, metrics=before.entry.metrics)
        self._move(whole, "trash", record, "it was thinned")
        self._pinned.update([record.number] if is_pinned else [])
        text = f"step {record.entry.step} {record.entry.thinned}; the whole one, number {whole}, to the trash"
        return _seen(record, "thin", text, numbers=[record.number, whole], epoch=None)

    def in_order(self) -> list[Life]:
        """Return all checkpoints in the order of their commits, a thinned one behind the whole one."""
        return sorted(self.lives.values(), key=lambda life: (self._places.get(life.number, life.number), life.number))

    def _latest(self) -> int:
        return max((number for number in self._live if number not in self._places), default=0)

    def _removed(self, record: Record, change: Remove) -> SeenChange:
        is_roll_back = bool(change.trash) and self._latest() in change.trash
        for number in change.trash:
            self._move(number, "trash", record, change.reason)
        self._pinned.difference_update(change.trash)
        for number in change.drop:
            self._move(number, "deleted", record, change.reason)
        unpinned = ", no longer pinned" if change.unpins else ""
        parts = [f"{self._named(change.trash)} to the trash{unpinned}"] if change.trash else []
        parts += [f"{self._named(change.drop)} dropped for good"] if change.drop else []
        text = "; ".join(parts) + (f": {change.reason}" if change.reason else "")
        kind: ChangeKind = "rollback" if is_roll_back else "remove" if change.trash else "prune"
        return _seen(record, kind, text, numbers=[*change.trash, *change.drop], epoch=change.epoch)

    def _move(self, number: int, status: Status, record: Record, reason: str = "") -> None:
        """Make a checkpoint live, trash or deleted. One whose own record could not be read is not known."""
        life = self.lives.get(number)
        if life is None or life.status == status:
            return
        self._bytes[life.status] -= life.entry.size_bytes
        self._bytes[status] += life.entry.size_bytes
        self._held_bytes += life.entry.held_bytes * ((life.status == "deleted") - (status == "deleted"))
        if status == "live":
            self._live.add(number)
            life.removed_by, life.removed_at, life.removed_because = 0, None, ""
        else:
            self._live.discard(number)
            self._pinned.discard(number)
            life.removed_by, life.removed_at = record.number, record.created_at
            life.removed_because = life.removed_because or reason
        life.status = status

    def usage(self, price: float | None) -> SeenUsage:
        """Return the bytes that the store takes, and their price where `price` is that of a TB for a month."""
        held: dict[Status, int] = {"live": 0, "trash": 0, "deleted": 0}
        for life in self.lives.values():
            held[life.status] += life.entry.held_bytes
        found = Usage(live_bytes=held["live"], trash_bytes=held["trash"], bytes_per_day=growth_per_day(self._held))
        return SeenUsage(**asdict(found), price_per_month=found.price_per_month(price))

    def settle(self) -> StoreState:
        """Take over what the store holds by the newest record, which alone counts. Where the changes lead elsewhere,
        that is a problem, and checkpoints are what it says. To be called when all records were added.

        One comparison in place of one for each record, as `verify_log` makes them: those take a minute for 10,000.
        Raises CheckpointDamaged when the newest record does not say what the store holds.
        """
        state = self.newest.state if self.newest else EMPTY
        if self.newest is not None and not self._agrees(state):
            file = record_key(self.newest.number)
            self.problems.append(f"{file} has a state that the changes before it do not lead to")
            self._catch_up(self.newest)
        return state

    def _agrees(self, state: StoreState) -> bool:
        unknown = {number for number in (*state.live, *state.trash) if number not in self.lives}
        trash = {number for number, life in self.lives.items() if life.status == "trash"}
        return (
            self._live == set(state.live) - unknown
            and self._pinned == set(state.pinned)
            and trash == state.trash.keys() - unknown
            and self._epoch == state.epoch
        )

    def _catch_up(self, record: Record) -> None:
        """Take over what the state of a record says, where the changes do not tell."""
        try:
            state = record.state
        except CheckpointDamaged:
            return
        self._epoch, self._pinned = state.epoch, set(state.pinned)
        live = set(state.live)
        for number in self.lives:
            status: Status = "live" if number in live else "trash" if number in state.trash else "deleted"
            self._move(number, status, record, "a record that cannot be read removed it")

    def _named(self, numbers: Collection[int]) -> str:
        """Name checkpoints by their steps: "step 3", "steps 3, 5 and 90 more"."""
        steps = [str(self.lives[number].entry.step) if number in self.lives else "?" for number in sorted(numbers)]
        if len(steps) == 1:
            return f"step {steps[0]}"
        if len(steps) > MOST_NAMED:
            return f"steps {', '.join(steps[:MOST_NAMED])} and {len(steps) - MOST_NAMED} more"
        return f"steps {', '.join(steps)}"


def _seen(
    record: Record, kind: ChangeKind, text: str, *, numbers: Collection[int] = (), epoch: int | None = None
) -> SeenChange:
    return SeenChange(
        number=record.number, at=record.created_at, kind=kind, text=text, numbers=tuple(numbers), epoch=epoch
    )
