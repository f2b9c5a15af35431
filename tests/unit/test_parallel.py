"""Work that several threads share: in order, to the first error, and to an interrupt."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from ckptstore.runtime.parallel import mapped


@pytest.mark.parametrize("with_begin", [False, True])
def test_results_come_in_the_order_of_the_items(with_begin: bool) -> None:
    begun: list[str] = []
    begin = (lambda: begun.append(threading.current_thread().name)) if with_begin else None

    def work(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        return item * item

    assert mapped(work, range(50), num_threads=4, name="squares", begin=begin) == [item * item for item in range(50)]
    assert len(begun) == (4 if with_begin else 0)
    assert mapped(work, (), num_threads=4, name="squares") == []


def test_the_first_error_is_raised_and_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 3:
            raise ValueError("three")
        time.sleep(0.02)

    with pytest.raises(ValueError, match="three"):
        mapped(work, range(1000), num_threads=2, name="failing")
    assert len(begun) < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("failing")]


def test_an_interrupt_waits_for_what_is_begun_and_begins_nothing_more() -> None:
    begun, ended = [], []

    def work(item: int) -> None:
        begun.append(item)
        if item == 5:
            os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.5 if threading.current_thread().name == "interrupted-0" else 0.1)  # the one that is waited for
        ended.append(item)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            mapped(work, range(1000), num_threads=3, name="interrupted", begin=lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("interrupted")]


def test_an_interrupt_while_threads_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can come when a thread is already at work and its start has not returned."""
    begun, ended = [], []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "interrupted-1":
            while not begun:
                time.sleep(0.001)
            raise KeyboardInterrupt

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05)
        ended.append(item)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mapped(work, range(1000), num_threads=3, name="interrupted", begin=lambda: None)
    assert sorted(begun) == sorted(ended)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("interrupted")]
