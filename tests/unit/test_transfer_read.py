"""Range reads: the right bytes in the right places, and no damaged byte is ever handed out in silence."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moving import DATA, MIB, checked_range, make_storage, transfer_over, transfers_end  # noqa: F401

from ckptstore.errors import AccessDenied, CheckpointDamaged, FileMissing
from ckptstore.events import BytesMoved, Event, listening
from ckptstore.format.digest import Digest
from ckptstore.testing.faults import CountCalls, FailAt, TearAt, wrap
from ckptstore.transfer import RangeRead
from ckptstore.transfer.reads import split


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    storage = make_storage(request.param, tmp_path)
    storage.write("big", [memoryview(DATA)])
    storage.write("small", [memoryview(DATA)[:1000]])
    storage.write("empty", [])
    return storage


def test_ranges_of_all_kinds(storage: Any) -> None:
    ranges = [
        checked_range("big", DATA, 0, len(DATA)),
        checked_range("big", DATA, 4096, 33 * MIB + 1, num_views=5),
        checked_range("small", DATA, 10, 900, num_views=3),
        checked_range("empty", DATA, 0, 0),
        RangeRead("big", 12_345, (memoryview(bytearray(20 * MIB + 1)),)),
        *(checked_range("big", DATA, at, 4096) for at in range(0, 2 * MIB, 4096)),
    ]
    transfer_over(storage).read(ranges)
    for item in ranges:
        assert b"".join(item.views) == DATA[item.offset : item.offset + item.size_bytes]


@given(
    offset=st.integers(0, 1000),
    view_sizes=st.lists(st.integers(0, 300), max_size=8),
    most_bytes=st.integers(1, 400),
    data=st.data(),
)
def test_a_range_is_split_without_gaps(
    offset: int, view_sizes: list[int], most_bytes: int, data: st.DataObject
) -> None:
    total = sum(view_sizes)
    views = tuple(memoryview(bytearray(size)) for size in view_sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    borders = [0, *cuts, total]
    sizes = [end - start for start, end in pairwise(borders)]
    checks = tuple((size, index) for index, size in enumerate(sizes)) if data.draw(st.booleans()) else ()
    item = RangeRead("key", offset, views, checks)
    pieces = list(split(item, most_bytes))
    at = offset
    for number, piece in enumerate(pieces):
        assert piece.offset == at
        assert piece.key == "key"
        assert piece.size_bytes <= most_bytes or len([size for size, _ in piece.checks if size]) == 1
        assert not checks or sum(size for size, _ in piece.checks) == piece.size_bytes
        for view in piece.views:
            view[:] = bytes([number % 251]) * len(view)
        at += piece.size_bytes
    assert at == offset + total
    filled = b"".join(views)
    assert filled == b"".join(bytes([number % 251]) * piece.size_bytes for number, piece in enumerate(pieces))
    if total and checks:
        kept = [check for piece in pieces for check in piece.checks if check[0]]
        assert kept == [check for check in checks if check[0]]


@pytest.mark.parametrize("offset", [0, 5 * MIB + 77, len(DATA) - 1])
def test_one_flipped_bit_is_found_and_named(storage: Any, offset: int) -> None:
    damaged = bytearray(DATA)
    damaged[offset] ^= 4
    storage.write("big", [memoryview(damaged)])
    start = offset // MIB * MIB
    size = min(MIB, len(DATA) - start)
    transfer = transfer_over(storage)
    with pytest.raises(CheckpointDamaged) as caught:
        transfer.read([checked_range("big", DATA, 0, len(DATA))])
    expected, found = Digest.of(DATA[start : start + size]), Digest.of(damaged[start : start + size])
    for text in ("big", f"{start:,}", expected.hex, found.hex):
        assert text in str(caught.value)
    transfer.read([checked_range("big", DATA, start + size, len(DATA) - start - size)])


def test_a_bit_that_flips_on_its_way_is_read_again(storage: Any) -> None:
    lock = threading.Lock()
    flipped: list[int] = []

    class Flipping:
        """Damages the first read of the third MiB."""

        def __getattr__(self, name: str) -> Any:
            return self._read_steps if name == "read_steps" and hasattr(storage, name) else getattr(storage, name)

        def read_into(self, key: str, offset: int, views: Any, *, version: str | None = None) -> None:
            storage.read_into(key, offset, views, version=version)
            self._flip(offset, views)

        def _read_steps(self, key: str, offset: int, steps: Any, accept: Any, *, version: str | None = None) -> None:
            def look(number: int) -> bool:
                self._flip(offset + sum(len(view) for step in steps[:number] for view in step), steps[number])
                return bool(accept(number))

            storage.read_steps(key, offset, steps, look, version=version)

        def _flip(self, offset: int, views: Any) -> None:
            with lock:
                if offset <= 3 * MIB < offset + sum(map(len, views)) and not flipped:
                    flipped.append(offset)
                    views[0][0] ^= 1

    item = checked_range("big", DATA, 0, len(DATA))
    transfer_over(Flipping()).read([item])
    assert len(flipped) == 1
    assert b"".join(item.views) == DATA


def test_a_short_or_missing_file_is_named(storage: Any) -> None:
    transfer = transfer_over(storage)
    with pytest.raises(CheckpointDamaged, match="small"):
        transfer.read([checked_range("small", DATA, 500, 1000)])
    with pytest.raises(FileMissing) as caught:
        transfer.read([checked_range("missing", DATA, 0, 10), checked_range("big", DATA, 0, len(DATA))])
    assert caught.value.file == "missing"


def test_checks_that_do_not_cover_the_range_are_refused(storage: Any) -> None:
    counted = CountCalls()
    with pytest.raises(ValueError, match="cover 9 bytes of 10"):
        transfer_over(wrap(storage, counted)).read([RangeRead("small", 0, (memoryview(bytearray(10)),), ((9, 0),))])
    assert counted.total == 0


def test_passing_errors_are_retried_others_are_not(storage: Any) -> None:
    transfer = transfer_over(wrap(storage, TearAt("read_into *", times=4)))
    item = checked_range("big", DATA, 0, len(DATA))
    transfer.read([item])
    assert b"".join(item.views) == DATA
    counted = CountCalls()
    denied = FailAt("read_into *", AccessDenied("no"), times=None)

    def hook(call: Any) -> None:
        counted(call)
        denied(call)

    transfer = transfer_over(wrap(storage, hook), num_threads=1)
    with pytest.raises(AccessDenied) as caught:
        transfer.read([checked_range("small", DATA, 0, 10), *[checked_range("big", DATA, 0, len(DATA))] * 3])
    assert caught.value.file == "small"
    assert counted.total == 1


def test_what_is_empty_costs_no_request(storage: Any) -> None:
    """Servers refuse a range of no bytes."""
    counted = CountCalls()
    transfer = transfer_over(wrap(storage, counted))
    transfer.read([checked_range("empty", DATA, 0, 0), RangeRead("small", 5, (memoryview(b""),))])
    transfer.read([])
    assert counted.total == 0


def test_progress_is_told(storage: Any) -> None:
    heard: list[Event] = []
    with listening(heard.append):
        transfer_over(storage).read([checked_range("big", DATA, 0, len(DATA)), checked_range("small", DATA, 0, 500)])
    moved = [event for event in heard if isinstance(event, BytesMoved)]
    assert sum(event.size_bytes for event in moved) == len(DATA) + 500
    assert {event.total_bytes for event in moved} == {len(DATA) + 500}
    assert len(moved) >= 3


def test_requests_are_large(storage: Any) -> None:
    """A request to a server costs a round trip, and one to a disk some microseconds."""
    counted = CountCalls()
    transfer_over(wrap(storage, counted)).read([checked_range("big", DATA, 0, len(DATA))])
    assert max(call.size_bytes for call in counted.calls) <= 16 * MIB
    assert counted.total == 3
