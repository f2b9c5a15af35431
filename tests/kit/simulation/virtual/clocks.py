"""Simulate clocks and random numbers, and list the replacements in the modules of a program."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import random
import secrets
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kit.simulation.virtual.primitives import (
    barrier,
    condition,
    current,
    current_thread,
    event,
    executor,
    future_class,
    lock,
    rlock,
    semaphore,
    simple_queue,
    thread_class,
)
from kit.simulation.virtual.scheduler import START_OF_TIME, running


def get_ident() -> int:
    """`threading.get_ident`."""
    scheduler = running()
    return threading.get_ident() if scheduler is None else current(scheduler).number


def monotonic() -> float:
    """`time.monotonic`; virtual time is the same for all, and starts at another value in each process."""
    scheduler = running()
    return time.monotonic() if scheduler is None else scheduler.now + current(scheduler).owner.pid


def wall_clock() -> float:
    """`time.time`: that of the process, which may be wrong."""
    scheduler = running()
    if scheduler is None:
        return time.time()
    return START_OF_TIME + scheduler.now + current(scheduler).owner.clock_ahead_seconds


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    scheduler = running()
    if scheduler is None:
        time.sleep(seconds)
    else:
        scheduler.sleep(seconds)


def getpid() -> int:
    """`os.getpid`."""
    scheduler = running()
    return os.getpid() if scheduler is None else current(scheduler).owner.pid


def _names() -> random.Random:
    scheduler = running()
    return random._inst if scheduler is None else scheduler.names


def urandom(size: int) -> bytes:
    """`os.urandom`."""
    return os.urandom(size) if running() is None else _names().randbytes(size)


def uuid4() -> uuid.UUID:
    """`uuid.uuid4`."""
    return uuid.UUID(bytes=urandom(16), version=4)


class _Environment(Mapping[str, str]):
    """`os.environ`: in a simulation that of the scheduler."""

    @staticmethod
    def _values() -> Mapping[str, str]:
        scheduler = running()
        return os.environ if scheduler is None else scheduler.environment

    def __getitem__(self, name: str) -> str:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


def _copy(module: types.ModuleType, **changed: Any) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update(changed)
    return copy


def _drawn(name: str) -> Callable[..., Any]:
    return lambda *arguments, **keywords: getattr(_names(), name)(*arguments, **keywords)


_DRAWS = (
    "random",
    "uniform",
    "randint",
    "randrange",
    "choice",
    "choices",
    "sample",
    "shuffle",
    "getrandbits",
    "randbytes",
)

MODULES = {
    threading: _copy(
        threading,
        Lock=lock,
        RLock=rlock,
        Condition=condition,
        Event=event,
        Semaphore=semaphore,
        BoundedSemaphore=semaphore,
        Barrier=barrier,
        Thread=thread_class,
        get_ident=get_ident,
        current_thread=current_thread,
    ),
    time: _copy(
        time,
        time=wall_clock,
        time_ns=lambda: int(wall_clock() * 1e9),
        monotonic=monotonic,
        monotonic_ns=lambda: int(monotonic() * 1e9),
        perf_counter=monotonic,
        sleep=sleep,
    ),
    uuid: _copy(uuid, uuid4=uuid4, uuid1=uuid4),
    secrets: _copy(
        secrets,
        token_hex=lambda size=32: urandom(size).hex(),
        token_bytes=lambda size=32: urandom(size),
        token_urlsafe=lambda size=32: urandom(size).hex(),
        randbelow=lambda below: _names().randrange(below),
        choice=lambda items: _names().choice(items),
    ),
    random: _copy(random, **{name: _drawn(name) for name in _DRAWS}),
    os: _copy(os, getpid=getpid, urandom=urandom, environ=_Environment()),
    queue: _copy(queue, SimpleQueue=simple_queue, Queue=simple_queue),
    concurrent.futures: _copy(concurrent.futures, ThreadPoolExecutor=executor, Future=future_class),
}
"""Maps the modules that a program imports to those that it sees in a simulation."""

VALUES: dict[int, tuple[Any, Any]] = {
    id(real): (real, simulated)
    for real, simulated in (
        *MODULES.items(),
        *(
            (getattr(real, name), getattr(changed, name))
            for real, changed in MODULES.items()
            for name in vars(changed)
            if getattr(changed, name) is not getattr(real, name, None) and hasattr(real, name)
        ),
    )
}
"""The replacements, by the identity of the real thing."""
