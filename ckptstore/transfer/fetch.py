"""Whole files from a storage through buffers: to a local disk, or to nowhere just to check them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing
from ckptstore.events import BytesMoved, emit, is_heard
from ckptstore.format.digest import FileDigest, to_hex
from ckptstore.storage.disk.local_parts import NewFile, make_durable
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.engine import STEP_BYTES, TASK_BYTES, Engine
from ckptstore.transfer.moves import Checked, Wanted
from ckptstore.transfer.pool import Operation, Task

Damage = CheckpointDamaged | FileMissing


def download(engine: Engine, wanted: Sequence[tuple[Wanted, Path]], beat: Callable[[], None]) -> None:
    """Fetch files to new paths. See `Transfer.download`."""
    fetches = [_ToDisk(engine, item, path) for item, path in wanted]
    _fetch(engine, fetches, beat)
    damaged = [fetch for fetch in fetches if fetch.damage]
    if damaged:  # a bit may have flipped on its way
        if engine.copies is not None:
            for fetch in damaged:
                engine.copies.doubt(fetch.wanted.key)
        damaged = [_ToDisk(engine, fetch.wanted, fetch.path) for fetch in damaged]
        _fetch(engine, damaged, beat)
    for fetch in damaged:
        if fetch.damage:
            raise fetch.damage
    if engine.config.durable:
        make_durable([str(path) for _, path in wanted])
        beat()


def check(engine: Engine, wanted: Sequence[Wanted], beat: Callable[[], None]) -> list[Checked]:
    """Read files to the end. See `Transfer.check`."""
    fetches = [_ToNowhere(engine, item) for item in wanted]
    _fetch(engine, fetches, beat)
    return [Checked(fetch.wanted, fetch.found_crc32c, fetch.damage) for fetch in fetches]


def _fetch(engine: Engine, fetches: Sequence[_Fetch], beat: Callable[[], None]) -> None:
    total_bytes = sum(fetch.wanted.size_bytes for fetch in fetches)
    small = [fetch for fetch in fetches if fetch.wanted.size_bytes <= STEP_BYTES]
    tasks: list[Task] = [
        partial(_fetch_stretch, fetch, start, total_bytes)
        for fetch in fetches
        if fetch.wanted.size_bytes > STEP_BYTES
        for start in range(0, fetch.wanted.size_bytes, TASK_BYTES)
    ]
    batches = engine.batches([fetch.wanted.size_bytes for fetch in small])
    tasks += [partial(_fetch_whole, small[batch], total_bytes) for batch in batches]
    try:
        engine.pool.run(tasks, beat)
    except BaseException:
        for fetch in fetches:
            fetch.abort()
        raise
    finally:
        engine.scratch.trim()


def _fetch_stretch(fetch: _Fetch, start: int, total_bytes: int, run: Operation) -> None:
    fetch.move(start, min(start + TASK_BYTES, fetch.wanted.size_bytes), run)
    _tell(fetch.wanted.key, min(TASK_BYTES, fetch.wanted.size_bytes - start), total_bytes)


def _fetch_whole(fetches: Sequence[_Fetch], total_bytes: int, run: Operation) -> None:
    for fetch in fetches:
        fetch.move(0, fetch.wanted.size_bytes, run)
    _tell(fetches[-1].wanted.key, sum(fetch.wanted.size_bytes for fetch in fetches), total_bytes)


def _tell(key: str, size_bytes: int, total_bytes: int) -> None:
    traffic_here().read_bytes += size_bytes
    if is_heard(BytesMoved):
        emit(BytesMoved(key=key, size_bytes=size_bytes, total_bytes=total_bytes))


class _Fetch:
    """One file that is read by several threads, and where its bytes go."""

    def __init__(self, engine: Engine, wanted: Wanted) -> None:
        self.wanted = wanted
        self.damage: Damage | None = None
        self.found_crc32c: int | None = None
        self._engine = engine
        self._digest = FileDigest()
        self._lock = threading.Lock()
        self._left_bytes = wanted.size_bytes
        self._version: str | None = None

    def begin(self, run: Operation) -> None:
        """Called before the first byte moves; the caller holds the lock."""

    def put(self, offset: int, view: memoryview) -> None:
        """Take some bytes."""

    def end(self) -> None:
        """Called when all bytes came and are the right ones."""

    def abort(self) -> None:
        """Drop what there is of an unfinished file. Called when no other task works on it."""

    def move(self, start: int, end: int, run: Operation) -> None:
        """Read one stretch of the file; the last one compares the digests."""
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
        """The file is not what was wanted."""
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
                self._engine.request(run, f"read {key}", read)
                for first in range(0, len(view), STEP_BYTES):
                    step = view[first : first + STEP_BYTES]
                    self._digest.add(offset + first, [step])
                    self.put(offset + first, step)
                run.moved(len(view))

    def _compare(self) -> None:
        if self.damage:
            return
        expected, found = self.wanted.crc32c, self._digest.crc32c()
        self.found_crc32c = found
        if expected is not None and found != expected:
            self.damage = CheckpointDamaged(
                f"{self.wanted.key} is damaged: CRC32C {to_hex(expected)} is expected, {to_hex(found)} is found",
                file=self.wanted.key,
            )


class _ToNowhere(_Fetch):
    """For a file that is only checked. It must also have its size and no byte more."""

    def begin(self, run: Operation) -> None:
        if self._version is not None or self.damage:
            return
        wanted = self.wanted
        found = self._engine.request(run, f"stat {wanted.key}", partial(self._engine.storage.stat, wanted.key))
        self._version = found.version
        if found.size_bytes != wanted.size_bytes:
            raise CheckpointDamaged(
                f"{wanted.key} has {found.size_bytes:,} bytes, {wanted.size_bytes:,} are expected", file=wanted.key
            )


class _ToDisk(_Fetch):
    """For a file that is kept."""

    def __init__(self, engine: Engine, wanted: Wanted, path: Path) -> None:
        super().__init__(engine, wanted)
        self.path = path
        self._file: NewFile | None = None

    def begin(self, run: Operation) -> None:
        if self._file is None and not self.damage:
            self._file = NewFile(
                self.wanted.key,
                str(self.path),
                size_bytes=self.wanted.size_bytes,
                writes_back=self._engine.config.durable,
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
