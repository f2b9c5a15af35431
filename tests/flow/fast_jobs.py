"""Jobs with a fast tier. Ranks are threads, nodes are directories with names; the rest is real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from thread_ranks import in_threads

from ckptstore import CheckpointStore, FastTier, KeepEvery, StorageGroup, open_store
from ckptstore.testing import Hook, with_faults

SIZE = 100_000


NO_DRAIN = {"drain_bytes_per_second": 1.0}


Flow = Callable[[CheckpointStore, int], Any]


@dataclass
class Jobs:
    """Jobs that use one store, on nodes of which each has a directory."""

    root: Path
    uri: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def disk(self, node: str) -> Path:
        return self.root / f"disk-{node}"

    def attempts(self, node: str) -> list[Path]:
        """The directories of attempts on a node, in the order of their steps."""
        return sorted(self.disk(node).glob("*/checkpoints/*"))

    def open(self, rank: int, nodes: str, token: str, **tier: Any) -> CheckpointStore:
        node = nodes[rank]
        group = StorageGroup(rank, len(nodes), token)
        return open_store(
            self.uri or self.root / "store",
            group=group,
            fast=FastTier(self.disk(node), node=node, **tier),
            **{"rank_timeout_seconds": 60, **self.options},
        )

    def run(self, nodes: str, flow: Flow, **tier: Any) -> list[Any]:
        """A job with one rank for each letter, which is the name of its node. What a rank raises is its result.

        Nothing of it reaches the store but records: it sends one byte a second, and ends without a second left.
        """
        token = uuid4().hex

        def rank(number: int) -> Any:
            with self.open(number, nodes, token, **{**NO_DRAIN, **tier}) as store:
                store._deadline.set(0.0)
                return flow(store, number)

        return in_threads(len(nodes), rank)

    def drain(
        self, nodes: str, flow: Flow, *, hook: Hook | None = None, close_seconds: float | None = None, **tier: Any
    ) -> list[Any]:
        """As `run`, with a store that is reached: due are the first save, and then the first of every ten steps."""
        token = uuid4().hex

        def rank(number: int) -> Any:
            store = self.open(number, nodes, token, **{"keep": 9, "drain": KeepEvery(steps=10), **tier})
            with store if hook is None else with_faults(store, hook) as store:
                try:
                    return flow(store, number)
                finally:
                    if close_seconds is not None:
                        store._deadline.set(close_seconds)

        ends = in_threads(len(nodes), rank)
        assert not [thread.name for thread in threading.enumerate() if thread.name == "ckptstore-drain"]
        return ends


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    """A tensor that all ranks share, and what a rank has of its own."""
    return {"w": torch.full((SIZE,), float(step)), "own": torch.full((10,), float(100 * step + rank)), "step": step}


def save(*steps: int) -> Flow:
    def flow(store: CheckpointStore, rank: int) -> Any:
        for step in steps:
            found = store.save(step, state_of(step, rank))
        return found

    return flow


def durable(*wanted: int) -> Any:
    """Save these steps, each until it is in the store."""

    def flow(store: CheckpointStore, rank: int) -> None:
        for step in wanted:
            store.save_async(step, state_of(step, rank)).durable(60)

    return flow


def settle(store: CheckpointStore) -> None:
    """What is superseded is deleted in the background."""
    place = store._job.tier.place
    place.settle()


def resume(store: CheckpointStore, rank: int) -> tuple[int, float, float] | None:
    """Step, and the values of the tensors, each with one value alone."""
    state = state_of(-1)
    found = store.resume(state, per_rank="first")
    if found is None:
        return None
    assert found.step == state["step"]
    assert len(state["w"].unique()) == 1
    assert len(state["own"].unique()) == 1
    return found.step, float(state["w"][0]), float(state["own"][0])


def of(step: int, *ranks: int) -> list[tuple[int, float, float]]:
    """What `resume` gives where each rank has its own."""
    return [(step, float(step), float(100 * step + rank)) for rank in ranks]


def steps(jobs: Jobs, node: str) -> list[int]:
    """Of the fast checkpoints on a node."""
    return [int(path.name[5:15]) for path in jobs.attempts(node)]
