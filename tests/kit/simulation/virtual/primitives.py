"""Simulate the primitives that code waits with. Outside of a simulated thread they are the real ones."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from kit.simulation.virtual.scheduler import Killed, Scheduler, SimThread, running


def _scheduler() -> Scheduler:
    scheduler = running()
    if scheduler is None:
        raise RuntimeError("what a simulated thread waits with is used outside of the simulation")
    return scheduler


def current(scheduler: Scheduler) -> SimThread:
    assert scheduler.current is not None
    return scheduler.current


class SimLock:
    """A lock. With `reentrant` its holder may take it again."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._holder: SimThread | None = None
        self._depth = 0
        self._waiters: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = _scheduler()
        me = current(scheduler)
        if self._holder is me and self._reentrant:
            self._depth += 1
            return True
        if me.killed:
            raise Killed
        if blocking:
            scheduler.maybe_pause()
        until = None if timeout < 0 else scheduler.now + timeout
        while self._holder is not None:
            if not blocking:
                return False
            left = None if until is None else until - scheduler.now
            if left is not None and left <= 0:
                return False
            self._waiters.append(me)
            if not scheduler.block(left):
                self._waiters.remove(me)
        self._holder, self._depth = me, 1
        return True

    def release(self) -> None:
        scheduler = _scheduler()
        if self._holder is None:
            if current(scheduler).killed:
                return
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            if self._waiters:
                scheduler.wake(self._waiters.popleft())

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._holder is _scheduler().current


class SimCondition:
    """A condition."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or SimLock(reentrant=True)
        self._waiters: deque[SimThread] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *arguments: object) -> None:
        self._lock.__exit__(*arguments)

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = _scheduler()
        me = current(scheduler)
        depth = self._lock._depth
        self._waiters.append(me)
        self._lock._depth = 1
        self._lock.release()
        woken = scheduler.block(timeout)
        if not woken and me in self._waiters:
            self._waiters.remove(me)
        self._lock.acquire()
        self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else _scheduler().now + timeout
        while not (result := predicate()):
            left = None if until is None else until - _scheduler().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        scheduler = _scheduler()
        for _ in range(min(n, len(self._waiters))):
            scheduler.wake(self._waiters.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class SimEvent:
    """An event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[SimThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        scheduler = _scheduler()
        for waiter in self._waiters:
            scheduler.wake(waiter)
        self._waiters.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = _scheduler()
        me = current(scheduler)
        if me.killed:
            raise Killed
        until = None if timeout is None else scheduler.now + timeout
        while not self._is_set:
            left = None if until is None else until - scheduler.now
            if left is not None and left <= 0:
                return False
            self._waiters.append(me)
            woken = scheduler.block(left)
            if me in self._waiters:
                self._waiters.remove(me)
            if woken:  # it was set, even if cleared since
                return True
        return True


class SimSemaphore:
    """A semaphore."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._condition = SimCondition()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            if not self._value and not blocking:
                return False
            if not self._condition.wait_for(lambda: self._value, timeout):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._condition.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimBarrier:
    """A barrier that is never broken."""

    def __init__(self, parties: int, action: Callable[[], object] | None = None, timeout: float | None = None) -> None:
        self._parties = parties
        self._action = action
        self._num_waiting = 0
        self._round = 0
        self._condition = SimCondition()

    def wait(self, timeout: float | None = None) -> int:
        with self._condition:
            index, mine = self._num_waiting, self._round
            self._num_waiting += 1
            if self._num_waiting == self._parties:
                if self._action is not None:
                    self._action()
                self._num_waiting, self._round = 0, self._round + 1
                self._condition.notify_all()
            else:
                self._condition.wait_for(lambda: self._round != mine)
            return index


class ThreadObject:
    """`threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target = target
        self._arguments = (tuple(args), kwargs or {})
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._thread: SimThread | None = None
        self._number = next(_scheduler().object_numbers)

    def __hash__(self) -> int:
        return self._number  # not an address, so that the order of a set is the same in every run

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def ident(self) -> int | None:
        return self._thread.number if self._thread else None

    def start(self) -> None:
        scheduler = _scheduler()
        self._thread = scheduler.spawn(current(scheduler).owner, self._run, self.name)
        _objects[self._thread] = self
        scheduler.maybe_pause()

    def _run(self) -> None:
        try:
            if self._target is not None:
                self._target(*self._arguments[0], **self._arguments[1])
        finally:
            self._target = None
            if self._thread is not None:
                _objects.pop(self._thread, None)

    def join(self, timeout: float | None = None) -> None:
        scheduler = _scheduler()
        me = current(scheduler)
        if me.killed:
            raise Killed
        if self._thread is not None and not self._thread.ended:
            self._thread.waiters.append(me)
            scheduler.block(timeout)
            if me in self._thread.waiters:
                self._thread.waiters.remove(me)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.ended


_objects: dict[SimThread, ThreadObject] = {}


def current_thread() -> Any:
    """`threading.current_thread`: the started object; a fresh one for the first thread of a process."""
    scheduler = running()
    if scheduler is None:
        return threading.current_thread()
    me = current(scheduler)
    if me not in _objects:
        made = ThreadObject(name=me.name)
        made._thread = me
        _objects[me] = made
    return _objects[me]


class SimQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._condition = SimCondition()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._condition.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if not self._items and (not block or not self._condition.wait_for(lambda: self._items, timeout)):
                raise queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class SimFuture:
    """`concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._done = SimEvent()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._done.wait(timeout):
            raise TimeoutError
        return self._error

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException | None) -> None:
        self._error = error
        self._end()

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._done.is_set():
            callback(self)
        else:
            self._callbacks.append(callback)

    def _end(self) -> None:
        self._done.set()
        for callback in self._callbacks:
            callback(self)


class SimExecutor:
    """`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._max_workers = max_workers or 4
        self._begin = partial(initializer, *initargs) if initializer else None
        self._name = thread_name_prefix or "pool"
        self._queue = SimQueue()
        self._threads: list[ThreadObject] = []
        self._idle = 0
        self._is_shut = False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> SimFuture:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SimFuture()
        self._queue.put((future, function, arguments, keywords))
        if self._idle:
            self._idle -= 1
        elif len(self._threads) < self._max_workers:
            thread = ThreadObject(target=self._work, name=f"{self._name}_{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        if self._begin is not None:
            self._begin()
        while (item := self._queue.get()) is not None:
            future, function, arguments, keywords = item
            try:
                result = function(*arguments, **keywords)
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, function, arguments, keywords
            if not self._queue._items:
                self._idle += 1

    def map(
        self, function: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None
    ) -> Iterator[Any]:
        futures = [self.submit(function, *arguments) for arguments in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not self._is_shut:
            self._is_shut = True
            for _ in self._threads:
                self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> SimExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _either(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    def make(*arguments: Any, **keywords: Any) -> Any:
        return (real if running() is None else simulated)(*arguments, **keywords)

    return make


lock = _either(threading.Lock, SimLock)
rlock = _either(threading.RLock, lambda: SimLock(reentrant=True))
condition = _either(threading.Condition, SimCondition)
event = _either(threading.Event, SimEvent)
semaphore = _either(threading.Semaphore, SimSemaphore)
barrier = _either(threading.Barrier, SimBarrier)
thread_class = _either(threading.Thread, ThreadObject)
simple_queue = _either(queue.SimpleQueue, SimQueue)
executor = _either(concurrent.futures.ThreadPoolExecutor, SimExecutor)
future_class = _either(concurrent.futures.Future, SimFuture)
