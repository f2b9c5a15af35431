"""Fetch whole files from a storage through buffers: to a local disk, or to nowhere just to check them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing
from ckptstore.events import BytesMoved, emit, is_heard
from ckptstore.format.digest import Digest, file_digest
from ckptstore.runtime.beat import beat
from ckptstore.storage.disk.local_parts import READ_ONLY, WRITABLE, NewFile, make_durable, write_new
from ckptstore.storage.second_look import tell
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.engine import STEP_BYTES, TASK_BYTES, Engine
from ckptstore.transfer.moves import EXTENT_BYTES, Checked, Wanted
from ckptstore.transfer.peer_reads import PeerReads
from ckptstore.transfer.pool import Operation, Task


def download(engine: Engine, wanted: Sequence[tuple[Wanted, str]], *, read_only: bool, durable: bool) -> None:
    """Fetch files to new paths. See `Transfer.download`."""
    mode = READ_ONLY if read_only else WRITABLE
    nodes = PeerReads(engine.peers) if engine.peers is not None and engine.peers.are_several else None
    for checked in _fetch_twice(engine, wanted, mode, durable, nodes):
        if checked.damage:
            raise checked.damage
    if durable:
        make_durable([path for _, path in wanted])
        beat()


def check(engine: Engine, wanted: Sequence[Wanted]) -> list[Checked]:
    """Read files to the end. See `Transfer.check`."""
    return _fetch_twice(engine, [(item, None) for item in wanted], WRITABLE, False)


def _fetch_twice(
    engine: Engine,
    places: Sequence[tuple[Wanted, str | None]],
    mode: int,
    durable: bool,
    nodes: PeerReads | None = None,
) -> list[Checked]:
    """Fetch each file to its path, or to nowhere if that is None, and those that seem damaged once more, in another
    way. What peers gave wrong does not count: the storage is read twice then. The result has their order."""
    found = _fetch(engine, places, mode, durable, nodes)
    # A bit may have flipped on its way.
    damaged = [place for place, checked in zip(places, found, strict=True) if checked.damage]
    if not damaged:
        return found
    if is_of_nodes := nodes is not None and nodes.begin_turn():
        again = iter(_fetch_twice(engine, damaged, mode, durable, nodes))
    else:
        for item, _ in damaged:
            engine.storage.doubt(item.key)
        again = iter(_fetch(engine, damaged, mode, durable, nodes))
    result = [next(again) if checked.damage else checked for checked in found]
    for first, second in zip(found, result, strict=True):
        if first.damage and not second.damage and not is_of_nodes:
            tell(engine.storage, first.wanted.key, first.damage.message)
    return result


def _fetch(
    engine: Engine,
    places: Sequence[tuple[Wanted, str | None]],
    mode: int,
    durable: bool,
    nodes: PeerReads | None,
) -> list[Checked]:
    total_bytes = sum(item.size_bytes for item, _ in places)
    found: dict[int, Checked] = {}
    small = [index for index, (item, _) in enumerate(places) if item.size_bytes <= STEP_BYTES]
    if nodes is not None:
        order = nodes.peers.order([(places[index][0].key, 0, places[index][0].size_bytes) for index in small])
        small = [small[number] for number in order]
    fetches = {
        index: _Fetch(engine, item, path, mode, durable, total_bytes, nodes)
        for index, (item, path) in enumerate(places)
        if item.size_bytes > STEP_BYTES
    }

    def fetch_batch(indices: Sequence[int], run: Operation) -> None:
        some = [places[index] for index in indices]
        found.update(zip(indices, _fetch_batch(engine, some, mode, run, nodes), strict=True))
        _tell(some[-1][0].key, sum(item.size_bytes for item, _ in some), total_bytes)

    moves = [
        (fetch, start) for fetch in fetches.values() for start in range(0, fetch.wanted.size_bytes, fetch.task_bytes)
    ]
    if nodes is not None:
        order = nodes.peers.order([(fetch.wanted.key, start, fetch.task_bytes) for fetch, start in moves])
        moves = [moves[number] for number in order]
    tasks: list[Task] = [partial(fetch.move, start) for fetch, start in moves]
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
    return [found[index] for index in range(len(places))]


def _tell(key: str, size_bytes: int, total_bytes: int) -> None:
    traffic_here().read_bytes += size_bytes
    if is_heard(BytesMoved):
        emit(BytesMoved(key=key, size_bytes=size_bytes, total_bytes=total_bytes))


def _fetch_batch(
    engine: Engine, places: Sequence[tuple[Wanted, str | None]], mode: int, run: Operation, nodes: PeerReads | None
) -> list[Checked]:
    """Read small files, each in one call, and write those with the right bytes to their paths, where they have one."""
    with engine.scratch.take(sum(item.size_bytes for item, _ in places), run) as scratch:
        found, start = [], 0
        for item, path in places:
            view = scratch[start : start + item.size_bytes]
            start += item.size_bytes
            run.check()
            try:
                found.append(_read_checked(engine, item, view, path is None, run, nodes))
                if path is not None and found[-1].damage is None:
                    write_new(item.key, path, view, mode=mode)
            except CkptstoreError as error:
                raise error.at(file=item.key) from None
            run.moved(item.size_bytes)
        return found


def _read_checked(
    engine: Engine, item: Wanted, view: memoryview, whole: bool, run: Operation, nodes: PeerReads | None
) -> Checked:
    """Read a file and compare its digest; with `whole` it must also have no byte more."""
    try:
        version = _version_of(engine, item, run) if whole else None
        if view and not (nodes is not None and nodes.read(run, item, 0, view)):
            request = partial(engine.storage.read_into, item.key, 0, (view,), version=version)
            engine.request(run, f"read {item.key}", request, reads=item.key)
            if nodes is not None:
                nodes.note(item.key, 0, view)
    except (CheckpointDamaged, FileMissing) as error:
        return Checked(item, None, error)
    found = Digest.of(view, algorithm=item.algorithm)
    fault = _fault_of(item, found)
    if nodes is not None and fault is None:
        nodes.settle(item.key)
    return Checked(item, found, fault)


def _version_of(engine: Engine, item: Wanted, run: Operation) -> str | None:
    """Return the version of a file. Raises CheckpointDamaged when it has another size, FileMissing."""

    def look() -> str | None:
        found = engine.storage.stat(item.key)
        if found.size_bytes != item.size_bytes:
            text = f"{item.key} has {found.size_bytes:,} bytes, {item.size_bytes:,} are expected"
            raise CheckpointDamaged(text, file=item.key)
        return found.version

    return engine.request(run, f"read {item.key}", look, reads=item.key)


def _fault_of(item: Wanted, found: Digest) -> CheckpointDamaged | None:
    """Return the error for a file whose bytes have the digest `found`; None if it is right, or no digest is known."""
    if item.digest is None or found == item.digest:
        return None
    text = f"{item.key} is damaged: {item.digest.shown} is expected, {found.hex} is found"
    return CheckpointDamaged(text, file=item.key)


class _Fetch:
    """One file that is read by several threads, to its path, or to nowhere: then it must also have no byte more."""

    def __init__(
        self,
        engine: Engine,
        wanted: Wanted,
        path: str | None,
        mode: int,
        durable: bool,
        total_bytes: int,
        nodes: PeerReads | None,
    ) -> None:
        self.wanted = wanted
        self._total_bytes = total_bytes
        self._nodes = nodes
        self.damage: CheckpointDamaged | FileMissing | None = None
        self.found_digest: Digest | None = None
        self._engine = engine
        self._path = path
        self._mode = mode
        self._durable = durable
        self._digest = file_digest(algorithm=wanted.algorithm)
        task_bytes = TASK_BYTES if nodes is None else EXTENT_BYTES
        self.task_bytes = wanted.size_bytes if self._digest.needs_order else task_bytes
        self._lock = threading.Lock()
        self._left_bytes = wanted.size_bytes
        self._is_begun = False
        self._version: str | None = None
        self._file: NewFile | None = None

    def abort(self) -> None:
        """Drop an unfinished file. Called when no other task works on it."""
        if self._file is not None:
            self._file.abort()
            self._file = None

    def move(self, start: int, run: Operation) -> None:
        """Read one stretch of the file; the last one compares the digests."""
        end = min(start + self.task_bytes, self.wanted.size_bytes)
        run.check()
        try:
            with self._lock:
                if not self._is_begun:
                    self._is_begun = True
                    self._begin(run)
            self._read(start, end, run)
        except (CheckpointDamaged, FileMissing) as error:
            self.damage = self.damage or error
        except CkptstoreError as error:
            raise error.at(file=self.wanted.key) from None
        with self._lock:
            self._left_bytes -= end - start
            is_last = self._left_bytes == 0
        if is_last:
            if not self.damage:
                self.found_digest = self._digest.digest()
                self.damage = _fault_of(self.wanted, self.found_digest)
            if self.damage:
                self.abort()
                return
            if self._nodes is not None:
                self._nodes.settle(self.wanted.key)
            if self._file is not None:
                self._file.finish()
                self._file = None

    def _begin(self, run: Operation) -> None:
        if self._path is None:
            self._version = _version_of(self._engine, self.wanted, run)
            return
        self._file = NewFile(
            self.wanted.key,
            self._path,
            size_bytes=self.wanted.size_bytes,
            writes_back=self._durable,
            mode=self._mode,
        )

    def _read(self, start: int, end: int, run: Operation) -> None:
        key, request_bytes = self.wanted.key, min(TASK_BYTES, end - start)
        with self._engine.scratch.take(request_bytes, run) as scratch:
            for offset in range(start, end, request_bytes):
                if self.damage:
                    return
                run.check()
                view = scratch[: min(request_bytes, end - offset)]
                read = partial(self._engine.storage.read_into, key, offset, [view], version=self._version)
                if not (self._nodes is not None and self._nodes.read(run, self.wanted, offset, view)):
                    self._engine.request(run, f"read {key}", read, reads=key)
                    if self._nodes is not None:
                        self._nodes.note(key, offset, view)
                for first in range(0, len(view), STEP_BYTES):
                    step = view[first : first + STEP_BYTES]
                    self._digest.add(offset + first, [step])
                    if self._file is not None:
                        self._file.write_part(offset + first, [step])
                run.moved(len(view))
                _tell(key, len(view), self._total_bytes)
