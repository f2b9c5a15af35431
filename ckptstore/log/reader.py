"""Read the log: the newest record in few requests, any others in parallel, and the storage's clock."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    CkptstoreError,
    RecordMissing,
    StorageArchived,
    StorageError,
    UnsupportedVersion,
)
from ckptstore.format.changes import EMPTY, Annotate, Change, Commit, apply
from ckptstore.format.encoding import FORMAT_VERSION, dump_json, load_object
from ckptstore.format.layout import HINT_KEY, PROBE_PREFIX, Attempt, record_key
from ckptstore.format.record import Record
from ckptstore.runtime.fork import new_lock_in_child
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import MAY_NOT_LIST, CreatesExclusively, Disk, Storage
from ckptstore.storage.retry import briefly
from ckptstore.storage.second_look import looked_twice

logger = logging.getLogger("ckptstore")

T = TypeVar("T")
Probed = Record | CheckpointDamaged | StorageArchived | UnsupportedVersion | None
"""The finding at a number: a record, an error if it cannot be read as one, or None."""

_MAX_CACHED = 100_000
_NUM_THREADS = 32
_MOST_DAMAGED = 4
"""Damaged records in a row, at doubling distances, of which no log has so many."""


@dataclass(frozen=True)
class Hint:
    """The hint `latest.json`: the newest record and that of the latest checkpoint, as of the last write of the hint.

    It saves requests and decides nothing: it may be missing, torn, behind or wrong, and every writer reads the log.
    """

    newest: Record
    latest: Record | None
    """The record of the latest live checkpoint; None if there is none, or the hint lacks it."""

    def encode(self) -> bytes:
        """Return the hint as bytes, with the records as text, so that their exact bytes, and digests, survive."""
        fields = {"version": FORMAT_VERSION, "number": self.newest.number, "newest": self.newest.encode().decode()}
        if self.latest is not None and self.latest.number != self.newest.number:
            fields["latest"] = self.latest.encode().decode()
        return dump_json(fields, what="hint")

    @staticmethod
    def decode(data: bytes) -> Hint | None:
        """Return the hint, or None for anything that is not one."""
        try:
            value = load_object(data, file=HINT_KEY)
            newest = Record.decode(value["newest"].encode(), value["number"])
            number, text = newest.state.latest, value.get("latest")
            latest = newest if number == newest.number else None
            if latest is None and number is not None and text is not None:
                latest = Record.decode(text.encode(), number)
            return Hint(newest, latest)
        except (CkptstoreError, KeyError, TypeError, ValueError, AttributeError):
            return None


class LogReader:
    """The reading half of a `Log`. It needs no claim and blocks nobody, and caches records, which never change. Safe
    for threads.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._exclusive = storage if isinstance(storage, CreatesExclusively) else None
        self._lock = threading.Lock()
        new_lock_in_child(self, "_lock")
        self._cache: dict[int, Record] = {}
        self._steps: dict[int, list[int]] = {}
        """The numbers of the records in the cache that commit a step."""
        self._times: dict[int, float] = {}
        self._clock_key = ""
        """The file that shows the time, where this process may not delete it."""
        self._own: Record | None = None
        """The record with the highest number that was read from the log itself, or written."""
        self._tip: Record | None = None
        """The newest record as last found; None if only a hint has named it."""
        self._left_out: set[str | None] = set()
        """The files of records that cannot be read now, of which a warning was logged."""
        self._is_writer = False
        """True once this process has appended: then a record that is missing is an error, never left out."""
        self._fork: str | None = None
        """The proof that the log has two histories; None if there is none."""

    def newest(self) -> Record | None:
        """Return the newest record; None in an empty log. It is at least as new as the newest one at the time of the
        call.

        Costs two requests if the hint is fresh: the hint, and a probe of the next number; one if this process has read
        the newest record before. Otherwise it probes upwards in growing steps and halves, so a hint that is missing,
        torn or behind costs some requests and nothing else. This method believes a hint that is ahead of the log, or of
        another log (a store that other tools copied in the wrong order): a reader of that checkpoint finds its manifest
        missing, and a writer finds the hint wrong and corrects it.

        Raises CheckpointDamaged if the newest record cannot be read, UnsupportedVersion if it is from a newer version,
        StorageError if the storage fails for longer than retries last.
        """
        return self._find()[0]

    def latest(self) -> Record | None:
        """Return the record of the latest live checkpoint; None if there is none.

        Costs the requests of `newest`, one more if neither the newest record, the hint nor the cache has it, and one
        more if it was annotated. In a replica that lacks its record it is the one before, as in `readable`.
        """
        newest, hint = self._find()
        number = newest.state.latest if newest else None
        if newest is None or number is None:
            return None
        if number == newest.number:
            return newest
        if hint is not None and hint.latest is not None and hint.latest.number == number:
            return self.annotated([hint.latest], newest)[0]
        found = self.readable([number], or_else=newest.state.in_order)
        return self.annotated(found[-1:], newest)[0]

    def records(self, numbers: Iterable[int]) -> list[Record]:
        """Return these records in the same order, from the cache or read in parallel.

        Raises RecordMissing, or CheckpointDamaged for a record that cannot be read.
        """
        return self._each(self._read, numbers)

    def annotated(self, records: Sequence[Record], newest: Record | None) -> list[Record]:
        """Return these records, those of checkpoints that were annotated as of `newest` with these metrics.

        Costs a request for each annotated one, once. An annotation that is missing is left out as in `readable`. Raises
        CheckpointDamaged for one that cannot be read.
        """
        if newest is None or not newest.state.annotated:
            return list(records)
        annotated_by = newest.state.annotated
        places = [newest.state.place(record.number) for record in records]
        found = sorted(annotated_by.keys() & set(places))
        read = {record.number: record.change for record in self.readable(annotated_by[place] for place in found)}
        changes = {place: read.get(annotated_by[place]) for place in found}
        return [_with_metrics(record, place, changes.get(place)) for record, place in zip(records, places, strict=True)]

    def readable(self, numbers: Iterable[int], *, or_else: Callable[[], Iterable[int]] = lambda: ()) -> list[Record]:
        """Return these records without those in an archive class, and in a process that does not write without those
        that are missing; a warning names each of these once. If all are left out, return those of `or_else`.

        Raises StorageArchived or RecordMissing if no record is left.
        """

        # A bucket may have a rule that archives old objects, and a job needs only the newest to resume. A replica gets
        # its objects in any order: what has arrived whole is used, and the rest may come.
        def read(number: int) -> Record | StorageArchived | RecordMissing:
            try:
                return self._read(number)
            except (StorageArchived, RecordMissing) as error:
                return error

        found = self._each(read, numbers)
        left_out = [one for one in found if not isinstance(one, Record)]
        missing = [error for error in left_out if isinstance(error, RecordMissing)]
        if missing and self._is_writer:
            raise _all_missing(missing)
        for error in left_out:
            if error.file not in self._left_out:
                self._left_out.add(error.file)
                logger.warning("a record of the log is left out: %s", error)
        records = [one for one in found if isinstance(one, Record)]
        if left_out and not records:
            records = self.readable(others) if (others := list(or_else())) else []
            if not records:
                raise _all_missing(missing) if missing else left_out[0]
        return records

    def of_step(self, step: int, numbers: Collection[int]) -> list[Record]:
        """Return those of these records that committed the step, in ascending order. All are read as by `readable`, and
        none that was read before is looked at: of thousands, that is most of the time of a small save."""
        if not all(map(self._cache.__contains__, numbers)):
            self.readable(numbers)
        found = sorted(number for number in self._steps.get(step, ()) if number in numbers)
        return [self._cache[number] for number in found if number in self._cache]

    def commit_of(self, attempt: Attempt) -> Record | None:
        """Return the record that committed the attempt; None if there is none (yet) or the log cannot be read."""
        try:
            newest = self.newest()
            found = self.records([*newest.state.live, *newest.state.trash] if newest else ())
        except CkptstoreError:
            return None
        return next((record for record in found if record.entry.attempt == str(attempt)), None)

    def found(self, numbers: Iterable[int]) -> list[Probed]:
        """Return the findings at these numbers in the same order, from the cache or read in parallel.

        A record that is missing or cannot be read is no error. Raises StorageError if the storage fails for longer than
        retries last.
        """
        return self._each(self._probe, numbers)

    def from_wire(self, value: Sequence[Any]) -> Record:
        """Return the record of `Record.to_wire`, which of its own records a process need not read again."""
        number, data, annotated = value
        cached = self._cache.get(number)
        record = Record.decode(data, number) if cached is None or cached.encode() != data else cached
        return replace(record, annotated=annotated) if annotated else record

    def record_time(self, number: int) -> float:
        """Return the time at which a record was written, in seconds since the epoch by the storage's clock. Cached."""
        if number not in self._times:
            key = record_key(number)
            self._times[number] = self._storage.stat(key).modified_seconds
        return self._times[number]

    def commit_times(self, records: Sequence[Record]) -> dict[int, float]:
        """Return the commit times of these checkpoints by number: the time of the record or, for a copy, that of the
        original. Read in parallel, cached."""
        known = {record.number: record.entry.committed_at for record in records}
        asked = [number for number, seconds in known.items() if seconds is None]
        read = dict(zip(asked, self._in_parallel(self.record_time, asked), strict=True))
        return {number: read[number] if seconds is None else seconds for number, seconds in known.items()}

    def store_now_seconds(self) -> float:
        """Return the time of the storage's clock, in seconds since the epoch: write a small file, and read its time.

        If this process may not write, it is the time of the newest record, 0.0 in an empty log: never later than now,
        so that nothing looks older than it is.
        """
        key = self._clock_key or f"{PROBE_PREFIX}clock-{uuid.uuid4().hex}"
        try:
            self._storage.write(key, [memoryview(b"{}")])
            return self._storage.stat(key).modified_seconds
        except AccessDenied:
            newest = self.newest()
            return self.record_time(newest.number) if newest else 0.0
        finally:
            try:
                with briefly():
                    self._storage.delete([key])
            except AccessDenied:
                self._clock_key = key  # one file stays, not one for each call
            except CkptstoreError as error:
                logger.debug("%s stays, which does no harm: %s", key, error)

    def _find(self) -> tuple[Record | None, Hint | None]:
        """Return the newest record, and the hint; None for a hint that was not read."""
        known = self._tip
        if known is not None:
            after = self._probe(known.number + 1)
            if after is None:
                return known, None
            known = after if isinstance(after, Record) else known
        hint = self._read_hint()
        if hint is not None and (known is None or hint.newest.number > known.number):
            known = hint.newest
        newest = self._gallop(known)
        self._tip = newest if newest is None or newest.number in self._cache else None
        return newest, hint

    def _gallop(self, known: Record | None) -> Record | None:
        """Find the newest record, searching upwards from an existing one."""
        top, newest = self._find_top(known)
        if isinstance(newest, CheckpointDamaged) and self._exclusive is None:
            # A torn write of the single writer does not count.
            newest = self._probe(top - 1) if top > 1 else None
        if isinstance(newest, CkptstoreError):
            raise newest
        return newest

    def _find_top(self, known: Record | None) -> tuple[int, Probed]:
        """Find the highest number that is taken, and its record. Numbers have no gaps, so halving finds it. Raises
        StorageError for a storage that has something under every name."""
        low, newest, step = known.number if known else 0, known, 1
        found: Probed = newest
        num_damaged = 0
        while (probed := self._probe(low + step)) is not None:
            low, found, step = low + step, probed, 2 * step
            num_damaged = num_damaged + 1 if isinstance(probed, CheckpointDamaged) else 0
            if num_damaged == _MOST_DAMAGED:  # else a login page that answers every request would be a log without end
                raise StorageError(
                    f"{self._storage.uri} has something under every name, and no record: {probed}",
                    hint="Look for a proxy or a login page that answers in place of the storage",
                )
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            probed = self._probe(middle)
            low, high, found = (low, middle, found) if probed is None else (middle, high, probed)
        return low, found

    def _read_hint(self) -> Hint | None:
        try:
            data = self._storage.read_if_there(HINT_KEY)
        except StorageError:
            return None
        return None if data is None else Hint.decode(data)

    def _read(self, number: int) -> Record:
        found = self._probe(number)
        key = record_key(number)
        if found is None:
            self._storage.doubt(key)
            found = self._probe(number)
        if found is None:
            raise RecordMissing(f"{key} is missing: it is lost, or, in a replica, not here yet", file=key)
        if isinstance(found, CkptstoreError):
            raise found
        return found

    def _probe(self, number: int) -> Probed:
        """Return the finding at a number, from the cache or the storage."""
        cached = self._cache.get(number)
        if cached is not None:
            return cached
        found = self._fetch(number)
        return self._remember(found) if isinstance(found, Record) else found

    def _fetch(self, number: int) -> Probed:
        """Return the finding at a number, with one request, past the cache."""
        key = record_key(number)
        try:
            data = self._storage.read_if_there(key)
            if data is None:
                return None
            at_hand = [data]
            return looked_twice(
                self._storage,
                key,
                lambda: Record.decode(at_hand.pop() if at_hand else self._storage.read(key), number),
            )
        except (CheckpointDamaged, StorageArchived, UnsupportedVersion) as error:
            return error
        except AccessDenied as error:
            if isinstance(self._storage, Disk) or error.hint not in (None, MAY_NOT_LIST):
                raise  # the credentials are not there, or not right
            raise AccessDenied(
                f"The storage denies reading {key}, which perhaps only does not exist yet: {error.message}",
                file=key,
                hint="Object stores answer so for a missing object to whoever may not list: allow it (s3:ListBucket)",
            ) from error

    def _remember(self, record: Record) -> Record:
        with self._lock:
            if record.number not in self._cache and isinstance(record.change, Commit):
                self._steps.setdefault(record.change.entry.step, []).append(record.number)
            cached = self._cache.setdefault(record.number, record)
            if cached.sha256 != record.sha256:
                self._fork = f"{record_key(record.number)} has changed since this process first read it"
            if self._own is None or record.number > self._own.number:
                self._own = record
            if len(self._cache) > _MAX_CACHED:
                oldest = self._cache.pop(next(iter(self._cache)))
                if isinstance(oldest.change, Commit):
                    self._steps[oldest.change.entry.step].remove(oldest.number)
        return record

    def _each(self, read: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
        """Return `read` of each number in the same order: those in the cache at once, the others in parallel."""
        wanted = list(numbers)
        # A save asks for every live checkpoint: to start threads for what is in memory took a third of a small save.
        missing = [number for number in dict.fromkeys(wanted) if number not in self._cache]
        found = dict(zip(missing, self._in_parallel(read, missing), strict=True))
        # What is in the cache is what `read` returns; with 10,000 live checkpoints, a call for each takes time.
        cached = cast(Mapping[int, T], self._cache)
        return [found[number] if number in found else cached[number] for number in wanted]

    def _in_parallel(self, read: Callable[[int], T], numbers: list[int]) -> list[T]:
        return mapped(read, numbers, num_threads=_NUM_THREADS, name="ckptstore-log")


def _all_missing(errors: Sequence[RecordMissing]) -> RecordMissing:
    """Return one error for all these missing records."""
    if len(errors) == 1:
        return errors[0]
    keys = [str(error.file) for error in errors]
    shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
    return RecordMissing(f"{shown} are missing: they are lost, or, in a replica, not here yet", file=keys[0])


def _with_metrics(record: Record, place: int, change: Change | None) -> Record:
    if change is None:
        return record
    if not isinstance(change, Annotate) or change.number != place:
        key = record_key(record.number)
        raise CheckpointDamaged(f"The record that is to annotate the checkpoint of {key} is another one", file=key)
    return replace(record, annotated=change.metrics)


def link_problem(before: Record | None, record: Record) -> str | None:
    """Return the fault between a record and the one before it, None if there is none. The first has no `before`."""
    if record.previous == (before.sha256 if before else ""):
        return None
    return f"{record_key(record.number)} was not written after the {record_key(record.number - 1)} that is there now"


def record_problem(number: int, before: Record | None, found: Record | CkptstoreError | None) -> list[str]:
    """Return the faults of the finding at a number; `before` is the record before it, if that could be read."""
    if found is None:
        return [f"{record_key(number)} is missing, or, in a replica, not here yet"]
    if isinstance(found, CkptstoreError):
        return [found.message]
    if before is None and number > 1:
        return []
    problem = link_problem(before, found)
    if problem:
        return [problem]
    try:
        expected = apply(before.state if before else EMPTY, number, found.change)
        if replace(expected, extra={}) == replace(found.state, extra={}):
            return []
    except CkptstoreError as error:
        return [f"{record_key(number)} breaks a rule: {error.message}"]
    return [f"{record_key(number)} has a state that its change does not lead to"]
