"""From sources to a storage: each byte is read once, hashed and written while it is in the processor's cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptstore.digest import FileDigest
from ckptstore.errors import CkptstoreError
from ckptstore.events import BytesMoved, FileStored, emit, is_heard
from ckptstore.plan import PlannedFile
from ckptstore.sources import Read
from ckptstore.storage.base import PartWriter, Persists
from ckptstore.transfer.engine import STEP_BYTES, TASK_BYTES, Engine, is_worth_writing_anew
from ckptstore.transfer.pool import Run, Task
from ckptstore.transfer.values import Stored


def upload(engine: Engine, files: Sequence[PlannedFile], beat: Callable[[], None]) -> list[Stored]:
    """Write all files and make them durable; the result has their order. See `Transfer.upload`."""
    upload_ = _Upload(engine, files, beat)
    upload_.write_all(range(len(files)))
    storage = engine.storage
    if engine.config.durable and isinstance(storage, Persists):
        keys = [file.key for file in files]
        try:
            storage.persist(keys)
        except CkptstoreError as error:
            if not is_worth_writing_anew(error):
                raise
            upload_.write_all(range(len(files)))
            storage.persist(keys)
        beat()
    return upload_.results()


class _Upload:
    """One call of `upload`."""

    def __init__(self, engine: Engine, files: Sequence[PlannedFile], beat: Callable[[], None]) -> None:
        self._engine = engine
        self._files = files
        self._beat = beat
        self._total_bytes = sum(file.source.size_bytes for file in files)
        self._stored: list[Stored | None] = [None] * len(files)
        self._failed: list[tuple[int, CkptstoreError]] = []

    def results(self) -> list[Stored]:
        return [stored for stored in self._stored if stored is not None]

    def write_all(self, indices: Iterable[int]) -> None:
        """Write these files. One whose last step fails is written anew, once."""
        self._write(indices)
        if self._failed:
            again, self._failed = [index for index, _ in self._failed], []
            self._write(again)
        if self._failed:
            raise self._failed[0][1]

    def _write(self, indices: Iterable[int]) -> None:
        large: list[_InParts] = []
        small: list[int] = []
        for index in indices:
            size_bytes = self._files[index].source.size_bytes
            part_bytes = self._engine.part_bytes(size_bytes)
            if part_bytes is None:
                small.append(index)
            else:
                large.append(_InParts(self, index, part_bytes))
        tasks: list[Task] = [task for file in large for task in file.tasks()]
        sizes = [self._files[index].source.size_bytes for index in small]
        tasks += [partial(self._write_whole, small[batch]) for batch in self._engine.batches(sizes)]
        try:
            self._engine.pool.run(tasks, self._beat)
        except BaseException:
            for file in large:
                file.abort()
            raise
        finally:
            self._engine.scratch.trim()

    def _write_whole(self, indices: Sequence[int], run: Run) -> None:
        """Write small files, each in one call."""
        sources = [self._files[index].source for index in indices]
        most_bytes = max((source.size_bytes for source in sources if not source.in_memory), default=0)
        moved_bytes = 0
        with self._engine.scratch.take(most_bytes, run) as scratch:
            for index, source in zip(indices, sources, strict=True):
                run.check()
                began = time.monotonic()
                key, size_bytes = self._files[index].key, source.size_bytes
                digest = FileDigest(source.payloads)
                try:
                    with source.open() as read:
                        views = read_hashed(read, digest, offset=0, size_bytes=size_bytes, scratch=scratch)
                    self._engine.request(run, f"write {key}", partial(self._engine.storage.write, key, views))
                except CkptstoreError as error:
                    raise error.at(file=key) from None
                self.done(index, digest, seconds=time.monotonic() - began)
                moved_bytes += size_bytes
                run.moved_bytes += size_bytes + 1
        self.moved(key, moved_bytes)

    def moved(self, key: str, size_bytes: int) -> None:
        if is_heard(BytesMoved):
            emit(BytesMoved(key=key, size_bytes=size_bytes, total_bytes=self._total_bytes))

    def done(self, index: int, digest: FileDigest, *, seconds: float) -> None:
        file = self._files[index]
        size_bytes = file.source.size_bytes
        self._stored[index] = Stored(file.key, size_bytes, digest.crc32c(), digest.block_crcs())
        if is_heard(FileStored):
            emit(FileStored(key=file.key, size_bytes=size_bytes, seconds=seconds, rank=self._engine.rank))

    def failed(self, index: int, error: CkptstoreError) -> None:
        self._failed.append((index, error))


class _InParts:
    """One file that is written in parts, by several threads."""

    def __init__(self, upload_: _Upload, index: int, part_bytes: int) -> None:
        self._upload = upload_
        self._engine = upload_._engine
        self._index = index
        self._key = upload_._files[index].key
        self._source = upload_._files[index].source
        self._part_bytes = part_bytes
        self._digest = FileDigest(self._source.payloads)
        self._lock = threading.Lock()
        self._writer: PartWriter | None = None
        self._left_bytes = self._source.size_bytes
        self._began = 0.0

    def tasks(self) -> list[Task]:
        task_bytes = max(1, TASK_BYTES // self._part_bytes) * self._part_bytes
        return [partial(self._write, start) for start in range(0, self._source.size_bytes, task_bytes)]

    def abort(self) -> None:
        """Drop what was written of an unfinished file. Called when no task is running."""
        if self._writer is not None:
            self._writer.abort()

    def _write(self, start: int, run: Run) -> None:
        """Write the parts of one task, and finish the file after its last part."""
        end = min(start + max(1, TASK_BYTES // self._part_bytes) * self._part_bytes, self._source.size_bytes)
        scratch_bytes = 0 if self._source.in_memory else self._part_bytes
        try:
            with self._engine.scratch.take(scratch_bytes, run) as scratch, self._source.open() as read:
                writer = self._opened(run)
                for offset in range(start, end, self._part_bytes):
                    run.check()
                    size = min(self._part_bytes, end - offset)
                    views = read_hashed(read, self._digest, offset=offset, size_bytes=size, scratch=scratch)
                    self._engine.request(run, f"write {self._key}", partial(writer.write_part, offset, views))
                    run.moved_bytes += size
            self._upload.moved(self._key, end - start)
            with self._lock:
                self._left_bytes -= end - start
                is_last = self._left_bytes == 0
            if is_last:
                self._finish(run, writer)
        except CkptstoreError as error:
            raise error.at(file=self._key) from None

    def _opened(self, run: Run) -> PartWriter:
        with self._lock:
            if self._writer is None:
                assert self._engine.parts is not None
                begin = partial(self._engine.parts.open_parts, self._key, self._source.size_bytes)
                self._began = time.monotonic()
                self._writer = self._engine.request(run, f"begin {self._key}", begin)
            return self._writer

    def _finish(self, run: Run, writer: PartWriter) -> None:
        try:
            self._engine.request(run, f"finish {self._key}", writer.finish)
        except CkptstoreError as error:
            if not is_worth_writing_anew(error):
                raise
            writer.abort()
            self._upload.failed(self._index, error.at(file=self._key))
        else:
            self._upload.done(self._index, self._digest, seconds=time.monotonic() - self._began)
        self._writer = None


def read_hashed(
    read: Read, digest: FileDigest, *, offset: int, size_bytes: int, scratch: memoryview
) -> Sequence[memoryview]:
    """Read a part in steps, and hash each while it is in the processor's cache."""
    if size_bytes <= STEP_BYTES:
        views = read(offset, size_bytes, scratch)
        digest.add(offset, views)
        return views
    found: list[memoryview] = []
    for start in range(0, size_bytes, STEP_BYTES):
        size = min(STEP_BYTES, size_bytes - start)
        views = read(offset + start, size, scratch[start : start + size])
        digest.add(offset + start, views)
        found += views
    return found
