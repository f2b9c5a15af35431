"""Simulated threads, locks and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from kit.simulation.virtual import clocks, primitives
from kit.simulation.virtual.scheduler import Deadlock, Process, Scheduler, Stuck

THREADING = clocks.MODULES[threading]


def run(*programs: Callable[[], object], seed: int = 0, limit_seconds: float = 30.0) -> Scheduler:
    scheduler = Scheduler(seed)
    process = Process("process", 1)
    for number, program in enumerate(programs):
        scheduler.spawn(process, program, f"thread {number}")
    scheduler.run(limit_seconds=limit_seconds)
    return scheduler


def test_time_passes_at_once() -> None:
    began = time.monotonic()
    scheduler = run(lambda: clocks.sleep(1e6), lambda: clocks.sleep(10))
    assert scheduler.now == 1e6
    assert time.monotonic() - began < 20


def test_one_thread_at_a_time_in_an_order_that_the_seed_decides() -> None:
    def order(seed: int) -> str:
        said: list[str] = []

        def speaker(name: str) -> Callable[[], None]:
            def speak() -> None:
                for _ in range(5):
                    said.append(name)
                    clocks.sleep(0)

            return speak

        run(speaker("a"), speaker("b"), speaker("c"), seed=seed)
        return "".join(said)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(20)}) > 10


def test_two_locks_in_two_orders_are_a_deadlock_for_some_seed() -> None:
    def both(first: primitives.SimLock, second: primitives.SimLock) -> Callable[[], None]:
        def take() -> None:
            with first:
                clocks.sleep(0)
                with second:
                    pass

        return take

    def meets(seed: int) -> bool:
        locks = primitives.SimLock(), primitives.SimLock()
        try:
            run(both(*locks), both(*locks[::-1]), seed=seed)
        except Deadlock:
            return True
        return False

    assert {meets(seed) for seed in range(10)} == {True}


def test_what_waits_outside_of_the_simulation_is_shown() -> None:
    real = threading.Event()
    with pytest.raises(Stuck, match="test_scheduler"):
        run(real.wait, limit_seconds=0.3)
    real.set()


def test_a_killed_process_runs_no_further() -> None:
    scheduler = Scheduler(0)
    victim, other = Process("victim", 1), Process("other", 2)
    said: list[str] = []

    def live() -> None:
        said.append("lives")
        clocks.sleep(10)
        said.append("lives on")

    def kill() -> None:
        clocks.sleep(5)
        scheduler.kill(victim)
        clocks.sleep(100)

    scheduler.spawn(victim, live, "main")
    scheduler.spawn(other, kill, "main")
    scheduler.run()
    assert said == ["lives"]


def test_a_stopped_process_goes_on_later() -> None:
    scheduler = Scheduler(0)
    stopped, other = Process("stopped", 1), Process("other", 2)
    at: list[float] = []

    def live() -> None:
        clocks.sleep(10)
        at.append(scheduler.now)

    def stop() -> None:
        scheduler.stop(stopped, 3600)

    scheduler.spawn(stopped, live, "main")
    scheduler.spawn(other, stop, "main")
    scheduler.run()
    assert at == [3600]


def test_conditions_queues_pools_and_barriers() -> None:
    results: list[object] = []

    def work() -> None:
        condition, ready = THREADING.Condition(), []
        barrier = THREADING.Barrier(3)

        def wait(number: int) -> int:
            barrier.wait()
            with condition:
                ready.append(number)
                condition.notify_all()
            return number * number

        with primitives.executor(3) as pool:
            squares = pool.map(wait, range(3))
            with condition:
                assert condition.wait_for(lambda: len(ready) == 3, timeout=1)
            results.append(list(squares))
        queue = primitives.simple_queue()
        thread = THREADING.Thread(target=lambda: queue.put("there"))
        thread.start()
        results.append(queue.get())
        thread.join()
        results.append((thread.is_alive(), THREADING.Event().wait(5), THREADING.Lock().acquire(timeout=1)))

    scheduler = run(work)
    assert results == [[0, 1, 4], "there", (False, False, True)]
    assert scheduler.now == 5


def test_outside_of_a_simulation_everything_is_real() -> None:
    assert isinstance(THREADING.Event(), threading.Event)
    assert abs(clocks.monotonic() - time.monotonic()) < 60
    with primitives.executor(1) as pool:
        assert pool.submit(lambda: 3).result() == 3
