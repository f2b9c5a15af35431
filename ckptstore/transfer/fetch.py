"""Fetch whole files from a storage through buffers: to a local disk, or to nowhere just to check them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing
from ckptstore.events import BytesMoved, emit, is_heard
from ckptstore.format.digest import Digest, file_digest
from ckptstore.runtime.beat import beat
from ckptstore.storage.disk.local_parts import READ_ONLY, WRITABLE, NewFile, make_durable
from ckptstore.storage.second_look import tell
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.batch import fault_of, read_batch, version_of
from ckptstore.transfer.engine import STEP_BYTES, TASK_BYTES, Engine
from ckptstore.transfer.moves import Checked, Wanted
from ckptstore.transfer.pool import Operation, Task

Damage = CheckpointDamaged | FileMissing


def download(
    engine: Engine,
    wanted: Sequence[tuple[Wanted, str]],
    *,
    read_only: bool,
    durable: bool,
) -> None:
    """Fetch files to new paths. See `Transfer.download`."""
    kept = _Kept(read_only, durable)
    found = _fetch(engine, wanted, kept)
    for checked in _fetched_again(engine, wanted, kept, found):
        if checked.damage:
            raise checked.damage
    if durable:
        make_durable([path for _, path in wanted])
        beat()


def check(engine: Engine, wanted: Sequence[Wanted]) -> list[Checked]:
    """Read files to the end. See `Transfer.check`."""
    places = [(item, None) for item in wanted]
    return _fetched_again(engine, places, _Kept(), _fetch(engine, places, _Kept()))


def _fetched_again(
    engine: Engine,
    places: Sequence[tuple[Wanted, str | None]],
    kept: _Kept,
    found: Sequence[Checked],
) -> list[Checked]:
    """Fetch files that seem damaged once more, in another way, and return the results of all files."""
    # A bit may have flipped on its way.
    damaged = [place for place, checked in zip(places, found, strict=True) if checked.damage]
    if not damaged:
        return list(found)
    if engine.doubts is not None:
        for item, _ in damaged:
            engine.doubts.doubt(item.key)
    again = iter(_fetch(engine, damaged, kept))
    result = [next(again) if checked.damage else checked for checked in found]
    for first, second in zip(found, result, strict=True):
        if first.damage and not second.damage:
            tell(engine.storage, first.wanted.key, first.damage.message)
    return result


class _Kept(NamedTuple):
    """The properties of files that are fetched to a path."""

    read_only: bool = False
    durable: bool = False


def _fetch(engine: Engine, places: Sequence[tuple[Wanted, str | None]], kept: _Kept) -> list[Checked]:
    """Fetch each file to its path, or to nowhere if that is None; the result has their order."""
    total_bytes = sum(item.size_bytes for item, _ in places)
    found: list[Checked | None] = [None] * len(places)
    large = [index for index, (item, _) in enumerate(places) if item.size_bytes > STEP_BYTES]
    fetches = {index: _fetch_of(engine, places[index], kept, total_bytes) for index in large}
    tasks: list[Task] = [
        partial(fetch.move, start)
        for fetch in fetches.values()
        for start in range(0, fetch.wanted.size_bytes, fetch.task_bytes)
    ]
    small = [index for index, (item, _) in enumerate(places) if item.size_bytes <= STEP_BYTES]

    def fetch_batch(indices: Sequence[int], run: Operation) -> None:
        some = [places[index] for index in indices]
        for index, checked in zip(indices, read_batch(engine, some, kept.read_only, run), strict=True):
            found[index] = checked
        _tell(some[-1][0].key, sum(item.size_bytes for item, _ in some), total_bytes)

    batches = engine.batches([places[index][0].size_bytes for index in small])
    tasks += [partial(fetch_batch, small[batch]) for batch in batches]
    try:
        engine.pool.run(tasks)
    except BaseException:
        for fetch in fetches.values():
            fetch.abort()
        raise
    finally:
        engine.scratch.trim()
    for index, fetch in fetches.items():
        found[index] = Checked(fetch.wanted, fetch.found_digest, fetch.damage)
    return [checked for checked in found if checked is not None]


def _fetch_of(engine: Engine, place: tuple[Wanted, str | None], kept: _Kept, total_bytes: int) -> _Fetch:
    wanted, path = place
    if path is None:
        return _ToNowhere(engine, wanted, total_bytes)
    return _ToDisk(engine, wanted, total_bytes, path, kept)


def _tell(key: str, size_bytes: int, total_bytes: int) -> None:
    traffic_here().read_bytes += size_bytes
    if is_heard(BytesMoved):
        emit(BytesMoved(key=key, size_bytes=size_bytes, total_bytes=total_bytes))


class _Fetch:
    """One file that is read by several threads, and the destination of its bytes."""

    def __init__(self, engine: Engine, wanted: Wanted, total_bytes: int) -> None:
        self.wanted = wanted
        self._total_bytes = total_bytes
        self.damage: Damage | None = None
        self.found_digest: Digest | None = None
        self._engine = engine
        self._digest = file_digest(algorithm=wanted.algorithm)
        self.task_bytes = wanted.size_bytes if self._digest.needs_order else TASK_BYTES
        self._lock = threading.Lock()
        self._left_bytes = wanted.size_bytes
        self._version: str | None = None

    def begin(self, run: Operation) -> None:
        """Prepare for the first byte; the caller holds the lock."""

    def put(self, offset: int, view: memoryview) -> None:
        """Take some bytes."""

    def end(self) -> None:
        """Finish the file, after all bytes came and are the right ones."""

    def abort(self) -> None:
        """Drop an unfinished file. Called when no other task works on it."""

    def move(self, start: int, run: Operation) -> None:
        """Read one stretch of the file; the last one compares the digests."""
        end = min(start + self.task_bytes, self.wanted.size_bytes)
        run.check()
        try:
            with self._lock:
                if self._left_bytes == self.wanted.size_bytes:
                    self.begin(run)
            self._read(start, end, run)
        except (CheckpointDamaged, FileMissing) as error:
            self.reject(error)
        except CkptstoreError as error:
            raise error.at(file=self.wanted.key) from None
        with self._lock:
            self._left_bytes -= end - start
            is_last = self._left_bytes == 0
        if is_last:
            self._compare()
            if self.damage:
                self.abort()
            else:
                self.end()

    def reject(self, error: Damage) -> None:
        """Note the first error that says the file is not the one wanted."""
        if self.damage is None:
            self.damage = error

    def _read(self, start: int, end: int, run: Operation) -> None:
        key, request_bytes = self.wanted.key, min(self._engine.request_bytes, end - start)
        with self._engine.scratch.take(request_bytes, run) as scratch:
            for offset in range(start, end, request_bytes or 1):
                if self.damage:
                    return
                run.check()
                view = scratch[: min(request_bytes, end - offset)]
                read = partial(self._engine.storage.read_into, key, offset, [view], version=self._version)
                self._engine.read(run, key, read)
                for first in range(0, len(view), STEP_BYTES):
                    step = view[first : first + STEP_BYTES]
                    self._digest.add(offset + first, [step])
                    self.put(offset + first, step)
                run.moved(len(view))
                _tell(key, len(view), self._total_bytes)

    def _compare(self) -> None:
        if not self.damage:
            self.found_digest = self._digest.digest()
            self.damage = fault_of(self.wanted, self.found_digest)


class _ToNowhere(_Fetch):
    """Reads a file only to check it. The file must also have its size and no byte more."""

    def begin(self, run: Operation) -> None:
        if self._version is None and not self.damage:
            self._version = version_of(self._engine, self.wanted, run)


class _ToDisk(_Fetch):
    """Writes a file to its path on a disk."""

    def __init__(self, engine: Engine, wanted: Wanted, total_bytes: int, path: str, kept: _Kept) -> None:
        super().__init__(engine, wanted, total_bytes)
        self._path = path
        self._kept = kept
        self._file: NewFile | None = None

    def begin(self, run: Operation) -> None:
        if self._file is None and not self.damage:
            self._file = NewFile(
                self.wanted.key,
                self._path,
                size_bytes=self.wanted.size_bytes,
                writes_back=self._kept.durable,
                mode=READ_ONLY if self._kept.read_only else WRITABLE,
            )

    def put(self, offset: int, view: memoryview) -> None:
        assert self._file is not None
        self._file.write_part(offset, [view])

    def end(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()
            self._file = None
