"""Count the requests, retries and bytes of a piece of work on a storage.

Each thread counts for itself, so nothing is locked and two pieces of work at once are not mixed up. Code that hands
work to another thread or process adds the counts from there. Requests are counted where they are retried
(`ckptstore.storage.retry`): all of a transfer, and on a server all others except creates. Requests that are not
retried, as on a disk, are counted in transfers only.
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
def counted_twice() -> Iterator[Traffic]:
    """Count the requests of this thread in this context, and also in the context around it."""
    traffic = Traffic()
    try:
        with counting() as traffic:
            yield traffic
    finally:
        _here.traffic.add(traffic)


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count the requests of this thread in this context, and not in the context around it."""
    before, _here.traffic = _here.traffic, Traffic()
    try:
        yield _here.traffic
    finally:
        _here.traffic = before
