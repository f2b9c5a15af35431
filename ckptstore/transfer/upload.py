"""Write sources to a storage: each byte is read once, hashed and written while it is in the processor's cache."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest

from ckptstore.errors import CkptstoreError
from ckptstore.events import BytesMoved, FileStored, emit, is_heard
from ckptstore.format.digest import FileDigest, file_digest
from ckptstore.runtime.beat import beat
from ckptstore.storage.base import PartWriter
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.batch import read_hashed, write_batch
from ckptstore.transfer.engine import TASK_BYTES, Engine, is_worth_writing_anew
from ckptstore.transfer.moves import PlannedFile, Stored
from ckptstore.transfer.pool import Operation, Task

_PERSIST_FILES = 4096
"""The number of small files after which they are made durable, while other threads write the next ones."""


def upload(engine: Engine, files: Sequence[PlannedFile], check: Callable[[], None]) -> list[Stored]:
    """Write all files and make them durable; the result has their order. See `Transfer.upload`."""
    upload_ = _Upload(engine, files, check)
    upload_.write_all(range(len(files)))
    try:
        upload_.persist()
    except CkptstoreError as error:
        if not is_worth_writing_anew(error):
            raise
        engine.storage.delete([file.key for file in files])  # new files are written faster than old ones are replaced
        upload_.write_all(range(len(files)))
        upload_.persist()
    traffic_here().written_bytes += upload_.total_bytes
    beat()
    return upload_.results()


class _Upload:
    """One call of `upload`."""

    def __init__(self, engine: Engine, files: Sequence[PlannedFile], check: Callable[[], None]) -> None:
        self._engine = engine
        self._files = files
        self._check = check
        self._sizes_bytes = [file.source.size_bytes for file in files]
        self.total_bytes = sum(self._sizes_bytes)
        self._stored: list[Stored | None] = [None] * len(files)
        self._failed: list[tuple[int, CkptstoreError]] = []
        self._lock = threading.Lock()
        self._written: list[str] = []
        """The keys that are not durable yet."""
        self._not_durable: CkptstoreError | None = None

    def results(self) -> list[Stored]:
        return [stored for stored in self._stored if stored is not None]

    def write_all(self, indices: Iterable[int]) -> None:
        """Write these files. A file whose last step fails is written again from the beginning, once."""
        self._write(indices)
        if self._failed:
            again, self._failed = [index for index, _ in self._failed], []
            self._write(again)
        if self._failed:
            raise self._failed[0][1]

    def _write(self, indices: Iterable[int]) -> None:
        large: list[_InParts] = []
        small: list[int] = []
        sizes_bytes = self._sizes_bytes
        parts_bytes = {size_bytes: self._engine.part_bytes(size_bytes) for size_bytes in {*sizes_bytes}}
        for index in indices:
            part_bytes = parts_bytes[sizes_bytes[index]]
            if part_bytes is None:
                small.append(index)
            else:
                large.append(_InParts(self, index, part_bytes))
        tasks = in_turns([file.tasks() for file in large], self._engine.pool.num_threads if self._engine.disk else 1)
        batches = [small[batch] for batch in self._engine.batches([sizes_bytes[index] for index in small])]
        num_chains = self._engine.small_tasks()
        if num_chains < len(batches):
            shared = deque(batches)
            chains = [partial(self._write_chain, shared, number % 2 == 1) for number in range(num_chains)]
        else:
            chains = [partial(self._write_chain, deque([batch]), False) for batch in batches]
        # The chains begin first: while they wait for each other in the file system, large files keep the disk busy.
        tasks = [*chains, *tasks]
        try:
            self._engine.pool.run(tasks, check=self._check)
        except BaseException:
            for file in large:
                file.abort()
            raise
        finally:
            self._engine.scratch.trim()

    def persist(self) -> None:
        """Make the written files durable. Raises the error of an earlier call on another thread too."""
        if self._not_durable is not None:
            error, self._not_durable = self._not_durable, None
            self._written = []
            raise error
        with self._lock:
            keys, self._written = self._written, []
        if self._engine.config.durable and keys:
            self._engine.storage.persist(keys)

    def _write_chain(self, batches: deque[list[int]], from_end: bool, run: Operation) -> None:
        """Write small files, batch after batch, until none is left, and have the disk keep up."""
        # A directory takes one new file at a time. So half of the chains begin at the end, in other directories.
        while batches:
            try:
                indices = batches.pop() if from_end else batches.popleft()
            except IndexError:  # another chain was faster
                return
            self._write_small(indices, run)
            if len(self._written) >= _PERSIST_FILES and self._not_durable is None:
                try:
                    self.persist()
                except CkptstoreError as error:
                    self._not_durable = error

    def _write_small(self, indices: Sequence[int], run: Operation) -> None:
        stored, seconds = write_batch(self._engine, [self._files[index] for index in indices], run)
        for index, result in zip(indices, stored, strict=True):
            self._stored[index] = result
        with self._lock:
            self._written += [result.key for result in stored]
        if is_heard(FileStored):
            for result in stored:
                self.tell(result, seconds / len(stored))
        self.moved(stored[-1].key, sum(result.size_bytes for result in stored))

    def moved(self, key: str, size_bytes: int) -> None:
        if is_heard(BytesMoved):
            emit(BytesMoved(key=key, size_bytes=size_bytes, total_bytes=self.total_bytes))

    def done(self, index: int, digest: FileDigest, *, seconds: float) -> None:
        file = self._files[index]
        result = Stored(file.key, file.source.size_bytes, digest.digest(), digest.block_digests())
        self._stored[index] = result
        with self._lock:
            self._written.append(file.key)
        self.tell(result, seconds)

    def tell(self, result: Stored, seconds: float) -> None:
        emit(FileStored(key=result.key, size_bytes=result.size_bytes, seconds=seconds, rank=self._engine.rank))

    def failed(self, index: int, error: CkptstoreError) -> None:
        self._failed.append((index, error))


def in_turns(files: Sequence[Sequence[Task]], num_files: int) -> list[Task]:
    """Order the tasks of so many files at a time, one of each in turn."""
    # A file system lets one thread at a time copy into a file; the others spin. So each thread gets its own file.
    groups = (files[first : first + num_files] for first in range(0, len(files), num_files))
    return [task for group in groups for turn in zip_longest(*group) for task in turn if task is not None]


class _InParts:
    """One file that is written in parts, by several threads."""

    def __init__(self, upload_: _Upload, index: int, part_bytes: int) -> None:
        self._upload = upload_
        self._engine = upload_._engine
        self._index = index
        self._key = upload_._files[index].key
        self._source = upload_._files[index].source
        self._part_bytes = part_bytes
        algorithm = self._engine.algorithm(upload_._files[index])
        self._digest = file_digest(self._source.payloads, algorithm=algorithm)
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
                            views, part_digest = read_hashed(
                                read, self._digest, offset=offset, size_bytes=size, scratch=scratch
                            )
                        self._engine.request(
                            run, f"write {self._key}", partial(writer.write_part, offset, views, part_digest)
                        )
                    run.moved(size)
                    self._upload.moved(self._key, size)
            with self._lock:
                self._left_bytes -= end - start
                is_last = self._left_bytes == 0
            if is_last:
                self._finish(run, writer)
        except CkptstoreError as error:
            raise error.at(file=self._key) from None

    def _opened(self, run: Operation) -> PartWriter:
        with self._lock:
            if self._writer is None:
                assert self._engine.parts is not None
                begin = partial(self._engine.parts.open_parts, self._key, self._source.size_bytes)
                self._began = time.monotonic()
                self._writer = self._engine.request(run, f"begin {self._key}", begin)
            return self._writer

    def _finish(self, run: Operation, writer: PartWriter) -> None:
        try:
            self._engine.request(run, f"finish {self._key}", writer.finish)
        except CkptstoreError as error:
            if error.retryable or not is_worth_writing_anew(error):  # it has been retried by now
                raise
            writer.abort()
            self._upload.failed(self._index, error.at(file=self._key))
        else:
            self._upload.done(self._index, self._digest, seconds=time.monotonic() - self._began)
        self._writer = None
