"""Check all promises after every change of a storage and every end of a call. The model sees past all faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ckptstore.extensions.history.cursor import Cursor
from ckptstore.format.changes import Claim, Commit, Remove, Restore
from ckptstore.format.layout import (
    CHECKPOINT_PREFIX,
    HINT_KEY,
    LEASE_PREFIX,
    LOG_PREFIX,
    MANIFEST_NAME,
    cursor_key,
    parse_lease_key,
    parse_record_key,
    record_key,
)
from ckptstore.format.manifest import Manifest, sha256_of
from ckptstore.format.record import Record
from kit.simulation.ledger import Followed, Ledger, Violation, first_place
from kit.simulation.plan import KEPT_SINCE_SECONDS, Plan
from kit.simulation.virtual.storages import File, Space

Tag = tuple[str, int]
"""The job and the action of a save."""
Call = tuple[Tag, int]
"""The part of one rank in a save."""


_IN_FLIGHT_SECONDS = 0.1
"""Requests from before a loss may still arrive this long after it."""


@dataclass
class SavedCheckpoint:
    """One committed checkpoint."""

    number: int
    step: int
    attempt: str
    tag: Tag
    at: float
    files: dict[str, bytes]
    elsewhere: dict[str, str]
    """The directories of other checkpoints in which more of its files lie, by their names."""
    is_damaged: bool = False
    is_visibly_damaged: bool = False
    """True if a listing shows the damage."""
    damaged_at: float = -1.0
    is_thinned: bool = False
    removed_at: float | None = None
    """The time at which a record took it out of live and trash."""


@dataclass
class Model:
    """The expected contents of a store, according to its log."""

    space: Space
    plan: Plan
    now: Callable[[], float]
    ranks_of: Callable[[str], int]
    step_of: Callable[[Tag], int | None]
    is_copy: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    records: dict[int, Record] = field(default_factory=dict)
    saved: dict[int, SavedCheckpoint] = field(default_factory=dict)
    by_attempt: dict[str, SavedCheckpoint] = field(default_factory=dict)
    by_call: dict[Call, int] = field(default_factory=dict)
    refused: set[Call] = field(default_factory=set)
    trashed_at: dict[int, float] = field(default_factory=dict)
    history: list[tuple[float, int | None]] = field(default_factory=lambda: [(0.0, None)])
    """The number of the newest record from a time on."""
    reading: dict[tuple[int, int], float] = field(default_factory=dict)
    """By process id and number, the time since which the process reads a checkpoint, under a lease or not."""
    last_action: dict[str, int] = field(default_factory=dict)
    is_damaging: bool = False
    vanished_at: float | None = None
    """The time at which essential files of the store were lost; from then on only failing saves are promised."""
    has_arrived: bool = False
    """True if a record on its way at that time arrived afterwards, which hides the loss from everybody."""
    on_commit: Callable[[], None] = lambda: None
    followed: dict[str, Followed] = field(default_factory=dict)
    """By the name of a cursor what its followers got."""
    careful: set[int] = field(default_factory=set)
    """Process ids of readers that met no fault, and were never stopped."""

    def __post_init__(self) -> None:
        self.space.watchers.append(self.changed)

    @property
    def newest(self) -> Record | None:
        """The newest record."""
        return self.records.get(len(self.records)) if self.records else None

    def live(self) -> list[SavedCheckpoint]:
        """Return the live checkpoints, oldest first."""
        newest = self.newest
        return [self.saved[number] for number in newest.state.in_order()] if newest else []

    def resumable(self) -> list[SavedCheckpoint]:
        """Return the live checkpoints that a job can resume from, as far as they are not damaged; oldest first."""
        return [saved for saved in self.live() if not saved.is_thinned]

    def comes(self, cursor: str, number: int, where: str) -> int:
        """Note that a follower got a checkpoint, and return its place. Raise Violation unless it is the next one."""
        followed = self.followed.setdefault(cursor, Followed())
        if followed.begun is None and (file := self.space.files.get(cursor_key(cursor))) is not None:
            followed.begun = Cursor.decode(file.data, file=cursor).begun
        return followed.come(self.records, number, where)

    def passed_over(self, cursor: str, number: int, began: float) -> None:
        """Note that a follower, which looks since `began`, said that a checkpoint has no turn."""
        seen = [at for at in self.numbers_between(began, self.now()) if at is not None]
        if all(number in (first_place(self.records, one) for one in self.records[at].state.live) for at in seen):
            raise Violation("what is live has its turn", f"{number} was passed over with the cursor {cursor}")
        self.followed.setdefault(cursor, Followed()).named.add(number)

    def changed(self, key: str, before: File | None, after: File | None) -> None:
        """Handle a write or removal of a file."""
        if key.startswith(LOG_PREFIX):
            self._log_changed(key, before, after)
        elif key.startswith(CHECKPOINT_PREFIX):
            self._file_changed(key, before, after)
        elif key.startswith(LEASE_PREFIX) and before is None and (leased := _leased(key)) is not None:
            self.reads(*leased)

    def reads_file(self, pid: int, key: str) -> None:
        """Note that a process reads the bytes of a file; on a disk others must see a lease."""
        attempt, _, name = key.removeprefix(CHECKPOINT_PREFIX).partition("/")
        if self.plan.storage == "disk" and pid in self.careful and name != MANIFEST_NAME and attempt in self.by_attempt:
            self.reads(pid, self.by_attempt[attempt].number)

    def reads(self, pid: int, number: int) -> None:
        """Note that a process begins to read a checkpoint."""
        self.reading.setdefault((pid, number), self.now())

    def gives_back(self, pid: int, key: str) -> None:
        """Note that a process deletes its lease: it has read everything, though the call may still last."""
        leased = _leased(key)
        if leased is not None and leased[0] == pid:
            self.reading.pop(leased, None)

    def ends_reading(self, pid: int) -> None:
        """Note that a process reads nothing any more."""
        for key in [key for key in self.reading if key[0] == pid]:
            del self.reading[key]

    # The log

    def _log_changed(self, key: str, before: File | None, after: File | None) -> None:
        number = parse_record_key(key)
        if number is None:
            return
        if self.vanished_at is not None:
            if after is not None and not self.has_arrived and self.now() > self.vanished_at + _IN_FLIGHT_SECONDS:
                raise Violation("a store that is gone takes no save", f"{key} was written")
            self.has_arrived |= after is not None
            return
        if before is not None and (after is None or after.data != before.data):
            raise Violation("a record never changes", f"{key} was {'removed' if after is None else 'overwritten'}")
        if before is not None or after is None:
            return
        record = Record.decode(after.data, number)
        newest = self.newest
        if number != len(self.records) + 1:
            raise Violation("records have no gaps", f"{key} after {len(self.records)} records")
        if record.previous != (newest.sha256 if newest else ""):
            raise Violation("records are a chain", f"{key} does not follow the record before it")
        self.ledger.take(record)
        self._check_change(record, newest)
        self.records[number] = record
        if isinstance(record.change, Commit):
            self._committed(record, record.change)
        self._moved(record, newest)
        self.on_commit()
        self.history.append((self.now(), number))

    def _check_change(self, record: Record, newest: Record | None) -> None:
        change = record.change
        if newest is None:
            return
        if isinstance(change, Commit):
            self._check_drops(record, change, newest)
        if isinstance(change, Remove):
            for number in change.drop:
                self._check_end(number, change)
        if isinstance(change, Restore):
            for number in change.numbers:
                self._check_restored(record, self.saved[number])

    def _check_restored(self, record: Record, saved: SavedCheckpoint) -> None:
        where = f"record {record.number} restores step {saved.step}, number {saved.number}"
        for name, data in saved.files.items():
            file = self.space.files.get(f"{CHECKPOINT_PREFIX}{saved.attempt}/{name}")
            if not saved.is_damaged and (file is None or file.data != data):
                raise Violation("what is restored is whole", f"{where}: {name} is not what was saved")

    def _check_drops(self, record: Record, change: Commit, newest: Record) -> None:
        for number in change.replaces:
            if self.saved[number].step != change.entry.step:
                raise Violation("only the same step is replaced", f"record {record.number} replaces {number}")
        if change.thins is not None:
            return
        left = [number for number in newest.state.in_order() if number not in change.replaces] + [record.number]
        ages = {number: self.now() - self.saved[number].at for number in left[:-1]} | {record.number: 0.0}
        must_stay, may_stay = self._by_rule(left, ages, change.entry.step)
        shown = f"{self.plan.policy!r}, of { ({number: round(age) for number, age in ages.items()}) } s of age"
        if lost := must_stay & set(change.drops):
            raise Violation("retention keeps what its rule keeps", f"{shown} dropped {sorted(lost)}")
        may_stay = may_stay | {*newest.state.pinned, record.number, newest.state.resume_from}
        if not self.is_copy and (stayed := set(left) - may_stay - set(change.drops)):
            raise Violation("retention drops what its rule drops", f"{shown} left {sorted(stayed)}")

    def _by_rule(self, left: list[int], ages: Mapping[int, float], step: int) -> tuple[set[int], set[int | None]]:
        """Return the checkpoints that must stay, and those that may."""
        policy = self.plan.policy
        must_stay = set(left)
        if policy.startswith("latest"):
            must_stay = set(left[-int(policy.split()[1]) :])
        if policy.startswith("every"):
            steps = [*(self.saved[number].step for number in left[:-1]), step]
            first = {at // 20: number for number, at in reversed([*zip(left, steps, strict=True)])}
            must_stay = {*first.values(), left[-1]}
        if policy == "since":
            must_stay = {number for number in left if ages[number] <= KEPT_SINCE_SECONDS - 60.0}
            return must_stay, {number for number in left if ages[number] <= KEPT_SINCE_SECONDS + 60.0}
        return must_stay, {*left} if "best" in policy else {*must_stay}

    def _check_end(self, number: int, change: Remove) -> None:
        age = self.now() - self.trashed_at.get(number, self.now())
        if age < self.plan.grace_seconds - 1e-6 and "full" not in change.reason:
            raise Violation("the trash is kept for the grace period", f"{number} goes after {age:.0f} s")
        for (pid, read), since in self.reading.items():
            if read == number and pid in self.careful and since < self.now() - 1000.0:
                raise Violation(
                    "what is leased stays", f"{number} is removed, process {pid} reads it since {since:.3f}"
                )

    def _committed(self, record: Record, change: Commit) -> None:
        entry = change.entry
        where = f"record {record.number}{' of the copy' if self.is_copy else ''}, step {entry.step}"
        prefix = f"{CHECKPOINT_PREFIX}{entry.attempt}/"
        if entry.thinned is not None:
            self._thinned(record, change, prefix, where)
            return
        held = held_files(self.space, prefix, where, sha256=entry.manifest_sha256, is_copy=self.is_copy)
        elsewhere = self._elsewhere(held, entry.bases, where)
        before = {data for saved in self.saved.values() for data in saved.files.values()}  # which are taken over
        new = {name: data for name, data in held.items() if data not in before}
        calls = set[Call]() if self.is_copy else calls_of(new, where, self.ranks_of, self.step_of)
        tag = max((tag for tag, _ in calls), default=("", -1))
        saved = SavedCheckpoint(record.number, entry.step, entry.attempt, tag, self.now(), held, elsewhere)
        self.saved[record.number] = self.by_attempt[entry.attempt] = saved
        if not tag[0]:
            return
        if refused := calls & self.refused:
            raise Violation("committed=False never becomes visible", f"{where}: {refused} was refused before")
        if again := calls & self.by_call.keys():
            raise Violation("a save commits once", f"{where}: {again} is in another record too")
        if self.last_action.get(tag[0], -1) > tag[1]:
            raise Violation("one order of saves", f"{where}: {tag} after action {self.last_action[tag[0]]}")
        self.last_action[tag[0]] = tag[1]
        self.by_call |= dict.fromkeys(calls, record.number)

    def _elsewhere(self, held: Mapping[str, bytes], bases: Collection[int], where: str) -> dict[str, str]:
        """Return the directories of files that lie in other checkpoints, after checking that their records say so."""
        found = {}
        for receipt in Manifest.decode(held[MANIFEST_NAME]).files:
            if receipt.attempt is not None:
                base = self.by_attempt.get(receipt.attempt)
                if base is None or base.number not in bases or receipt.name not in base.files:
                    text = f"{where}: {receipt.name} lies in {receipt.attempt}, and its bases are {bases}"
                    raise Violation("what is committed is whole", text)
                found[receipt.name] = receipt.attempt
        return found

    def bytes_of(self, saved: SavedCheckpoint, name: str) -> bytes:
        """Return a file as it was saved."""
        return self.by_attempt[saved.elsewhere.get(name, saved.attempt)].files[name]

    def _thinned(self, record: Record, change: Commit, prefix: str, where: str) -> None:
        entry, whole = change.entry, self.saved.get(change.thins or 0)
        is_damaged = whole is not None and whole.is_damaged
        if is_damaged:  # files are linked, or copied inside the storage, without a look at them
            files = self.space.files.items()
            held = {key.removeprefix(prefix): file.data for key, file in files if key.startswith(prefix)}
        else:
            held = held_files(self.space, prefix, where, sha256=entry.manifest_sha256, is_copy=self.is_copy)
        tag, at = (whole.tag, whole.at) if whole else (("", -1), self.now())
        elsewhere = {} if is_damaged else self._elsewhere(held, entry.bases, where)
        saved = SavedCheckpoint(
            record.number, entry.step, entry.attempt, tag, at, held, elsewhere, is_damaged=is_damaged, is_thinned=True
        )
        self.saved[record.number] = self.by_attempt[entry.attempt] = saved

    def _moved(self, record: Record, newest: Record | None) -> None:
        before = set(newest.state.live) | set(newest.state.trash) if newest else set()
        for number in record.state.trash:
            self.trashed_at.setdefault(number, self.now())
        for number in record.state.live:
            self.trashed_at.pop(number, None)  # restored: a new grace period begins with the next drop
        for number in before - set(record.state.live) - set(record.state.trash):
            self.saved[number].removed_at = self.now()

    # Files

    def _file_changed(self, key: str, before: File | None, after: File | None) -> None:
        attempt, _, name = key.removeprefix(CHECKPOINT_PREFIX).partition("/")
        saved = self.by_attempt.get(attempt)
        if saved is None or name not in saved.files or self.is_damaging:
            return
        if after is not None and after.data == saved.files[name]:
            return
        how = "removed" if after is None else "overwritten"
        if saved.removed_at is None and not saved.is_damaged:
            where = f"record {saved.number}{' of the copy' if self.is_copy else ''}, step {saved.step}"
            raise Violation("nothing committed loses a byte", f"{name} of {where} was {how}")
        for (pid, number), since in self.reading.items():
            if number == saved.number and pid in self.careful and since < (saved.removed_at or 0.0):
                times = f"process {pid} reads it since {since:.3f}, it was removed at {saved.removed_at:.3f}"
                text = f"{name} of record {number} was {how}; {times}"
                raise Violation("nothing that is read loses a byte", text)

    def damage(self, saved: SavedCheckpoint, name: str, how: str) -> None:
        """Damage a file, as something outside of ckptstore would."""
        key = f"{CHECKPOINT_PREFIX}{saved.attempt}/{name}"
        file = self.space.files.get(key)
        if file is None:
            return
        self.is_damaging = True
        for other in self.saved.values():
            if other is saved or other.elsewhere.get(name) == saved.attempt:
                other.is_damaged, other.damaged_at = True, self.now()
                other.is_visibly_damaged |= how != "flipped" or name == MANIFEST_NAME
        if how == "gone" or not file.data:
            self.space.remove(key)
        else:
            data = file.data[:-1] if how == "short" else bytes([file.data[0] ^ 1]) + file.data[1:]
            self.space.put(key, data, is_durable=True)
        self.is_damaging = False

    def vanish(self, what: str) -> None:
        """Remove files, as something outside of ckptstore would: those with some prefixes, the newest record, or all
        that a copy of the store from two records ago lacks. Does nothing if no save is lost by it.
        """
        newest = self.newest
        if newest is None or newest.state.latest is None:
            return
        gone = tuple(what.split())
        if what in ("newest", "older"):
            lost = [newest.number, newest.number - 1][: 1 if what == "newest" else 2]
            gone = tuple(record_key(number) for number in lost)
        if what == "older":
            changes = [self.records[number].change for number in lost if number in self.records]
            gone += (HINT_KEY, *(change.entry.prefix for change in changes if isinstance(change, Commit)))
        self.is_damaging, self.vanished_at = True, self.now()
        for key in [key for key in self.space.files if key.startswith(gone)]:
            self.space.remove(key)

    def claims_since(self, start: float) -> list[int]:
        """Return the numbers of the records since then that are claims."""
        numbers = [number for since, number in self.history if since >= start and number is not None]
        return [number for number in numbers if isinstance(self.records[number].change, Claim)]

    def numbers_between(self, start: float, end: float) -> list[int | None]:
        """Return the numbers of the records that were the newest at some time in between."""
        found = [number for since, number in self.history if start <= since <= end]
        before = [number for since, number in self.history if since < start]
        return [*before[-1:], *found]


def _leased(key: str) -> tuple[int, int] | None:
    """Return the process id and the checkpoint number of a lease."""
    number, parts = parse_lease_key(key), key.split("-")
    return (int(parts[-2]), number) if number is not None and len(parts) > 3 and parts[-2].isdecimal() else None


def held_files(
    space: Space, prefix: str, where: str, *, sha256: str | None = None, is_copy: bool = False
) -> dict[str, bytes]:
    """Return the files of a checkpoint that becomes visible now, by name, after checking them.

    With `sha256`, that of its manifest is checked.
    """
    files = {key.removeprefix(prefix): file for key, file in space.files.items() if key.startswith(prefix)}
    if MANIFEST_NAME not in files or sha256 not in (None, sha256_of(files[MANIFEST_NAME].data)):
        raise Violation("what is committed is whole", f"{where}: its manifest is not there")
    if not files[MANIFEST_NAME].is_durable and not is_copy:
        raise Violation("what is committed is durable", f"{where}: its manifest")
    held = {MANIFEST_NAME: files[MANIFEST_NAME].data}
    for receipt in Manifest.decode(held[MANIFEST_NAME]).files:
        if receipt.attempt is None:
            file = files.get(receipt.name)
            if file is None or len(file.data) != receipt.size_bytes:
                raise Violation("what is committed is whole", f"{where}: {receipt.name} is missing or torn")
            if receipt.digest is not None and receipt.digest.like(file.data) != receipt.digest:
                raise Violation("what is committed is whole", f"{where}: {receipt.name} has other bytes")
            if not file.is_durable and not is_copy:
                raise Violation("what is committed is durable", f"{where}: {receipt.name}")
            held[receipt.name] = file.data
    return held


def calls_of(
    held: Mapping[str, bytes],
    where: str,
    ranks_of: Callable[[str], int],
    step_of: Callable[[Tag], int | None],
) -> set[Call]:
    """Return the calls that made these files, after checking that all ranks made them in one job and step.

    After a failure ranks may be one call apart within a step.
    """
    calls = {item for data in held.values() for item in calls_in(data)}
    tags, ranks = {tag for tag, _ in calls}, {rank for _, rank in calls}
    if len(calls) > len(ranks) or len({job for job, _ in tags}) > 1 or (len(tags) > 1 and None in map(step_of, tags)):
        raise Violation("no checkpoint mixes attempts", f"{where}: {sorted(calls)}")
    if len(set(map(step_of, tags))) > 1:
        raise Violation("no checkpoint mixes steps", f"{where}: {sorted(calls)}")
    if ranks and len(ranks) != ranks_of(min(tags)[0]):
        raise Violation("every rank is in a checkpoint", f"{where}: only {sorted(ranks)}")
    return calls


def payload(tag: Tag, rank: int, name: str, size_bytes: int) -> bytes:
    """Return the contents of a file, which name its save."""
    text = f"<{tag[0]} {tag[1]} {rank} {name}>".encode()
    return text + b"." * max(0, size_bytes - len(text))


def calls_in(data: bytes) -> list[Call]:
    """Return the saves and the ranks that a file's contents name."""
    return [((job.decode(), int(action)), int(rank)) for job, action, rank in _CALL.findall(data)]


_CALL = re.compile(rb"<(\w+) (\d+) (\d+) [^<>]*>")
