"""Work on several threads at once, also while the interpreter ends.

The pools of `concurrent.futures` refuse work once the main thread has ended, though a trainer in another thread, or a
handler of `atexit`, may then save for the last time. And no pool can work where the system, or an ending interpreter,
has no thread left. So the caller does the work for which there is no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from ckptstore.runtime.fork import in_forked_child

T = TypeVar("T")
R = TypeVar("R")


def is_ending() -> bool:
    """Return True if the main thread has ended: then nobody may wait for new threads."""
    return not threading.main_thread().is_alive()


def mapped(
    work: Callable[[T], R],
    items: Sequence[T],
    *,
    num_threads: int,
    name: str,
    begin: Callable[[], object] | None = None,
) -> list[R]:
    """Return `work` of each item, in their order, done by up to so many threads, of which the caller is one.

    With `begin`, which each thread calls first, only new threads work, unless none can be started. When this returns or
    raises, no thread works any more. Raises the first error of `work` or `begin`; items not begun by then are left.
    """
    if begin is None and min(num_threads, len(items)) <= 1:
        return list(map(work, items))
    missing = object()
    results: list[object] = [missing] * len(items)
    errors: list[BaseException] = []
    left, lock, working = iter(range(len(items))), threading.Condition(), set[int]()

    def run() -> None:
        with lock:
            working.add(threading.get_ident())
        try:
            if begin is not None:
                begin()
            while True:
                with lock:
                    number = None if errors else next(left, None)
                if number is None:
                    return
                results[number] = work(items[number])
        except BaseException as error:  # raised again by the caller
            with lock:
                errors.append(error)
        finally:
            with lock:
                working.discard(threading.get_ident())
                lock.notify_all()

    wanted = min(num_threads, len(items))
    threads: list[threading.Thread] = []
    try:
        names = [f"{name}-{number}" for number in range(wanted if begin is not None else wanted - 1)]
        works = (partial(copy_context().run, run) for _ in names)  # what holds for the caller holds for its threads
        begun = zip(works, names, strict=True)
        all(started(work, name=one, threads=threads) for work, one in begun)  # up to the first that cannot start
        if begin is None or not threads:
            run()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: begun items are finished, and no more are begun
        with lock:
            errors.insert(0, error)
        for thread in threads:
            with suppress(RuntimeError):  # one that has not begun yet finds the error
                thread.join()
        with lock:  # Python takes a thread whose join was interrupted for one that has ended
            lock.wait_for(lambda: not working)
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]  # all are filled in, or an error was raised


def started(
    work: Callable[[], object], *, name: str, threads: list[threading.Thread] | None = None
) -> threading.Thread | None:
    """Start a daemon thread, and return it; None where the system, or an ending interpreter, has none left. It is added
    to `threads` before it starts, for a caller who may be interrupted."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    threads = [] if threads is None else threads
    threads.append(thread)
    try:
        thread.start()
    except RuntimeError:  # "can't start new thread", "at interpreter shutdown"
        threads.pop()
        return None
    return thread


class Behind:
    """Work that nobody waits for long, on a thread of its own. Of several pieces that wait, the newest is done.

    The work raises nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._next: Callable[[], object] | None = None
        self._is_busy = False
        in_forked_child(self, Behind._after_fork)

    def _after_fork(self) -> None:
        self._changed, self._next, self._is_busy = threading.Condition(), None, False

    def do(self, work: Callable[[], object], *, wait_seconds: float) -> bool:
        """Begin `work`, after what is being done, and wait at most so long for it; not at all if something is. Return
        False if it is not done by then."""
        with self._changed:
            self._next = work
            if self._is_busy:
                return False
            self._is_busy = True
        if started(self._run, name=self._name) is None:
            self._run()
        return self.close(wait_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Wait until nothing is left to do, at most so long. Return False after that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_busy, timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                work, self._next = self._next, None
                if work is None:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
            work()
