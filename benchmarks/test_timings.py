"""What timings cost: their share of a save, on a disk and on S3 in memory, and what they take the leader of many ranks.

Two saves differ by more than timings cost, so they are not compared: every function that only timings need is timed in
the save itself. What counts requests is too short for that; it is timed on its own, and taken as often as it ran.
"""

from __future__ import annotations

import json
import shutil
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
from sizes import FULL, ROUNDS, count, group

from ckptstore import CheckpointStore, KeepLatest, open_store
from ckptstore.format.encoding import dump_json
from ckptstore.format.timings import RankTimings, Timings
from ckptstore.saving import transaction
from ckptstore.saving.phases import SaveClock
from ckptstore.storage.traffic import Traffic, counting, traffic_here
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.bench.shapes import rank_state

SIZE_BYTES = (1 << 30) if FULL else (16 << 20)
SMALL_BYTES = 1 << 20
_REPEATS = 100_000


class Spent:
    """Seconds of a processor in functions that only timings need. They wait for nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed unless it is called by another one of them."""

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._is_inside:
                return function(*arguments, **keywords)
            self._is_inside, started = True, time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                self._is_inside = False
                self.seconds += time.thread_time() - started

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time them while this lasts."""
        methods = [
            (SaveClock, name) for name in ("__init__", "agreed", "ended", "released", "report", "met", "timings")
        ]
        with ExitStack() as stack:
            for owner, name in [*methods, (Timings, "to_json"), (transaction, "longest_seconds")]:
                stack.enter_context(patch.object(owner, name, self.timed(getattr(owner, name))))
            yield


def counting_seconds() -> tuple[float, float]:
    """What it takes to count one request, and to have one task count for itself."""

    def request() -> None:
        traffic_here().requests += 1

    def task() -> None:
        with counting() as traffic:
            traffic_here().add(traffic)

    per_request, per_task = (timeit.timeit(one, number=_REPEATS, timer=time.thread_time) for one in (request, task))
    return per_request / _REPEATS, per_task / _REPEATS


def shares(benchmark: Any, store: CheckpointStore, size_bytes: int) -> None:
    """Saves, each on a clock of what timings took of it."""
    state, found, totals = rank_state("tensors", size_bytes, rank=0), list[float](), list[float]()
    per_request, per_task = counting_seconds()
    store.save(0, state)

    def save() -> None:
        spent = Spent()
        with spent.watching():
            started = time.perf_counter()
            checkpoint = store.save(1 + len(found), state)
            totals.append(time.perf_counter() - started)
        timings = checkpoint.timings
        assert timings is not None
        found.append(spent.seconds + timings.requests * (per_request + per_task) + _encoding_seconds(timings))
        count(found[-1])

    benchmark.pedantic(save, rounds=max(3, ROUNDS))
    total = median(totals)
    benchmark.extra_info.update(
        size_bytes=size_bytes, save_seconds=total, share_percent=round(100 * median(found) / total, 3)
    )


def _encoding_seconds(timings: Timings) -> float:
    """What the manifest takes longer."""
    value = timings.to_json()
    return timeit.timeit(lambda: dump_json(value), number=100, timer=time.thread_time) / 100


@group("What timings take of a save")
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, SIZE_BYTES], ids=["small", "large"])
def test_share_on_a_disk(benchmark: Any, tmp_path: Path, size_bytes: int) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(1), grace_seconds=0) as store:
        shares(benchmark, store, size_bytes)
    shutil.rmtree(tmp_path / "store")


@group("What timings take of a save")
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, SIZE_BYTES], ids=["small", "large"])
def test_share_on_s3(benchmark: Any, size_bytes: int) -> None:
    with s3_server(buckets=["bench"], verify=False, keep_bodies=False) as server:
        options = {"storage_options": server.storage_options, "grace_seconds": 0}
        with open_store("s3://bench/timings", retention=KeepLatest(1), **options) as store:
            shares(benchmark, store, size_bytes)


@pytest.mark.benchmark(group="Timings of many ranks, joined by the leader")
@pytest.mark.parametrize("num_ranks", [64, 1000, 10_000])
def test_leader_of_many_ranks(benchmark: Any, num_ranks: int) -> None:
    """From the reports of all ranks to the field of the manifest."""
    clock, answers = _reports(num_ranks)

    def joined() -> bytes:
        return dump_json(clock.timings([json.loads(answer) for answer in answers]).to_json())

    field = benchmark.pedantic(joined, rounds=max(3, ROUNDS))
    received = sum(map(len, answers)) / num_ranks
    assert received < 250
    assert len(field) < 20_000
    benchmark.extra_info.update(field_bytes=len(field), received_bytes_per_rank=round(received))


def _reports(num_ranks: int) -> tuple[SaveClock, list[bytes]]:
    """The clock of the leader, and what all ranks have sent it: the real reports of clocks that are wound by hand."""
    clocks = []
    for rank in range(num_ranks):
        clock = SaveClock()
        clock.agreed("step-0000000001-e0001-0123abcd", step=1, rank=rank)
        clock.ended("upload", 1.0 + (rank * 7919 % num_ranks) / num_ranks)
        clocks.append(clock)
    traffic = Traffic(requests=64, retries=1, written_bytes=1 << 30)
    answers = [
        json.dumps(clock.report(traffic, node=f"node-{rank // 8:05d}-0123abcd")).encode()
        for rank, clock in enumerate(clocks)
    ]
    assert RankTimings.from_json(json.loads(answers[-1])).rank == num_ranks - 1
    return clocks[0], answers
