"""Follow a store: each commit once, in the order of the commits, and under a lease while somebody works on it.

What was dealt with is a place in the log, the cursor. A checkpoint is behind it once the work on it has succeeded, so a
follower that was killed begins with the one that it was at.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from ckptstore.errors import CkptstoreError, InvalidInput, RecordMissing, StoreMissing
from ckptstore.events import CheckpointSkipped, emit
from ckptstore.extensions.history.annotate import place_of, place_of_step
from ckptstore.extensions.history.cursor import Cursor
from ckptstore.extensions.history.cursor_file import CursorFile
from ckptstore.extensions.history.past_saves import removals
from ckptstore.format.changes import EMPTY, Commit
from ckptstore.format.layout import check_step
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_store_json
from ckptstore.log.reader import LogReader
from ckptstore.runtime.shown import show_duration
from ckptstore.storage.base import Disk
from ckptstore.storage.retry import once
from ckptstore.upkeep import leases

logger = logging.getLogger("ckptstore")

T = TypeVar("T")
Start = tuple[str, Record | None] | int | str | None
"""The place to begin at without a cursor: behind a checkpoint (its URI, and its record if that is known), behind the
newest one of a step, behind all with "latest", or at the beginning."""

_BATCH_RECORDS = 256
_SHORTEST_SECONDS, _DISK_SECONDS, _SERVER_SECONDS = 0.1, 2.0, 5.0
"""Between two looks at the log: after a commit, and at most."""
_AWAY_SECONDS = 30.0
"""The longest wait between two tries of a storage that is away."""


@dataclass
class Follower:
    """Follows one store for one process, with the arguments of `Catalogue.follow`."""

    job: Job
    start: Start
    latest_only: bool
    cursor: str | os.PathLike[str] | None
    timeout_seconds: float | None
    _log: LogReader = field(init=False)
    _cursor: CursorFile | None = field(init=False)
    _store_id: str = ""
    """Empty until the store was seen."""
    _was_missing: bool = False
    _position: int = 0
    """The place up to which all is dealt with. What is thinned keeps its place, so it comes once."""
    _begun: int = 0
    """The number of the newest record when it began, perhaps in an earlier process."""
    _scanned: int = 0
    """The number up to which the log was searched for commits."""
    _found: deque[int] = field(default_factory=lambda: deque[int]())
    """The places of the commits that were found, and are not dealt with."""

    def __post_init__(self) -> None:
        """Check the arguments. Nothing is read."""
        if self.timeout_seconds is not None and not self.timeout_seconds >= 0:
            raise InvalidInput(f"timeout_seconds is {self.timeout_seconds!r}, it must be at least 0")
        if isinstance(self.start, str) and self.start != "latest":
            raise InvalidInput(f"after is {self.start!r}, it is a checkpoint, a step or 'latest'")
        if not isinstance(self.start, tuple | str | None):
            self.start = check_step(self.start)
        self._cursor = None if self.cursor is None else CursorFile(self.cursor, self.job.storage)
        self._log = LogReader(self.job.storage)

    def follow(self, use: Callable[[Record], T]) -> Generator[T, None, None]:
        """Yield `use` of the record of each checkpoint; see `Catalogue.follow`."""
        while (record := self._wait_for_next()) is not None:
            with self._held(record) as is_present:
                if is_present:
                    yield use(record)
            if is_present:
                self._move(record.place)

    def _wait_for_next(self) -> Record | None:
        """Return the next checkpoint once there is one; None if none came in time."""
        ends_at = self._ends_at()
        longest = _DISK_SECONDS if isinstance(self.job.storage, Disk) else _SERVER_SECONDS
        wait_seconds = _SHORTEST_SECONDS
        while (record := self._patiently(self._look, ends_at)) is None:
            left = _left(ends_at)
            if left <= 0:
                return None
            time.sleep(min(wait_seconds, left))
            wait_seconds = min(1.5 * wait_seconds, longest)
        return record

    def _ends_at(self) -> float | None:
        return None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds

    def _patiently(self, call: Callable[[], T], ends_at: float | None) -> T:
        """Return what `call` returns once the storage is there. Raises its error at the end of the time."""
        away_since, wait_seconds = None, _SHORTEST_SECONDS
        while True:
            self.job.check_open()
            try:
                with once():
                    result = call()
            except CkptstoreError as error:
                is_waited_for = isinstance(error, StoreMissing) and not self._store_id
                is_on_its_way = isinstance(error, RecordMissing)  # in a replica: each comes once, in their order
                if not (error.retryable or is_waited_for or is_on_its_way) or _left(ends_at) <= 0:
                    raise
                if away_since is None:
                    away_since = time.monotonic()
                    tell = logger.info if is_waited_for else logger.warning
                    tell("following %s waits: %s", self.job.storage.uri, error.message)
            else:
                if away_since is not None:
                    seconds = time.monotonic() - away_since
                    logger.info("following %s goes on after %s", self.job.storage.uri, show_duration(seconds))
                return result
            time.sleep(min(wait_seconds, _left(ends_at)))
            wait_seconds = min(2 * wait_seconds, _AWAY_SECONDS)

    def _look(self) -> Record | None:
        """Look at the log once, and return the next checkpoint if there is one."""
        if self._store_id:
            self._check_store()
        else:
            self._begin()
        newest = self._log.newest()
        if newest is None:
            return None
        if self.latest_only:
            latest = newest.state.latest or 0
            return self._record(latest, newest) if latest > self._position else None
        self._scan(newest)
        state = newest.state
        live = {state.place(number): number for number in state.live} if self._found else {}
        while self._found:
            missed = list(takewhile(lambda place: place not in live, self._found))
            if not missed:
                return self._record(live[self._found[0]], newest)
            self._pass_over(missed, newest)
            self._scan(newest)
        return None

    def _record(self, number: int, newest: Record) -> Record:
        return self._log.annotated(self._log.records([number]), newest)[0]

    def _scan(self, newest: Record) -> None:
        """Search the log for commits, until one was found."""
        while not self._found and self._scanned < newest.number:
            end = min(self._scanned + _BATCH_RECORDS, newest.number)
            for record in self._log.records(range(self._scanned + 1, end + 1)):
                is_new = isinstance(record.change, Commit) and record.change.thins is None
                if is_new and record.number > self._position:
                    self._found.append(record.number)
            self._scanned = end

    def _pass_over(self, missed: Sequence[int], newest: Record) -> None:
        """Say what will not have its turn, and move past it."""
        state = newest.state
        last = {state.place(number): number for number in sorted(state.trash)}
        removed_by = self._log.records(sorted({state.trash[last[place]] for place in missed if place in last}))
        reasons = dict(pair for record in removed_by for pair in removals(record))
        for record in self._log.records(missed):
            why = reasons.get(last[record.number]) if record.number in last else None
            reason = f"it was moved to the trash before its turn: {why}" if why else "it was deleted before its turn"
            emit(CheckpointSkipped(step=record.entry.step, number=record.number, reason=reason))
        self._move(missed[-1])

    def _check_store(self) -> None:
        """Raise InvalidInput where somebody removed the store and began another one in its place: its numbers are
        those of other checkpoints."""
        identity = read_store_json(self.job.storage)
        if identity is not None and identity.store_id != self._store_id:
            raise InvalidInput(
                f"Another store is at {self.job.storage.uri} than the one that was followed",
                hint="Start again to follow that one, with a cursor of its own",
            )

    def _begin(self) -> None:
        """Find out where to begin. Raises StoreMissing as long as there is no store."""
        identity = read_store_json(self.job.storage)
        if identity is None:
            self._was_missing = True
            raise StoreMissing(f"There is no store at {self.job.storage.uri} yet")
        if identity.kept_by != KEPT_BY_CKPTSTORE:
            raise InvalidInput(
                f"The checkpoints at {self.job.storage.uri} are kept by {identity.kept_by}, and have no log to follow"
            )
        newest = self._log.newest()
        top = newest.number if newest else 0
        kept = self._cursor
        cursor = kept.read() if kept is not None else None
        if kept is not None and cursor is not None:
            self._check(kept.place, cursor, identity.store_id, top)
        self._begun = cursor.begun if cursor is not None else top
        self._position = cursor.number if cursor is not None else self._first_position(newest)
        self._scanned = max(self._begun, self._position)
        # Whoever begins has missed nothing: what was live then is all there was.
        state = self._log.records([self._begun])[0].state if self._begun else EMPTY
        places = map(state.place, state.in_order())
        self._found = deque(place for place in places if place > self._position)
        self._store_id = identity.store_id
        if cursor is None:
            self._write_cursor()

    def _first_position(self, newest: Record | None) -> int:
        if isinstance(self.start, tuple):
            return place_of(self._log, newest, *self.start)
        if isinstance(self.start, int):
            return place_of_step(self._log, newest, self.start)
        is_behind_all = self.start == "latest" and not self._was_missing
        return newest.number if newest and is_behind_all else 0

    def _check(self, place: str, cursor: Cursor, store_id: str, top: int) -> None:
        fits = cursor.store_id == store_id and max(cursor.number, cursor.begun) <= top
        if fits and (not cursor.number or self._log.records([cursor.number])[0].sha256 == cursor.sha256):
            return
        raise InvalidInput(
            f"The cursor {place} is a place in another log than that of {self.job.storage.uri}",
            hint="Choose another cursor, or remove it to begin anew",
        )

    @contextmanager
    def _held(self, record: Record) -> Iterator[bool]:
        """Protect a checkpoint from deletion. Yields False if it was removed before that, after a warning unless what
        it was thinned to has its place."""
        with leases.hold(self.job.storage, record.number):
            newest = self._patiently(self._log.newest, self._ends_at())  # a prune reads leases after it has written
            state = newest.state if newest else EMPTY
            is_present = record.number in state.live or record.number in state.trash
            if newest is not None and not is_present and record.place not in map(state.place, state.live):
                self._pass_over([record.place], newest)
            yield is_present

    def _move(self, number: int) -> None:
        """Note that all up to this checkpoint is dealt with."""
        if number <= self._position:
            return
        self._position = number
        while self._found and self._found[0] <= number:
            self._found.popleft()
        self._patiently(self._write_cursor, self._ends_at())

    def _write_cursor(self) -> None:
        if self._cursor is not None:
            sha256 = self._log.records([self._position])[0].sha256 if self._position else ""
            self._cursor.write(Cursor(self._store_id, self._position, sha256, self._begun))


def _left(ends_at: float | None) -> float:
    return float("inf") if ends_at is None else max(0.0, ends_at - time.monotonic())
