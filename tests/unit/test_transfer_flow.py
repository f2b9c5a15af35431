"""How many requests are in flight: halved on throttling, one more after a run of successes, never below one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import StorageThrottled, StorageUnavailable
from ckptstore.events import ConcurrencyChanged, Event, listening
from ckptstore.transfer.engine import Flow


def go_on() -> None:
    pass


def one(flow: Flow, error: Exception | None = None) -> None:
    """One request alone."""

    def call() -> None:
        if error is not None:
            raise error

    with suppress(StorageUnavailable):
        flow.request(go_on, call)


def test_half_of_them_on_throttling_and_back_one_by_one() -> None:
    flow, events = Flow(8), list[Event]()
    with listening(events.append):
        for _ in range(3):
            one(flow, StorageThrottled("slow down"))
        for _ in range(100):
            one(flow)
    assert all(isinstance(event, ConcurrencyChanged) for event in events)
    limits = [event.limit for event in events if isinstance(event, ConcurrencyChanged)]
    assert limits == [4, 2, 1, 2, 3, 4, 5, 6, 7, 8]


def test_requests_in_flight_at_once_halve_it_once() -> None:
    flow, in_flight = Flow(8), threading.Barrier(8)

    def refused() -> None:
        in_flight.wait(60)
        raise StorageThrottled("slow down")

    def work(_: int) -> None:
        with suppress(StorageThrottled):
            flow.request(go_on, refused)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert flow.limit == 4


def test_never_more_than_the_limit_are_in_flight() -> None:
    flow, lock = Flow(4), threading.Lock()
    one(flow, StorageThrottled("slow down"))
    now, most = 0, 0

    def counted() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            assert now <= 4
        with lock:
            now -= 1

    def work(_: int) -> None:
        for number in range(20):
            flow.request(go_on, counted)
            if number % 3 == 0:
                one(flow, StorageThrottled("slow down"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert 1 <= most <= 4
    assert now == 0


def test_a_wait_for_its_turn_ends_with_the_operation() -> None:
    flow = Flow(1)

    def wait_for_a_turn() -> None:
        with pytest.raises(InterruptedError):
            flow.request(stop, lambda: pytest.fail("there was no turn"))

    flow.request(go_on, wait_for_a_turn)
    one(flow)
    assert flow.limit == 1


def stop() -> None:
    raise InterruptedError


@given(st.integers(1, 40), st.lists(st.sampled_from(["ok", "throttled", "reset"]), max_size=200))
def test_the_limit_stays_between_one_and_all(most: int, answers: list[str]) -> None:
    flow = Flow(most)
    errors = {"ok": None, "throttled": StorageThrottled("x"), "reset": StorageUnavailable("x")}
    for answer in answers:
        before = flow.limit
        one(flow, errors[answer])
        assert 1 <= flow.limit <= most
        if answer == "throttled":
            assert flow.limit == max(1, before // 2)
        else:
            assert before <= flow.limit <= before + 1
    for _ in range(most * (most + 4)):
        one(flow)
    assert flow.limit == most
