"""Write the log: a decision on the newest state becomes the next record, or nothing happens at all."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from threading import RLock
from typing import Any, overload

from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StoreForked,
    StoreMissing,
)
from ckptstore.format.changes import Change, Noop
from ckptstore.format.layout import CHECKPOINT_PREFIX, HINT_KEY, LOG_PREFIX, Attempt, parse_record_key, record_key
from ckptstore.format.record import Record
from ckptstore.log.reader import Hint, LogReader, Probed, link_problem, record_problem
from ckptstore.runtime.beat import beat
from ckptstore.runtime.parallel import Behind, mapped
from ckptstore.storage.base import CreatesExclusively, Disk, Storage, Unsupported
from ckptstore.storage.probe import has_exclusive_create, is_server
from ckptstore.storage.retry import briefly, hurried
from ckptstore.storage.second_look import looked_twice, tell
from ckptstore.storage.traffic import traffic_here

logger = logging.getLogger("ckptstore")

_CHECKED_LINKS = 64
_CHECKED_BEYOND = 8
"""The numbers that a writer tries beyond the end of the log: a replica may lack a record in the middle."""
_HINT_SECONDS = 1.0
"""The longest that an append waits for its hint, so that on a server that answers the next reader finds it."""
_SEEN_LATE_SECONDS = (0.05, 0.2, *(1.0,) * 60)
"""The waits for a record that exists, and is not seen yet."""
_ALONE_TRIES = 3
_BATCH_RECORDS = 1000

SALVAGE_HINT = "Stop the job. What is left of a store that was damaged so is copied by `ckptstore cp --salvage`"

Decide = Callable[[Record | None], Change | None]


class Log(LogReader):
    """The log of one store, for one process and all its threads."""

    def __init__(self, storage: Storage, *, single_writer: bool = False) -> None:
        """`single_writer` promises, for a storage that cannot create-if-absent, that no second process ever writes.

        Such a storage may still lose records if the promise is broken, or if a write of a dead process arrives late;
        the chain of digests shows it, and writing ends with StoreForked.
        """
        super().__init__(storage)
        self._single_writer = single_writer
        self._appending = RLock()  # a decision may append something of its own first
        self._on_server = is_server(storage)
        self._is_tried = not self._on_server
        self.may_have_left_over = True
        """True if a prune of this process may have left directories that no record names."""
        self._written: Record | None = None
        """The record that this process wrote last."""
        self._linked = 0
        """The number of the record up to which the chain has been checked."""
        self._hints = Behind("ckptstore-hint")

    @property
    def is_exclusive(self) -> bool:
        """True if the storage can create-if-absent, as far as that is known; see `try_creates`."""
        return self._exclusive is not None

    def try_creates(self) -> None:
        """Test if a server honours create-if-absent: some refuse the condition, some ignore it.

        If it does not, records are written as `single_writer` allows. Costs about ten small requests, once; disks are
        not tested.
        """
        if self._exclusive is None or self._is_tried:
            return
        if not has_exclusive_create(self._storage):
            self._exclusive = None
        self._is_tried = True

    def check_safe(self) -> None:
        """Raise InvalidInput if the storage cannot create-if-absent and the log was not opened with `single_writer`."""
        if self._exclusive is None and not self._single_writer:
            raise InvalidInput(
                f"{self._storage.uri} cannot create a file only where there is none, so writers could overwrite each"
                " other's records",
                hint="Use a disk, or a bucket that can; `ckptstore doctor` tries it. If no second process ever writes "
                "to this store, say so with single_writer=True",
            )

    def checked_newest(self) -> Record | None:
        """Read the newest record from the log itself, whatever a hint says, and check the chain of the newest 64.

        Deletion of files that no record names relies on it. Raises StoreForked if the chain does not hold, and the
        errors of `newest`.
        """
        with self._appending:
            return self._newest_checked()

    def confirm(self) -> None:
        """Check as `check_there` does, but all bytes and on a new connection, before the store is taken for empty."""
        # Responses that belong to other requests can hide a checkpoint, and can show a record that was not written.
        if self._own is not None:
            self._storage.doubt(record_key(self._own.number))
        self.check_there(exact=True)

    def check_there(self, *, exact: bool = False) -> None:
        """Raise StoreMissing if the newest record that this process has read or written is gone or has changed: the
        store was removed, replaced or unmounted.

        Costs one request. It compares all bytes on a disk or with `exact`, else the size.
        """
        known = self._own
        if known is None:
            return
        key, storage = record_key(known.number), self._storage

        def look() -> None:
            if exact or isinstance(storage, Disk):
                is_same = storage.read(key) == known.encode()
            else:
                is_same = storage.stat(key).size_bytes == len(known.encode())
            if not is_same:
                raise CheckpointDamaged(f"{key} is another one", file=key)

        try:
            looked_twice(storage, key, look)
        except (CheckpointDamaged, FileMissing) as error:
            wrong = "gone" if isinstance(error, FileMissing) else "another one"
            raise StoreMissing(
                f"{key} is {wrong}: somebody has removed or replaced the store at {storage.uri}, or its file system is "
                "not there",
                file=key,
                hint=SALVAGE_HINT,
                committed=False,
            ) from None

    @overload
    def append(self, decide: Callable[[Record | None], Change], *, commits: Attempt | None = None) -> Record: ...

    @overload
    def append(self, decide: Decide, *, commits: Attempt | None = None) -> Record | None: ...

    def append(self, decide: Decide, *, commits: Attempt | None = None) -> Record | None:
        """Write the change that `decide` returns for the newest record as the next record, and return that.

        `decide` gets the newest record, None in an empty log, and is called again each time another writer was faster.
        If it raises, the error passes through and nothing is written; if it returns None, nothing is written, and None
        is returned. A returned record is in the log, once, right behind the record that `decide` saw last.

        If `committed` of an error is False, the change is not in the log and never will be. If it is None, that is
        unknown, because the storage failed and could not be read afterwards: read the log before trying again, and
        remove nothing that the change names. If it is True, the change is in the log, but the disk does not confirm it.
        An exception that is no CkptstoreError (KeyboardInterrupt) leaves it unknown too. Where the change commits the
        attempt `commits`, the log is read after an unknown outcome, and the record is returned if it is there.

        Raises the errors of `decide` and `apply`; StoreForked if the chain of the newest 64 records does not hold;
        StoreMissing if the newest record that this process knows is gone; InvalidInput if the storage cannot
        create-if-absent and the log was not opened with `single_writer`; CheckpointDamaged, UnsupportedVersion and
        StorageError as `newest` does.
        """
        try:
            return self._append(decide)
        except CkptstoreError as error:
            with hurried():  # the log was asked for as long as retries last
                record = self.commit_of(commits) if commits is not None and error.committed is None else None
            if record is None:
                raise
            return record

    def _append(self, decide: Decide) -> Record | None:
        with self._appending:
            self._is_writer = True
            self.check_safe()
            while True:
                beat()  # other writers may be faster for long
                newest = self._newest_checked()
                change = decide(newest)
                if change is None:
                    return None
                if not self._single_writer:
                    with suppress(AccessDenied):  # whoever may write records alone is told of what they lack by these
                        self.try_creates()
                    self.check_safe()
                # The id tells this record from another writer's with the same change, when the reply was lost.
                record = Record.following(newest, change, write_id=uuid.uuid4().hex, created_at=time.time())
                landed = self._remember(self._put(record, newest))
                # Else another writer was faster: its record is the newest one now, and `decide` looks again.
                if landed.write_id == record.write_id:
                    self._tip = self._written = landed
                    # It is linked to `newest`, which was checked: the next append need not walk to it again.
                    self._linked = landed.number
                    self._write_hint(landed)
                    return landed

    def verify_chain(self) -> list[str]:
        """Read the whole log, past the cache, and return its faults in words; empty if all is well.

        Every record is checked against the digest of the one before it, and its state against its change applied to the
        state before. A record that is missing is a fault also where a search for the newest one ends before it. Raises
        StorageError if the storage fails for longer than retries last.
        """
        hint = self._read_hint()
        numbers = [parse_record_key(file.key) or 0 for file in self._storage.list(LOG_PREFIX)]
        top = max(self._find_top(None)[0], hint.newest.number if hint else 0, *numbers)
        problems = [] if top else self._lost()
        before: Record | None = None

        for start in range(1, top + 1, _BATCH_RECORDS):
            numbers = list(range(start, min(start + _BATCH_RECORDS, top + 1)))
            for number, found in zip(numbers, self._in_parallel(self._fetch, numbers), strict=True):
                problems += record_problem(number, before, found)
                before = found if isinstance(found, Record) else None
        return problems

    def _lost(self) -> list[str]:
        """Return the fault of an empty log beside checkpoints: their job wrote its claim before them."""
        first = next(iter(self._storage.list(CHECKPOINT_PREFIX)), None)
        return [f"{record_key(1)} is missing, and so is every other record"] if first else []

    def _newest_checked(self) -> Record | None:
        """Read the newest record from the log itself, whatever a hint says, and check the links that lead to it."""
        known = self._own
        if known is None:
            newest = self._first_look()
        elif self._on_server:  # both in one round trip
            looks: list[Callable[[], Any]] = [lambda: self._gallop(known), self.check_there]
            newest, _ = mapped(lambda look: look(), looks, num_threads=2, name="ckptstore-log")
        else:
            newest = self._gallop(known)
            if newest is known:  # no read so far has shown that the log still exists
                self.check_there()
        self._tip = newest
        # Records never change, so links that were checked once hold for ever.
        if newest is not None and newest.number != self._linked:
            self._tip = newest = self._linked_to(newest)
        if self._fork is not None:
            raise StoreForked(
                f"The log of {self._storage.uri} does not hold together: {self._fork}",
                hint="If it is a replica, wait until all of it is here. It can still be read: copy it with "
                "`ckptstore cp`, or, where that fails, with `--salvage`",
            )
        return newest

    def _first_look(self) -> Record | None:
        """Return the newest record; set `_fork` if there are records behind the one that is missing after it.

        Where the hint names it, the records before it are read in the same round trip: the links between them are
        checked next.
        """
        hint = self._read_hint()
        newest, beyond = None, list[Probed]()
        if hint is not None:
            first = max(1, hint.newest.number - _CHECKED_LINKS)
            looked = self.found(range(first, hint.newest.number + 2 + _CHECKED_BEYOND))
            found, after, *beyond = looked[hint.newest.number - first :]
            newest = found if isinstance(found, Record) and after is None else None
        if newest is None:
            newest = self._gallop(None)
            end = newest.number if newest else 0
            beyond = self.found(range(end + 2, end + 2 + _CHECKED_BEYOND)) if newest else []
        if any(beyond):
            end = newest.number if newest else 0
            if self._probe(end + 1) is not None:  # other writers have gone on meanwhile
                return self._gallop(newest)
            self._fork = f"{record_key(end + 1)} is missing, and newer ones are there"
        return newest

    def _linked_to(self, newest: Record) -> Record:
        """Check the chain, with a second look if it does not hold, and return the newest record. Sets `_fork` to the
        fault that remains."""
        problem = self._link_problem(newest)
        if problem is not None:
            self._storage.doubt(record_key(newest.number))
            # What was read on the way that is doubted would be served from memory again.
            with self._lock:
                self._cache.clear()
                self._steps.clear()
                self._own = self._fork = None
            if self._written is not None:  # what this process wrote is no matter of doubt
                self._remember(self._written)
            newest = self._read(newest.number)
            problem = self._link_problem(newest)
            if problem is None:
                tell(self._storage, record_key(newest.number), "it and the records before it did not hold together")
        self._fork = self._fork or problem
        self._linked = newest.number
        return newest

    def _link_problem(self, newest: Record) -> str | None:
        first = max(1, self._linked, newest.number - _CHECKED_LINKS)
        try:
            chain: list[Record | None] = [*self.readable(range(first, newest.number)), newest]
        except CheckpointDamaged as error:
            return error.message
        if chain[0] is not None and chain[0].number == 1:
            chain.insert(0, None)
        problems = (
            link_problem(before, record)
            for before, record in pairwise(chain)
            if record and record.number == (before.number if before else 0) + 1
        )
        return next((problem for problem in problems if problem), None)

    def _put(self, record: Record, newest: Record | None) -> Record:
        """Try to make `record` the next one, and return the record that has its number now, of whatever writer.

        An error with `committed` False means that `record` is not in the log and never will be.
        """
        if self._exclusive is None:
            return self._put_alone(record)
        key, retries = record_key(record.number), traffic_here().retries
        try:
            created = self._exclusive.create(key, record.encode())
        except Unsupported:
            self._exclusive = None
            self.check_safe()
            return self._put_alone(record)
        except StorageError as failure:
            return self._settle(self._exclusive, record, newest, failure, _is_refusal(failure, retries))
        if created:
            return record
        try:
            # Not always a lost race: the client may have repeated our own create after its reply was lost.
            return self._read_back(record.number)
        except CkptstoreError as error:
            raise _unknown(record, error) from error

    def _settle(
        self, storage: CreatesExclusively, record: Record, newest: Record | None, failure: StorageError, refused: bool
    ) -> Record:
        """Find out if a failed create took effect, or may do so later, and take the number if it is free.

        Only one of two creates can win: once another record has the number, this one stays out for ever. A storage that
        refused the create (no permission, no space) has replied, so a free number is proof enough.
        """
        key = record_key(record.number)
        try:
            landed = self._fetch(record.number)
            if isinstance(landed, CkptstoreError):
                raise landed
            if landed is None and not refused:
                noop = Record.following(newest, Noop(), write_id=uuid.uuid4().hex, created_at=time.time())
                landed = noop if storage.create(key, noop.encode()) else self._read_back(record.number)
        except CkptstoreError as error:
            raise _unknown(record, error) from failure
        if landed is not None and landed.write_id == record.write_id:
            self._confirm(record)
            return landed
        if landed is not None:
            self._remember(landed)
        failure.committed = False
        raise failure

    def _confirm(self, record: Record) -> None:
        """Make a record durable whose create took effect but failed, on a disk perhaps at the sync."""
        try:
            self._storage.persist([record_key(record.number)])
        except StorageError as error:
            error.committed = True
            raise

    def _put_alone(self, record: Record) -> Record:
        """Put a record as a single writer without create-if-absent: write it if the number is free, and read it back.

        Every try of the write has the same bytes: if an earlier one arrives late, it changes nothing.
        """
        storage, key, retries = self._storage, record_key(record.number), traffic_here().retries
        found = self._fetch(record.number)
        if isinstance(found, Record):
            return found
        try:
            self._write_alone(key, memoryview(record.encode()))
        except StorageError as failure:
            try:
                found = self._fetch(record.number)
            except CkptstoreError as error:
                raise _unknown(record, error) from failure
            if isinstance(found, Record) and not isinstance(storage, Disk):  # there it may not be durable
                return found
            if found is None and _is_refusal(failure, retries):
                raise
            raise _unknown(record, failure) from failure
        try:
            return self._read_back(record.number)
        except CkptstoreError as error:
            raise _unknown(record, error) from error

    def _write_alone(self, key: str, view: memoryview, tries: int = _ALONE_TRIES) -> None:
        self._storage.write(key, [view])
        try:
            self._storage.persist([key])
        except StorageUnavailable:  # after a failed fsync the file has to be written again
            if tries == 1:
                raise
            self._write_alone(key, view, tries - 1)

    def _read_back(self, number: int) -> Record:
        found, key = self._fetch(number), record_key(number)
        for wait_seconds in _SEEN_LATE_SECONDS:  # NFS shows a new file later than it says that there is one
            if found is not None:
                break
            beat()
            time.sleep(wait_seconds)
            found = self._fetch(number)
        if isinstance(found, Record):
            return found
        raise found or StorageUnavailable(f"{key} exists, and cannot be read", file=key)

    def _write_hint(self, record: Record) -> None:
        """Write the hint, as a best effort, unless a newer record is known. This also corrects a hint that is ahead of
        the log. Nobody waits for a server that does not answer."""
        if self._own is not None and self._own.number > record.number:
            return

        def write() -> None:
            number = record.state.latest
            latest = None if number is None else record if number == record.number else self.records([number])[0]
            data = Hint(record, latest).encode()
            if isinstance(self._storage, Disk):
                self._storage.overwrite(HINT_KEY, data)
            else:
                self._storage.write(HINT_KEY, [memoryview(data)])

        def try_it() -> None:
            try:
                with briefly():
                    write()
            except Exception as error:  # on a thread of its own nobody would be told
                logger.warning("%s was not written, so readers look further for the newest: %s", HINT_KEY, error)

        if not self._on_server:
            try_it()
        elif not self._hints.do(try_it, wait_seconds=_HINT_SECONDS):
            logger.warning("%s is written late: %s does not answer", HINT_KEY, self._storage.uri)

    def close(self, timeout_seconds: float) -> None:
        """Wait for the hint, at most so long."""
        self._hints.close(timeout_seconds)


def _is_refusal(failure: StorageError, retries_before: int) -> bool:
    """Return True if the write has not taken effect, and never will: it was refused, and no try before was lost."""
    return isinstance(failure, AccessDenied | StorageFull) and traffic_here().retries == retries_before


def _unknown(record: Record, error: CkptstoreError) -> CkptstoreError:
    key = record_key(record.number)
    return type(error)(
        f"It is not known whether {key} was written, for the storage failed again when it was asked: {error.message}",
        file=key,
        hint="Read the log before trying again; until then, keep the files that the record would name",
        committed=None,
    )
