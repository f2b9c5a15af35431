"""Signs of life on a clock of the test's own."""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.config import RetryConfig
from ckptstore.errors import StorageUnavailable
from ckptstore.group.life import LEFT, Beater, Pace, Watch, beat_interval_seconds
from ckptstore.storage.retry import retrying


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("timeout", "interval"), [(600, 30), (300, 30), (100, 10), (3, 0.3)])
def test_ten_signs_fit_in_the_timeout(timeout: float, interval: float) -> None:
    assert beat_interval_seconds(timeout) == interval


def test_a_beater_gives_a_sign_per_interval_however_often_it_is_called() -> None:
    clock, given_at = Clock(), []
    beat = Beater(lambda: given_at.append(clock.now), interval_seconds=30, clock=clock)
    for _ in range(1000):
        clock.now += 0.1
        beat()
    assert [round(moment - 1000) for moment in given_at] == [30, 60, 90]
    clock.now += 29
    beat.begin()
    clock.now += 29
    beat()
    assert len(given_at) == 3  # a new exchange is young


def test_a_beater_called_by_many_threads_gives_one_sign() -> None:
    signs: list[int] = []
    clock = Clock()
    beat = Beater(lambda: signs.append(1), interval_seconds=30, clock=clock)
    clock.now += 31
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: beat(), range(16)))
    assert len(signs) == 1


def test_a_sign_that_fails_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise StorageUnavailable("throttled")

    clock = Clock()
    beat = Beater(fail, interval_seconds=1, clock=clock)
    clock.now += 2
    with caplog.at_level(logging.WARNING, logger="ckptstore.group"):
        beat()
    assert "throttled" in caplog.text


def looks(watch: Watch, clock: Clock, *, seconds: float, signs: dict[int, object]) -> None:
    """Let the time pass, looking whenever it is due."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 0.5
        if watch.due():
            watch.look(signs)


def test_a_change_is_life_and_an_answer_ends_the_watch() -> None:
    clock = Clock()
    watch = Watch([1, 2, 3], timeout_seconds=100, clock=clock)
    looks(watch, clock, seconds=90, signs={1: 1})
    looks(watch, clock, seconds=90, signs={1: 2, 3: 1})
    watch.answered(2)
    assert watch.awaited == [1, 3]
    assert watch.silent() == ()
    looks(watch, clock, seconds=20, signs={1: 2, 3: 1})
    assert watch.silent() == (1, 3)


def test_who_has_left_is_known_at_the_next_look() -> None:
    clock = Clock()
    watch = Watch([1, 2], timeout_seconds=100, clock=clock)
    watch.look({1: LEFT})
    assert watch.left() == (1,)
    watch.answered(1)  # it answered before it left
    assert watch.left() == ()


def test_a_process_that_was_stopped_itself_condemns_nobody() -> None:
    clock = Clock()
    watch = Watch([1], timeout_seconds=100, clock=clock)
    looks(watch, clock, seconds=60, signs={1: 1})
    clock.now += 3600
    watch.look({1: 1})
    assert watch.silent() == ()
    looks(watch, clock, seconds=100, signs={1: 1})
    assert watch.silent() == (1,)


@given(st.lists(st.floats(0.01, 500), min_size=1, max_size=40), st.floats(1, 1000))
def test_a_rank_that_gives_signs_is_never_silent_and_one_that_does_not_is_in_the_end(
    gaps: list[float], timeout: float
) -> None:
    clock = Clock()
    watch = Watch([1, 2], timeout_seconds=timeout, clock=clock)
    for number, gap in enumerate(gaps):
        clock.now += gap
        watch.look({1: number, 2: 0})
        assert 1 not in watch.silent() or number == 0
    for _ in range(20):
        clock.now += timeout / 5
        watch.look({1: 0, 2: 0})
    assert 2 in watch.silent()


def test_the_pace_grows_with_the_wait_within_bounds() -> None:
    clock = Clock()
    pace = Pace(shortest_seconds=0.01, longest_seconds=1, clock=clock)
    pace.look()
    assert pace.seconds() == 0.01
    clock.now += 5
    pace.look()
    assert pace.seconds() == pytest.approx(0.5)
    clock.now += 50
    pace.look()
    assert pace.seconds() == 1
    pace.progress()
    pace.look()
    assert pace.seconds() == 0.01
    clock.now += 0.2  # a request of 200 ms
    assert pace.seconds() == pytest.approx(0.2)


def test_retries_are_signs_of_life_and_a_step_that_hangs_is_none() -> None:
    given_at: list[float] = []
    beat = Beater(lambda: given_at.append(time.monotonic()), interval_seconds=0.02, patience_seconds=0.1)
    config = RetryConfig(retry_attempts=6, retry_wait_initial_seconds=0.1, retry_wait_max_seconds=0.1)

    def unavailable() -> None:
        time.sleep(0.05)
        raise StorageUnavailable("away")

    with beat.at_work(), pytest.raises(StorageUnavailable):
        retrying(config, "read k", unavailable)
    ended = time.monotonic()
    assert max(later - before for before, later in itertools.pairwise([*given_at, ended])) < 0.25
    given_at.clear()
    with beat.at_work():
        time.sleep(0.6)
    assert given_at
    assert time.monotonic() - given_at[-1] > 0.3
