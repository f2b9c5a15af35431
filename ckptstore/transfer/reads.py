"""Read from a storage straight into existing memory: parallel over ranges and inside them, each byte checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ckptstore.errors import CheckpointDamaged, CkptstoreError
from ckptstore.events import BytesMoved, emit, is_heard
from ckptstore.storage.second_look import tell
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.engine import TASK_BYTES, Engine
from ckptstore.transfer.moves import RangeRead
from ckptstore.transfer.pool import Operation

_MAX_BATCH_RANGES = 256


def read(engine: Engine, ranges: Sequence[RangeRead]) -> None:
    """Fill the views of all ranges. See `Transfer.read`."""
    ranges = [item for item in ranges if any(item.views)]
    sizes = [item.size_bytes for item in ranges]
    total_bytes = sum(sizes)
    for item, size_bytes in zip(ranges, sizes, strict=True):
        covered_bytes = sum(size for size, _ in item.checks)
        if item.checks and covered_bytes != size_bytes:
            raise ValueError(f"the checks of {item.key} cover {covered_bytes} bytes of {size_bytes}")
    most = _MAX_BATCH_RANGES if engine.disk else 1
    batches: list[list[RangeRead]] = []
    left, left_bytes = 0, 0
    for item, size_bytes in zip(ranges, sizes, strict=True):
        for piece in (item,) if size_bytes <= TASK_BYTES else split(item, TASK_BYTES):
            piece_bytes = size_bytes if piece is item else piece.size_bytes
            if left == 0 or piece_bytes > left_bytes:
                batches.append([])
                left, left_bytes = most, TASK_BYTES
            batches[-1].append(piece)
            left, left_bytes = left - 1, left_bytes - piece_bytes
    engine.pool.run([partial(_read_all, engine, batch, total_bytes) for batch in batches])


def split(item: RangeRead, most_bytes: int) -> Iterator[RangeRead]:
    """Split a range into pieces of at most that size, cut between checks; a larger check stays whole."""
    if item.size_bytes <= most_bytes:
        yield item
        return
    sizes = [size for size, _ in item.checks] or [
        min(most_bytes, item.size_bytes - start) for start in range(0, item.size_bytes, most_bytes)
    ]
    views = _Cursor(item.views)
    offset, first, total = item.offset, 0, 0
    for index, size_bytes in enumerate(sizes):
        if index > first and total + size_bytes > most_bytes:
            yield RangeRead(item.key, offset, views.take(total), item.checks[first:index])
            offset, first, total = offset + total, index, 0
        total += size_bytes
    yield RangeRead(item.key, offset, views.take(total), item.checks[first:])


class _Cursor:
    """Views as one stretch of bytes that is taken piece by piece."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._at = 0

    def take(self, size_bytes: int) -> tuple[memoryview, ...]:
        """Return the next bytes, without a copy."""
        start, view = self._at, self._views[self._index] if size_bytes else memoryview(b"")
        if 0 < size_bytes < len(view) - start:  # by far the most common
            self._at += size_bytes
            return (view[start : self._at],)
        found: list[memoryview] = []
        while size_bytes:
            view = self._views[self._index][self._at : self._at + size_bytes]
            self._at += len(view)
            size_bytes -= len(view)
            if self._at == len(self._views[self._index]):
                self._index, self._at = self._index + 1, 0
            if view:
                found.append(view)
        return tuple(found)


def _read_all(engine: Engine, pieces: Sequence[RangeRead], total_bytes: int, run: Operation) -> None:
    most_bytes = engine.request_bytes
    moved_bytes = 0
    for item in pieces:
        item_bytes = item.size_bytes
        for piece in (item,) if item_bytes <= most_bytes else split(item, most_bytes):
            run.check()
            try:
                _read_checked(engine, piece, run)
            except CkptstoreError as error:
                raise error.at(file=piece.key) from None
            run.moved(item_bytes if piece is item else piece.size_bytes)
        moved_bytes += item_bytes
    traffic_here().read_bytes += moved_bytes
    if is_heard(BytesMoved):
        emit(BytesMoved(key=pieces[-1].key, size_bytes=moved_bytes, total_bytes=total_bytes))


def _read_checked(engine: Engine, piece: RangeRead, run: Operation) -> None:
    """Make one request. Bytes that are not those expected are read a second time: they may have flipped on their
    way."""
    views = _Cursor(piece.views)
    steps = [views.take(size_bytes) for size_bytes, _ in piece.checks] or [piece.views]
    if engine.disk is not None:
        read_steps = engine.disk.read_steps
        check = _Check(piece, steps)
        engine.read(run, piece.key, lambda: read_steps(piece.key, piece.offset, steps, check))
        if check.was_wrong is not None:
            tell(engine.storage, piece.key, check.was_wrong)
        return
    request = partial(engine.storage.read_into, piece.key, piece.offset, piece.views)
    check = _Check(piece, steps)
    engine.read(run, piece.key, request)
    while not all(map(check, range(len(steps)))):
        if engine.doubts is not None:
            engine.doubts.doubt(piece.key, piece.offset, piece.size_bytes)
        engine.read(run, piece.key, request)
    if check.was_wrong is not None:
        tell(engine.storage, piece.key, check.was_wrong)


class _Check:
    """Compares the digests of a range step by step: returns False for the first wrong one, and raises CheckpointDamaged
    for the next."""

    def __init__(self, piece: RangeRead, steps: Sequence[Sequence[memoryview]]) -> None:
        self._piece = piece
        self._steps = steps
        self.was_wrong: str | None = None
        """The first fault, in words; None if there was none."""

    def __call__(self, number: int) -> bool:
        if not self._piece.checks:
            return True
        size_bytes, expected = self._piece.checks[number]
        found = expected.like(*self._steps[number])
        if found == expected:
            return True
        offset = self._piece.offset + sum(size for size, _ in self._piece.checks[:number])
        wrong = (
            f"{self._piece.key} is damaged in the {size_bytes:,} bytes from {offset:,} on: {expected.shown} is "
            f"expected, {found.hex} is found"
        )
        if self.was_wrong is None:
            self.was_wrong = wrong
            return False
        raise CheckpointDamaged(wrong, file=self._piece.key)
