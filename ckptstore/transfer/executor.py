"""Run a large job off the training path in this process, or in tasks on the nodes of a cluster.

The job is the same code in both cases: a task for a share of the files, which an executor calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

Task = Callable[[Sequence[Item]], Result]
"""Works on a share of the items. It may run in another process, with a copy of everything bound to it."""


class Executor(Protocol):
    """Runs a task on all items."""

    is_local: bool
    """True if everything stays in this process."""

    def run(
        self, task: Task[Item, Result], items: Sequence[Item], *, size_bytes: Callable[[Item], int]
    ) -> list[Result]:
        """Call the task with shares that hold each item once, as equal in bytes as possible; return all results.

        Raises the error of a task, once no task is running any more.
        """
        ...


class InProcess:
    """Runs a task on all items as one share, in this process."""

    is_local = True

    def run(
        self, task: Task[Item, Result], items: Sequence[Item], *, size_bytes: Callable[[Item], int]
    ) -> list[Result]:
        return [task(items)] if items else []


def deal(items: Sequence[Item], size_bytes: Callable[[Item], int], num_shares: int) -> list[list[Item]]:
    """Deal items to at most `num_shares` shares, none empty: the largest first, each to the share with the least bytes.

    The largest share is at most 4/3 of that of the best division (Graham 1969, longest processing time first).
    """
    shares: list[list[Item]] = [[] for _ in range(min(num_shares, len(items)))]
    heap = [(0, 0, number) for number in range(len(shares))]
    for item in sorted(items, key=size_bytes, reverse=True):
        used_bytes, count, number = heap[0]
        shares[number].append(item)
        heapq.heapreplace(heap, (used_bytes + size_bytes(item), count + 1, number))
    return shares
