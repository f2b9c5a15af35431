"""Where a large job off the training path does its work: in this process, or in tasks on the nodes of a cluster.

The job is the same code in both cases: a task that works on a share of the files, which an executor calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

Task = Callable[[Sequence[Item]], Result]
"""Works on a share of the items. It may run in another process, with a copy of all that is bound to it."""


class Executor(Protocol):
    """Runs a task on all items."""

    is_local: bool
    """Whether everything stays in this process."""

    def run(
        self, task: Task[Item, Result], items: Sequence[Item], *, size_bytes: Callable[[Item], int]
    ) -> list[Result]:
        """Call the task with shares that hold each item once, as equal in bytes as may be; the results of all shares.

        Raises what a task raises, when no task is running any more.
        """
        ...


class InProcess:
    """Everything in one share, here."""

    is_local = True

    def run(
        self, task: Task[Item, Result], items: Sequence[Item], *, size_bytes: Callable[[Item], int]
    ) -> list[Result]:
        return [task(items)] if items else []


def deal(items: Sequence[Item], size_bytes: Callable[[Item], int], num_shares: int) -> list[list[Item]]:
    """At most `num_shares` shares, none of them empty: the largest item first, each to the share with the least bytes.

    No share is larger than 4/3 of what the best division has (Graham 1969, longest processing time first).
    """
    shares: list[list[Item]] = [[] for _ in range(min(num_shares, len(items)))]
    heap = [(0, 0, number) for number in range(len(shares))]
    for item in sorted(items, key=size_bytes, reverse=True):
        used_bytes, count, number = heap[0]
        shares[number].append(item)
        heapq.heapreplace(heap, (used_bytes + size_bytes(item), count + 1, number))
    return shares
