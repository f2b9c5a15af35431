"""Run large jobs off the training path as Ray tasks: one task for each node, with the files dealt to them by size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.errors import InvalidInput, RankFailed
from ckptstore.runtime.beat import beat
from ckptstore.runtime.extras import install_line
from ckptstore.transfer.executor import Item, Result, Task, deal

_TICK_SECONDS = 0.5
"""The interval in which the caller checks for progress."""
_MAX_RETRIES = 3
"""Restarts of a task whose node or process died; its finished work is found and kept."""


@contextmanager
def ray_executor() -> Iterator[RayExecutor]:
    """Create an executor over the cluster of this process, or the one that Ray finds: RAY_ADDRESS, or a local one.

    Raises InvalidInput when there is none.
    """
    try:
        import ray
    except ImportError as error:
        raise InvalidInput("Ray is not installed", hint=f"Install it{install_line('ray')}") from error
    if ray.is_initialized():
        yield RayExecutor()
        return
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        hint = "Start one with `ray start --head`, or name it in RAY_ADDRESS"
        raise InvalidInput("There is no Ray cluster to work on", hint=hint) from error
    try:
        yield RayExecutor()
    finally:
        ray.shutdown()


class RayExecutor:
    """Runs tasks on the nodes of the cluster that have a free CPU.

    Every node must have ckptstore, and reach the storages by the same URIs and credentials; a local path must be on a
    file system that all nodes share.
    """

    is_local = False

    def run(
        self, task: Task[Item, Result], items: Sequence[Item], *, size_bytes: Callable[[Item], int]
    ) -> list[Result]:
        """Run as `Executor.run`. A task whose node dies runs again on another one.

        Raises the errors of a task, and RankFailed when Ray gives up a task whose processes die again and again.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node["NodeID"] for node in found if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            raise InvalidInput("No node of the Ray cluster has a CPU to work with")
        remote: Any = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_work)
        references = [
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)).remote(task, share)
            for node, share in zip(nodes, deal(items, size_bytes, len(nodes)), strict=False)
        ]
        try:
            pending = references
            while pending:
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=_TICK_SECONDS)
                beat()
        except BaseException:
            for reference in references:
                ray.cancel(reference)
            raise
        return [_result(reference) for reference in references]


def _work(task: Task[Item, Result], share: Sequence[Item]) -> Result:
    return task(share)


def _result(reference: Any) -> Any:
    """Return a task's result. Raises its error without Ray's envelope."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise RankFailed(
            f"A Ray task failed for good, in up to {_MAX_RETRIES + 1} tries: {type(error).__name__}",
            hint="What it had done is kept: run the same again. Ray's logs say why; often memory is short",
        ) from error
