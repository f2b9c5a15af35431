"""Run the operations of a transfer on its threads: nothing runs on after `run` has returned or raised."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ckptstore.errors import InvalidInput
from ckptstore.runtime.beat import Beat, beat, no_beat
from ckptstore.storage.traffic import Traffic, counting, traffic_here

_TICK_SECONDS = 0.2
"""The interval at which a waiting caller looks for progress."""
_IDLE_SECONDS = 10.0
"""The time that a thread waits for more work before it ends."""


class Stopped(Exception):
    """Another task of the same operation failed, or the operation was given up."""


class Operation:
    """One operation: its tasks, the bytes that they have moved, and the first error."""

    def __init__(self, tasks: Sequence[Task], *, check: Beat = no_beat) -> None:
        """Take the tasks. `check` is called often; an error that it raises ends the operation."""
        self.tasks = deque(tasks)
        self.running = 0
        self.ended = threading.Event()
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self.traffic: list[Traffic] = []
        """The traffic that each task has counted."""
        self._check = check
        self.moved_bytes = 0
        """A number that grows while bytes move. Counted without a lock: good as a sign of life, not as a sum."""

    def moved(self, size_bytes: int) -> None:
        """Count bytes that a task has moved."""
        self.moved_bytes += size_bytes
        beat()  # the caller's sign of life, where it does the task itself

    def check(self) -> None:
        """Raise Stopped if another task has failed or the operation was given up. Tasks call it often."""
        if self.stopped.is_set():
            raise Stopped
        self._check()

    def execute(self, task: Task) -> None:
        """Do one task; its error stops all others."""
        with counting() as traffic:
            try:
                self.check()
                task(self)
            except Stopped:
                pass
            except BaseException as error:  # raised again by the thread that waits
                if self.error is None:
                    self.error = error
                self.stopped.set()
        self.traffic.append(traffic)


Task = Callable[[Operation], None]


class Pool:
    """Up to `num_threads` threads, started when there is work, gone when there is none for a while.

    Operations that run at once share the threads in turns.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._changed = threading.Condition()
        self._runs: deque[Operation] = deque()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, tasks: Sequence[Task], *, check: Beat = no_beat) -> None:
        """Do all tasks, in their order as far as threads allow, and give signs of life while bytes move.

        `check` is called by the threads that do them, often; an error that it raises ends the run.
        Raises the first error of a task. No task runs any more when this returns or raises, KeyboardInterrupt included.
        """
        run = Operation(tasks, check=check)
        if len(tasks) > 1:
            self._share(run)
        else:
            for task in tasks:
                run.execute(task)
        for traffic in run.traffic:
            traffic_here().add(traffic)
        beat()
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        """End the threads. The pool must not be used afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = tuple(self._threads)
        # Nothing may touch the storage after this, for the caller closes it next.
        for thread in threads:
            thread.join()

    def _share(self, run: Operation) -> None:
        try:
            with self._changed:
                if self._closed:
                    raise InvalidInput("The store was closed before this call", hint="Open it again with open_store")
                self._start_threads(len(run.tasks))
                # No thread could be started at all: the caller does the work, so that a save never fails for it.
                is_alone = not self._threads
                if not is_alone:
                    self._runs.append(run)
                self._changed.notify_all()
            while is_alone and run.tasks:
                run.execute(run.tasks.popleft())
                beat()
            if is_alone:
                return
            seen = 0
            while not run.ended.wait(_TICK_SECONDS):
                if run.moved_bytes != seen:
                    seen = run.moved_bytes
                    beat()
        finally:
            # After KeyboardInterrupt too: no task may write to the caller's memory once this has returned.
            run.stopped.set()
            with self._changed:
                run.tasks.clear()
                if not run.running:
                    run.ended.set()
            run.ended.wait()

    def _start_threads(self, num_tasks: int) -> None:
        for _ in range(min(num_tasks, self.num_threads) - len(self._threads)):
            # Where threads inherit a context, the run that starts them would get the signs of life of all later ones.
            inside, name = contextvars.Context().run, f"ckptstore-transfer-{len(self._threads)}"
            thread = threading.Thread(target=inside, args=(self._work,), name=name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system, or an ending interpreter, has no more: the existing ones do it all
                self._threads.discard(thread)
                return

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                run, task = self._next()
                if run is None or task is None:
                    self._threads.discard(me)
                    return
            run.execute(task)
            # A waiting thread would keep the last task, and with it the memory of a state, for as long as it idles.
            del task
            with self._changed:
                run.running -= 1
                if not run.running and not run.tasks:
                    run.ended.set()
            del run

    def _next(self) -> tuple[Operation, Task] | tuple[None, None]:
        """Return a task of the run whose turn it is; None after a long time without one. The caller holds the lock."""
        while not self._closed:
            while self._runs:
                run = self._runs[0]
                # In turns, so that a prune or a drain of a thousand files does not hold up a save.
                self._runs.rotate(-1)
                if not run.tasks:
                    self._runs.remove(run)
                    continue
                run.running += 1
                return run, run.tasks.popleft()
            if not self._changed.wait(_IDLE_SECONDS) and not self._runs:
                break
        return None, None
