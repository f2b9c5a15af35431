"""Count the requests, retries and bytes of a piece of work on a storage. Requests are counted where they are retried.

Each thread counts for itself, so nothing is locked and two pieces of work at once are not mixed up. Code that hands
work to another thread or process adds the counts from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """The requests to a storage and their bytes. One thread at a time changes it."""

    requests: int = 0
    """The tries of requests: one that is made again counts twice."""
    retries: int = 0
    """The tries after a failure."""
    written_bytes: int = 0
    """The bytes of the files that a transfer has stored, without failed tries."""
    read_bytes: int = 0
    """The bytes that a transfer has read, in whole tasks."""

    def add(self, other: Traffic) -> None:
        """Add the counts of another one."""
        self.requests += other.requests
        self.retries += other.retries
        self.written_bytes += other.written_bytes
        self.read_bytes += other.read_bytes


class _Here(threading.local):
    def __init__(self) -> None:
        self.traffic = Traffic()


_here = _Here()


def traffic_here() -> Traffic:
    """Return the object in which this thread counts now."""
    return _here.traffic


@contextmanager
def counting(*, twice: bool = False) -> Iterator[Traffic]:
    """Count the requests of this thread in this context, and in the context around it only if `twice`."""
    before, traffic = _here.traffic, Traffic()
    _here.traffic = traffic
    try:
        yield traffic
    finally:
        _here.traffic = before
        if twice:
            before.add(traffic)
