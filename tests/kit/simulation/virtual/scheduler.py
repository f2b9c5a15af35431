"""Simulated threads that run one at a time, in virtual time, in an order that a seed decides.

Each simulated thread is a thread of the system that runs only while it holds the baton. It passes the baton on where it
waits: in a lock, a sleep, a request to a storage. Nothing else runs meanwhile, so between two waits a thread is alone.
When nobody can run, the clock jumps to the next timer; when there is none either, that is a deadlock.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

START_OF_TIME = 1_700_000_000.0
"""The time of every clock when a run begins."""
MAX_STEPS = 400_000
"""More hand-overs than any seed needs: beyond it, a loop waits for nothing."""

_here = threading.local()
_idle_workers: list[_Worker] = []


class Killed(BaseException):
    """Raised to end a simulated thread, whatever it is doing: its process is dead or the run is over."""


class Deadlock(Exception):
    """Raised when nobody can run, and no timer will change that."""


class Stuck(Exception):
    """Raised when a simulated thread waits outside of the simulation, so nobody else can run."""


def running() -> Scheduler | None:
    """Return the scheduler of the calling thread, None outside of a simulation."""
    return getattr(_here, "scheduler", None)


class SimThread:
    """One simulated thread."""

    __slots__ = ("baton", "ended", "is_blocked", "killed", "name", "number", "owner", "token", "waiters", "woken")

    def __init__(self, number: int, name: str, owner: Process, baton: Any) -> None:
        self.number = number
        self.name = name
        self.owner = owner
        self.baton = baton
        self.ended = False
        self.killed = False
        self.is_blocked = False
        self.woken = False
        self.token = 0
        """Counts its waits, so that a timer of an earlier one does nothing."""
        self.waiters: list[SimThread] = []


class Process:
    """One simulated process: its threads, the state of its modules, and the error of its clock."""

    def __init__(self, name: str, pid: int, *, clock_ahead_seconds: float = 0.0) -> None:
        self.name = name
        self.pid = pid
        self.clock_ahead_seconds = clock_ahead_seconds
        self.is_dead = False
        self.is_stopped = False
        self.parked: list[SimThread] = []
        self.threads: list[SimThread] = []
        self.globals: dict[int, Any] | None = None
        """The state of the modules for this process while another one runs."""


class Scheduler:
    """Runs simulated threads. Created for every run."""

    def __init__(self, seed: object, *, swap: Callable[[Process | None, Process | None], None] | None = None) -> None:
        """Create the scheduler; `swap` is called when the baton goes from one process to another."""
        self.now = 0.0
        self.steps = 0
        self.rng = Random(f"schedule {seed}")
        self.names = Random(f"names {seed}")
        """For tokens and the like, so that more of them change no schedule."""
        self.environment: dict[str, str] = {}
        self.preempts = 0.02
        """The probability that a thread loses the baton where it could go on."""
        self.current: SimThread | None = None
        self.failures: list[str] = []
        self._swap = swap
        self._loaded: Process | None = None
        self._runnable: list[SimThread] = []
        self._timers: list[tuple[float, int, Any, int]] = []
        self._sequence = itertools.count()
        self._numbers = itertools.count(1)
        self.object_numbers = itertools.count(1)
        self._threads: list[SimThread] = []
        self._over = _thread.allocate_lock()
        self._over.acquire()
        self._cpu = _this_cpu()
        self._is_over = self._is_finished = False
        self._failure: BaseException | None = None

    # Called from outside

    def run(self, *, limit_seconds: float = 60.0) -> None:
        """Run until every thread of a living process has ended, at most so many real seconds.

        Raises Deadlock or Stuck, and the error of `fail`.
        """
        try:
            self._give(self._choose())
            if not self._over.acquire(timeout=limit_seconds):
                raise Stuck(f"Nothing went on for {limit_seconds:g} s, at virtual time {self.now:.3f}\n{_stacks()}")
        except Stuck:
            self._is_over = True
            for thread in self._threads:  # one of them is lost; the others must not be taken for idle ones
                thread.killed = True
            raise
        self._end_all(limit_seconds)
        if self._failure is not None:
            raise self._failure

    def _end_all(self, limit_seconds: float) -> None:
        """Unwind the remaining threads, so that their generators and files are closed."""
        self._is_over = True
        for thread in self._threads:
            if not thread.ended and not thread.killed:
                thread.killed = True
                self.current = thread
                thread.baton.release()
                if not self._over.acquire(timeout=limit_seconds):
                    raise Stuck(f"{thread.name} does not end\n{_stacks()}")
        if self._swap is not None:
            self._swap(self._loaded, None)

    # Called from anywhere in the simulation

    def spawn(self, owner: Process, function: Callable[[], object], name: str) -> SimThread:
        """Create a thread, which can run from now on."""
        if self.current is not None and self.current.killed:
            raise Killed
        worker = _idle_workers.pop() if _idle_workers else _Worker()
        worker.stay_on(self._cpu)
        thread = SimThread(next(self._numbers), f"{owner.name}/{name}", owner, worker.baton)
        worker.work = (self, thread, function)
        self._threads.append(thread)
        owner.threads.append(thread)
        self._runnable.append(thread)
        return thread

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` at that virtual time, between two threads. It must not wait."""
        heapq.heappush(self._timers, (seconds, next(self._sequence), action, -1))

    def block(self, seconds: float | None = None) -> bool:
        """Block the calling thread until it is woken (True), or the time is over (False)."""
        me = self.current
        assert me is not None
        if me.killed:
            raise Killed
        me.token += 1
        me.woken, me.is_blocked = False, True
        if seconds is not None:
            heapq.heappush(self._timers, (self.now + max(0.0, seconds), next(self._sequence), me, me.token))
        self._hand_over(me)
        return me.woken

    def wake(self, thread: SimThread) -> None:
        """Let a blocked thread go on."""
        if thread.is_blocked:
            thread.is_blocked, thread.woken = False, True
            self._runnable.append(thread)

    def pause(self) -> None:
        """Let anybody go on, including the calling thread."""
        me = self.current
        assert me is not None
        if me.killed:
            raise Killed
        self._runnable.append(me)
        self._hand_over(me)

    def maybe_pause(self) -> None:
        """Call `pause` now and then."""
        if self._runnable and self.rng.random() < self.preempts:
            self.pause()

    def sleep(self, seconds: float) -> None:
        """Wait for virtual time to pass."""
        self.block(seconds)

    def fail(self, error: BaseException) -> None:
        """End the run; `run` raises the error."""
        if self._failure is None:
            self._failure = error

    def finish(self) -> None:
        """End the run, even with running threads."""
        self._is_finished = True

    def kill(self, process: Process) -> None:
        """Run none of its threads again. Does not return if it is the caller's own."""
        process.is_dead = True
        me = self.current
        if me is not None and me.owner is process and not me.killed:
            me.is_blocked = True
            self._hand_over(me)

    def stop(self, process: Process, seconds: float) -> None:
        """Run none of its threads for that time."""
        process.is_stopped = True
        self.at(self.now + seconds, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        """Let a stopped process go on."""
        if process.is_stopped:
            process.is_stopped = False
            self._runnable.extend(process.parked)
            process.parked.clear()

    # The baton

    def _choose(self) -> SimThread | None:
        """Return the thread that runs next; None when the run is over."""
        runnable = self._runnable
        while self._failure is None and not self._is_finished:
            self.steps += 1
            if self.steps > MAX_STEPS:
                self.fail(
                    Deadlock(f"{MAX_STEPS} hand-overs, at virtual time {self.now:.3f}: a loop\n{self.describe()}")
                )
                break
            if runnable:
                count = len(runnable)
                index = int(self.rng.random() * count) if count > 1 else 0
                thread = runnable[index]
                runnable[index] = runnable[-1]
                runnable.pop()
                if thread.owner.is_dead:
                    continue
                if thread.owner.is_stopped:
                    thread.owner.parked.append(thread)
                    continue
                return thread
            if not self._timers:
                if waiting := [thread for thread in self._threads if self._matters(thread)]:
                    names = ", ".join(thread.name for thread in waiting)
                    self.fail(Deadlock(f"Nobody can run: {names}\n{_stacks()}"))
                break
            self.now = max(self.now, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self.now:  # all that is due: the seed says who goes first
                self._fire(*heapq.heappop(self._timers)[2:])
        return None

    def _fire(self, target: Any, token: int) -> None:
        if token == -1:
            before, self.current = self.current, None
            try:
                target()
            except BaseException as error:
                self.fail(error)
            self.current = before
        elif target.is_blocked and target.token == token:
            target.is_blocked = False
            self._runnable.append(target)

    @staticmethod
    def _matters(thread: SimThread) -> bool:
        return not thread.ended and not thread.owner.is_dead

    def _hand_over(self, me: SimThread) -> None:
        following = self._choose()
        if following is me:
            return
        self._give(following)
        me.baton.acquire()
        if me.killed:
            raise Killed

    def _give(self, thread: SimThread | None) -> None:
        self.current = thread
        if thread is None:
            self._over.release()
            return
        if thread.owner is not self._loaded:
            if self._swap is not None:
                self._swap(self._loaded, thread.owner)
            self._loaded = thread.owner
        thread.baton.release()

    def thread_ended(self, thread: SimThread, error: BaseException | None) -> None:
        """Called on a worker when the function of its thread has ended."""
        thread.ended = True
        thread.owner.threads.remove(thread)
        if self._is_over:
            self._over.release()
            return
        if isinstance(error, AssertionError) and hasattr(error, "rule"):
            self.fail(error)
        elif error is not None:
            text = "".join(traceback.format_exception(error))
            self.fail(AssertionError(f"The thread {thread.name} died:\n{text}"))
        for waiter in thread.waiters:
            self.wake(waiter)
        self._give(self._choose())

    def describe(self) -> str:
        """Return the threads and their states."""
        left = [thread for thread in self._threads if not thread.ended]
        return "\n".join(f"  {thread.name}{' (waits)' if thread.is_blocked else ''}" for thread in left)


class _Worker:
    """A thread of the system that runs simulated threads one after another."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.work: tuple[Scheduler, SimThread, Callable[[], object]] | None = None
        self._cpu: int | None = None
        self._thread = threading.Thread(target=self._loop, name="simulated", daemon=True)
        self._thread.start()

    def stay_on(self, cpu: int | None) -> None:
        """Run on this processor from now on."""
        # Only one of the threads runs at a time, and waking another one on the same processor saves a fifth of a run's
        # time.
        if cpu is not None and cpu != self._cpu and self._thread.native_id is not None:
            self._cpu = cpu
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._thread.native_id, {cpu})

    def _loop(self) -> None:
        while True:
            self.baton.acquire()
            assert self.work is not None
            scheduler, thread, function = self.work
            self.work = None
            _here.scheduler = scheduler
            error: BaseException | None = None
            try:
                if not thread.killed:
                    function()
            except Killed:
                pass
            except BaseException as raised:
                error = raised
            del function
            _here.scheduler = None
            _idle_workers.append(self)
            scheduler.thread_ended(thread, error)
            del scheduler, thread, error


def _this_cpu() -> int | None:
    """Return the present processor of the calling thread, None if it is unknown."""
    try:
        status = Path("/proc/thread-self/stat").read_text()
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[36])


def _stacks() -> str:
    """Return the stacks of all threads, except those that wait for work. faulthandler shows a hundred at most."""
    found = []
    for number, frame in sys._current_frames().items():
        if frame.f_code is not _Worker._loop.__code__:
            found.append(f"Thread {number}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)[:60_000]
