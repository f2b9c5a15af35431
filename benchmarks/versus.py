"""Side by side, in one run: the peers run in turn with ckptstore, round by round, so that drift hits all alike.

Figures are ratios against a peer or a raw limit of the same machine at the same time; a benchmark never fails for being
slow. `CKPTSTORE_BENCH=full` (what `make bench` sets) takes the real sizes, else they are small and only show that the
benchmarks run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

FULL = os.environ.get("CKPTSTORE_BENCH") == "full"
ROUNDS = int(os.environ.get("CKPTSTORE_BENCH_ROUNDS", "7" if FULL else "1"))

Body = Callable[[], object]


def versus(
    benchmark: Any,
    ours: Body,
    peers: Mapping[str, Body],
    *,
    prepare: Callable[[], None] = lambda: None,
    size_bytes: int = 0,
    **facts: Any,
) -> None:
    """Time `ours` with pytest-benchmark and every peer just before each round of it; `prepare` runs untimed before all.

    What is measured goes to `benchmark.extra_info`: raw seconds of the peers, and the ratio of the medians (above 1:
    ckptstore is faster).
    """
    seconds: dict[str, list[float]] = {name: [] for name in peers}

    def before_each() -> None:
        for name, peer in peers.items():
            prepare()
            started = time.perf_counter()
            peer()
            seconds[name].append(time.perf_counter() - started)
        prepare()

    if ROUNDS > 1:
        before_each()
        ours()
        for samples in seconds.values():
            samples.clear()
    benchmark.pedantic(ours, setup=before_each, rounds=ROUNDS)
    median = benchmark.stats.stats.median
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    benchmark.extra_info.update(
        size_bytes=size_bytes,
        peer_seconds=seconds,
        ratios={name: round(value / median, 3) for name, value in medians.items()},
        **facts,
    )
