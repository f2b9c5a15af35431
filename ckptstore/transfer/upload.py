"""Write sources to a storage: each byte is read once, hashed and written while it is in the processor's cache.

Small files are read, hashed and written many at a time, because each costs more than its bytes do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest

from ckptstore.errors import AccessDenied, CkptstoreError, StorageError, StorageFull
from ckptstore.events import BytesMoved, FileStored, emit, is_heard
from ckptstore.format.digest import Digest, FileDigest, file_digest
from ckptstore.runtime.beat import beat
from ckptstore.storage.base import PartWriter, UploadGone, WritesParts
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.engine import STEP_BYTES, TASK_BYTES, Engine
from ckptstore.transfer.moves import PlannedFile, Stored
from ckptstore.transfer.pool import Operation, Task
from ckptstore.transfer.sources import FileSource, Read

logger = logging.getLogger("ckptstore")

_PERSIST_FILES = 4096
"""The number of small files after which they are made durable, while other threads write the next ones."""


def upload(engine: Engine, files: Sequence[PlannedFile], check: Callable[[], None]) -> list[Stored]:
    """Write all files and make them durable; the result has their order. See `Transfer.upload`."""
    upload_ = _Upload(engine, files, check)
    upload_.write_all()
    try:
        upload_.persist()
    except CkptstoreError as error:
        if not _is_worth_writing_again(error):
            raise
        engine.storage.delete([file.key for file in files])  # new files are written faster than old ones are replaced
        upload_.write_all()
        upload_.persist()
    traffic_here().written_bytes += upload_.total_bytes
    beat()
    return [upload_.stored[index] for index in range(len(files))]


def _is_worth_writing_again(error: CkptstoreError) -> bool:
    """Return True if a file that could not be finished may succeed when it is written from the beginning."""
    return isinstance(error, StorageError) and not isinstance(error, StorageFull | AccessDenied)


class _Upload:
    """One call of `upload`."""

    def __init__(self, engine: Engine, files: Sequence[PlannedFile], check: Callable[[], None]) -> None:
        self.engine = engine
        self.files = files
        self._check = check
        self._sizes_bytes = [file.source.size_bytes for file in files]
        self.total_bytes = sum(self._sizes_bytes)
        self.stored: dict[int, Stored] = {}
        self.failed: dict[int, CkptstoreError] = {}
        """The files that are to be written again from the beginning."""
        self._lock = threading.Lock()
        self._written: list[str] = []
        """The keys that are not durable yet."""
        self._not_durable: CkptstoreError | None = None

    def write_all(self) -> None:
        """Write all files. A file whose upload is gone, or whose last step fails, is written again from the beginning,
        once."""
        indices: Iterable[int] = range(len(self.files))
        for _ in range(2):
            for error in self.failed.values():
                logger.warning("a file is written from the beginning: %s", error)
            self.failed = {}
            large, tasks = self._tasks(indices)
            try:
                self.engine.pool.run(tasks, check=self._check)
            finally:
                for file in large:
                    file.abort()
                self.engine.scratch.trim()
            if not self.failed:
                return
            indices = [*self.failed]
        raise next(iter(self.failed.values()))

    def _tasks(self, indices: Iterable[int]) -> tuple[list[_InParts], list[Task]]:
        """Return the files that are written in parts, and the tasks for all files."""
        large: list[_InParts] = []
        small: list[int] = []
        disk, parts, num_threads = self.engine.disk, self.engine.parts, self.engine.pool.num_threads
        parts_bytes = {size_bytes: parts.part_bytes(size_bytes) for size_bytes in {*self._sizes_bytes}} if parts else {}
        for index in indices:
            size_bytes = self._sizes_bytes[index]
            if parts is None or size_bytes <= parts_bytes[size_bytes]:
                small.append(index)
            else:
                large.append(_InParts(self, index, parts, parts_bytes[size_bytes]))
        batches = [small[batch] for batch in self.engine.batches([self._sizes_bytes[index] for index in small])]
        useful_threads = disk.useful_threads() if disk and batches else num_threads
        if useful_threads < min(num_threads, len(batches)):
            shared = deque(batches)
            chains = [partial(self._write_chain, shared, number % 2 == 1) for number in range(useful_threads)]
        else:
            chains = [partial(self._write_chain, deque([batch]), False) for batch in batches]
        # The chains begin first: while they wait for each other in the file system, large files keep the disk busy.
        return large, [*chains, *in_turns([file.tasks() for file in large], num_threads if disk else 1)]

    def persist(self) -> None:
        """Make the written files durable. Raises the error of an earlier call on another thread too."""
        if self._not_durable is not None:
            error, self._not_durable = self._not_durable, None
            self._written = []
            raise error
        with self._lock:
            keys, self._written = self._written, []
        if self.engine.config.durable and keys:
            self.engine.storage.persist(keys)

    def _write_chain(self, batches: deque[list[int]], from_end: bool, run: Operation) -> None:
        """Write small files, batch after batch, until none is left, and have the disk keep up."""
        # A directory takes one new file at a time. So half of the chains begin at the end, in other directories.
        while batches:
            try:
                indices = batches.pop() if from_end else batches.popleft()
            except IndexError:  # another chain was faster
                return
            began = time.monotonic()
            stored = self._write_batch([self.files[index] for index in indices], run)
            seconds = (time.monotonic() - began) / len(stored)
            self.stored.update(zip(indices, stored, strict=True))
            with self._lock:
                self._written += [result.key for result in stored]
            if is_heard(FileStored):
                for result in stored:
                    self._tell(result, seconds)
            self.moved(stored[-1].key, sum(result.size_bytes for result in stored))
            if len(self._written) >= _PERSIST_FILES and self._not_durable is None:
                try:
                    self.persist()
                except CkptstoreError as error:
                    self._not_durable = error

    def _write_batch(self, files: Sequence[PlannedFile], run: Operation) -> list[Stored]:
        """Write files, each in one call or all in one; return the results in their order."""
        engine, used_bytes = self.engine, 0
        stored: list[Stored] = []
        ready: list[tuple[str, Sequence[memoryview]]] = []
        scratch_bytes = sum(0 if file.source.in_memory else file.source.size_bytes for file in files)
        with engine.scratch.take(scratch_bytes, run) as scratch:
            for file in files:
                run.check()
                try:
                    result, views = _read(file, file.algorithm or engine.config.digest, scratch[used_bytes:])
                except CkptstoreError as error:
                    raise error.at(file=file.key) from None
                stored.append(result)
                ready.append((file.key, views))
                used_bytes += 0 if file.source.in_memory else result.size_bytes
            if engine.disk is not None and len(ready) > 1:
                engine.request(run, f"write {len(ready)} files", partial(engine.disk.write_many, ready))
            else:
                for key, views in ready:
                    try:
                        engine.request(run, f"write {key}", partial(engine.storage.write, key, views))
                    except CkptstoreError as error:
                        raise error.at(file=key) from None
        run.moved(1 + sum(result.size_bytes for result in stored))
        return stored

    def moved(self, key: str, size_bytes: int) -> None:
        """Tell of written bytes."""
        if is_heard(BytesMoved):
            emit(BytesMoved(key=key, size_bytes=size_bytes, total_bytes=self.total_bytes))

    def done(self, index: int, digest: FileDigest, *, seconds: float) -> None:
        """Note that all parts of a file are written."""
        file = self.files[index]
        result = Stored(file.key, file.source.size_bytes, digest.digest(), digest.block_digests())
        self.stored[index] = result
        with self._lock:
            self._written.append(file.key)
        self._tell(result, seconds)

    def _tell(self, result: Stored, seconds: float) -> None:
        emit(FileStored(key=result.key, size_bytes=result.size_bytes, seconds=seconds, rank=self.engine.rank))


def _read(file: PlannedFile, algorithm: str, scratch: memoryview) -> tuple[Stored, Sequence[memoryview]]:
    source = file.source
    if type(source) is FileSource and source.size_bytes <= STEP_BYTES and not source.payloads:
        view = source.load(scratch)
        return Stored(file.key, source.size_bytes, Digest.of(view, algorithm=algorithm)), (view,)
    digest = file_digest(source.payloads, algorithm=algorithm)
    with source.open() as read:
        views, _ = _read_hashed(read, digest, 0, source.size_bytes, scratch)
    return Stored(file.key, source.size_bytes, digest.digest(), digest.block_digests()), views


def _read_hashed(
    read: Read, digest: FileDigest, offset: int, size_bytes: int, scratch: memoryview
) -> tuple[Sequence[memoryview], Digest | None]:
    """Read a part in steps, and hash each while it is in the processor's cache. Return its views and its digest, None
    where that is not known."""
    if size_bytes <= STEP_BYTES:
        views = read(offset, size_bytes, scratch)
        return views, digest.add(offset, views)
    found: list[memoryview] = []
    total: Digest | None = None
    for start in range(0, size_bytes, STEP_BYTES):
        size = min(STEP_BYTES, size_bytes - start)
        views = read(offset + start, size, scratch[start : start + size])
        added = digest.add(offset + start, views)
        total = added if total is None or added is None else total.followed_by(added, size)
        found += views
    return found, total


def in_turns(files: Sequence[Sequence[Task]], num_files: int) -> list[Task]:
    """Order the tasks of so many files at a time, one of each in turn."""
    # A file system lets one thread at a time copy into a file; the others spin. So each thread gets its own file.
    groups = (files[first : first + num_files] for first in range(0, len(files), num_files))
    return [task for group in groups for turn in zip_longest(*group) for task in turn if task is not None]


class _InParts:
    """One file that is written in parts, by several threads."""

    def __init__(self, upload_: _Upload, index: int, parts: WritesParts, part_bytes: int) -> None:
        self._upload = upload_
        self._engine = upload_.engine
        self._index = index
        self._key, self._source, algorithm = upload_.files[index]
        self._parts = parts
        self._part_bytes = part_bytes
        self._digest = file_digest(self._source.payloads, algorithm=algorithm or self._engine.config.digest)
        many = max(1, TASK_BYTES // part_bytes) * part_bytes
        self._task_bytes = self._source.size_bytes if self._digest.needs_order else many
        self._lock = threading.Lock()
        self._writer: PartWriter | None = None
        self._left_bytes = self._source.size_bytes
        self._began = 0.0

    def tasks(self) -> list[Task]:
        return [partial(self._write, start) for start in range(0, self._source.size_bytes, self._task_bytes)]

    def abort(self) -> None:
        """Drop the written parts of an unfinished file. Called when no task is running."""
        if self._writer is not None:
            self._writer.abort()

    def _write(self, start: int, run: Operation) -> None:
        """Write the parts of one task, and finish the file after its last part."""
        if self._index in self._upload.failed:
            return
        end = min(start + self._task_bytes, self._source.size_bytes)
        scratch_bytes = 0 if self._source.in_memory else self._part_bytes
        try:
            writer = self._opened(run)
            with self._source.open() as read:
                for offset in range(start, end, self._part_bytes):
                    run.check()
                    size = min(self._part_bytes, end - offset)
                    with ExitStack() as until_sent:
                        with self._engine.reading:
                            scratch = until_sent.enter_context(self._engine.scratch.take(scratch_bytes, run))
                            views, part_digest = _read_hashed(read, self._digest, offset, size, scratch)
                        write = partial(writer.write_part, offset, views, part_digest)
                        self._engine.request(run, f"write {self._key}", write)
                    run.moved(size)
                    self._upload.moved(self._key, size)
            with self._lock:
                self._left_bytes -= end - start
                is_last = self._left_bytes == 0
            if is_last:
                self._finish(run, writer)
        except UploadGone as error:
            self._upload.failed[self._index] = error.at(file=self._key)
        except CkptstoreError as error:
            raise error.at(file=self._key) from None

    def _opened(self, run: Operation) -> PartWriter:
        with self._lock:
            if self._writer is None:
                begin = partial(self._parts.open_parts, self._key, self._source.size_bytes)
                self._began = time.monotonic()
                self._writer = self._engine.request(run, f"begin {self._key}", begin)
            return self._writer

    def _finish(self, run: Operation, writer: PartWriter) -> None:
        try:
            self._engine.request(run, f"finish {self._key}", writer.finish)
        except CkptstoreError as error:
            if error.retryable or not _is_worth_writing_again(error):  # it has been retried by now
                raise
            self._upload.failed[self._index] = error.at(file=self._key)
        else:
            self._writer = None
            self._upload.done(self._index, self._digest, seconds=time.monotonic() - self._began)
