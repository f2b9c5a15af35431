"""Read from a storage straight into existing memory: parallel over ranges and inside them, each byte checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from ckptstore.errors import CheckpointDamaged, CkptstoreError
from ckptstore.events import BytesMoved, emit, is_heard
from ckptstore.format.digest import Digest
from ckptstore.storage.second_look import tell
from ckptstore.storage.traffic import traffic_here
from ckptstore.transfer.engine import TASK_BYTES, Engine
from ckptstore.transfer.moves import EXTENT_BYTES, RangeRead, Supplied
from ckptstore.transfer.pool import Operation, Task

_MAX_BATCH_RANGES = 256


def read_tasks(engine: Engine, ranges: Sequence[RangeRead]) -> list[Task]:
    """Return the tasks that fill the views of all ranges. See `Transfer.read`."""
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
    if engine.peers is not None and engine.peers.are_several:
        order = engine.peers.order([(batch[0].key, batch[0].offset, batch[0].size_bytes) for batch in batches])
        batches = [batches[number] for number in order]
    return [partial(_read_all, engine, batch, total_bytes) for batch in batches]


def split(item: RangeRead, most_bytes: int) -> Iterator[RangeRead]:
    """Split a range into pieces of at most that size, cut between checks; a larger check stays whole."""
    if item.size_bytes <= most_bytes:
        yield item
        return
    sizes = [size for size, _ in item.checks] or [
        min(most_bytes, item.size_bytes - start) for start in range(0, item.size_bytes, most_bytes)
    ]
    offset, first, total = item.offset, 0, 0
    cuts: list[tuple[int, int, int, int]] = []
    for index, size_bytes in enumerate(sizes):
        if index > first and total + size_bytes > most_bytes:
            cuts.append((offset, total, first, index))
            offset, first, total = offset + total, index, 0
        total += size_bytes
    cuts.append((offset, total, first, len(sizes)))
    views = _cut(item.views, [total for _, total, _, _ in cuts])
    for (offset, _, first, end), some in zip(cuts, views, strict=True):
        yield RangeRead(item.key, offset, some, item.checks[first:end])


def _cut(views: Sequence[memoryview], sizes_bytes: Iterable[int]) -> Iterator[tuple[memoryview, ...]]:
    """Cut views, one stretch of bytes, into stretches of these sizes, without a copy."""
    index = start = 0
    for size_bytes in sizes_bytes:
        view = views[index] if size_bytes else memoryview(b"")
        if 0 < size_bytes < len(view) - start:  # by far the most common
            yield (view[start : start + size_bytes],)
            start += size_bytes
            continue
        found: list[memoryview] = []
        left_bytes = size_bytes
        while left_bytes:
            view = views[index][start : start + left_bytes]
            start += len(view)
            left_bytes -= len(view)
            if start == len(views[index]):
                index, start = index + 1, 0
            if view:
                found.append(view)
        yield tuple(found)


def _read_from_peers(
    engine: Engine, run: Operation, key: str, offset: int, views: Sequence[memoryview]
) -> list[Supplied] | None:
    """Fill the views from the nodes that own the extents, and return what each supplied; None if the storage has to be
    read."""
    if engine.peers is None:
        return None
    found = []
    for start, piece in extents_in(offset, views):
        supplied = engine.peers.fill(key, start, piece, run.check)
        if supplied is None:
            return None
        found.append(supplied)
    return found


def extents_in(offset: int, views: Sequence[memoryview]) -> Iterator[tuple[int, tuple[memoryview, ...]]]:
    """Cut a stretch of a file where extents begin: yield the offset and the views of each."""
    end = offset + sum(map(len, views))
    borders = [offset, *range((offset // EXTENT_BYTES + 1) * EXTENT_BYTES, end, EXTENT_BYTES), end]
    pieces = _cut(views, [after - before for before, after in pairwise(borders)])
    return zip(borders, pieces, strict=False)


def _read_all(engine: Engine, pieces: Sequence[RangeRead], total_bytes: int, run: Operation) -> None:
    moved_bytes = 0
    for piece in pieces:
        run.check()
        try:
            _read_checked(engine, piece, run)
        except CkptstoreError as error:
            raise error.at(file=piece.key) from None
        size_bytes = piece.size_bytes
        run.moved(size_bytes)
        moved_bytes += size_bytes
    traffic_here().read_bytes += moved_bytes
    if is_heard(BytesMoved):
        emit(BytesMoved(key=pieces[-1].key, size_bytes=moved_bytes, total_bytes=total_bytes))


def _read_checked(engine: Engine, piece: RangeRead, run: Operation) -> None:
    """Make one request. Bytes that are not those expected are read a second time: they may have flipped on their
    way."""
    key, offset, views, checks = piece.key, piece.offset, piece.views, piece.checks
    steps = [*_cut(views, [size_bytes for size_bytes, _ in checks])] or [views]
    faults: list[str] = []

    def accept(number: int) -> bool:
        """Return False for the first wrong step, and raise CheckpointDamaged for the next."""
        if not checks:
            return True
        size_bytes, expected = checks[number]
        found = expected.like(*steps[number])
        if found == expected:
            return True
        start = offset + sum(size for size, _ in checks[:number])
        faults.append(
            f"{key} is damaged in the {size_bytes:,} bytes from {start:,} on: {expected.shown} is "
            f"expected, {found.hex} is found"
        )
        if len(faults) > 1:
            raise CheckpointDamaged(faults[-1], file=key)
        return False

    supplied = _read_from_peers(engine, run, key, offset, views) if checks else None
    if supplied is not None and all(check.like(*step) == check for step, (_, check) in zip(steps, checks, strict=True)):
        return
    if engine.disk is not None:
        engine.request(run, f"read {key}", partial(engine.disk.read_steps, key, offset, steps, accept), reads=key)
    else:
        request = partial(engine.storage.read_into, key, offset, views)
        engine.request(run, f"read {key}", request, reads=key)
        while not all(map(accept, range(len(steps)))):
            engine.storage.doubt(key, offset, piece.size_bytes)
            engine.request(run, f"read {key}", request, reads=key)
    for one, (_, right) in zip(supplied or (), extents_in(offset, views), strict=False):
        if engine.peers is not None and one.digest != str(Digest.of(*right)):
            engine.peers.mistrust(key, one)
    if faults:
        tell(engine.storage, key, faults[0])
