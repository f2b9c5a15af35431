"""What one piece of work asks of a storage: requests, retries and bytes, counted where each of them is made.

Each thread counts for itself, so nothing is locked and two pieces of work at once are not mixed up. Whoever hands work
to another thread, or another process, adds what that one has counted. Requests are counted where they are tried again
(`ckptstore.storage.retry`): all of a transfer, and on a server all others but creates. What is not tried again, as on
a disk, is counted in transfers only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """How much was asked of a storage. One thread at a time changes it."""

    requests: int = 0
    """Tries of requests: one that is made again counts twice."""
    retries: int = 0
    """Those that were made again after a failure."""
    written_bytes: int = 0
    """Of the files that a transfer has stored. What was sent in vain does not count."""

    def add(self, other: Traffic) -> None:
        """Count what was counted elsewhere too."""
        self.requests += other.requests
        self.retries += other.retries
        self.written_bytes += other.written_bytes


class _Here(threading.local):
    def __init__(self) -> None:
        self.traffic = Traffic()


_here = _Here()


def traffic_here() -> Traffic:
    """What this thread counts in now."""
    return _here.traffic


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what this thread does in this context, and not in what is counted around it."""
    before, _here.traffic = _here.traffic, Traffic()
    try:
        yield _here.traffic
    finally:
        _here.traffic = before
