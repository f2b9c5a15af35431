"""Samples that were taken elsewhere (in other processes, or of a part of a call), told as benchmarks.

@pytest.mark.benchmark(timer=CLOCK)
def test_it(benchmark): ...; tell(benchmark, {"ckptstore": [...], "peer": [...]})
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()


def tell(benchmark: Any, samples: Mapping[str, Sequence[float]], *, size_bytes: int = 0, **facts: Any) -> None:
    """Give samples, in seconds, to pytest-benchmark; the first name is ckptstore's, the others are its peers."""
    ours, *peers = samples
    left = iter(samples[ours])

    def advance() -> None:
        CLOCK.seconds += next(left)

    benchmark.pedantic(advance, rounds=len(samples[ours]))
    median = statistics.median(samples[ours])
    benchmark.extra_info.update(
        size_bytes=size_bytes,
        peer_seconds={name: list(samples[name]) for name in peers},
        ratios={name: round(statistics.median(samples[name]) / median, 3) for name in peers},
        **facts,
    )
