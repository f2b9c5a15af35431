"""Work on several threads at once, also while the interpreter ends.

The pools of `concurrent.futures` refuse work once the main thread has ended, though a trainer in another thread, or a
handler of `atexit`, may then save for the last time. And no pool can work where the system, or an ending interpreter,
has no thread left. So the caller does the work for which there is no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

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
    missing = object()
    results: list[object] = [missing] * len(items)
    errors: list[BaseException] = []
    left, lock = iter(range(len(items))), threading.Lock()

    def run() -> None:
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

    wanted = min(num_threads, len(items))
    threads: list[threading.Thread] = []
    try:
        names = [f"{name}-{number}" for number in range(wanted if begin is not None else wanted - 1)]
        all(started(run, name=one, threads=threads) for one in names)  # up to the first that cannot start
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
