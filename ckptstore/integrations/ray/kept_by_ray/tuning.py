"""Detect a function of Ray Tune, and stage its checkpoints.

A trial is one process. Tune copies a reported directory into the trial's own, under a name of its own, and decides by
itself which ones to keep and from which one another trial goes on. So `ckptstore.ray.report` first makes its checkpoint
whole on this node.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RAY_MARKER


def tune_session() -> Any:
    """Return Ray's session of this trial, None outside of a function of Ray Tune."""
    if "ray.tune" not in sys.modules:
        return None
    from ray.train._internal.session import get_session

    session = get_session()
    return session if session is not None and session.world_rank is None else None


def refuse_in_tune(what: str) -> None:
    """Raise InvalidInput in a function of Ray Tune, before anything is written."""
    if tune_session() is not None:
        raise InvalidInput(
            f"{what} is for Ray Train; in a function of Ray Tune it does not work",
            hint="There it is ckptstore.ray.report(metrics, state=...), and at the start "
            "ckptstore.ray.wrap(ray.tune.get_checkpoint()).load(state)",
        )


@contextmanager
def staging() -> Iterator[Worker]:
    """Yield a worker of one whose run is a temporary directory of this node during the context."""
    import ray
    from pyarrow.fs import LocalFileSystem

    with tempfile.TemporaryDirectory(prefix="ckptstore-tune-") as path:
        Path(path, RAY_MARKER).touch()  # as the driver of a run does
        node = ray.get_runtime_context().get_node_id()
        yield Worker(rank=0, world_size=1, node_id=node, run_path=path, filesystem=LocalFileSystem())


def tell_tune(session: Any, metrics: dict[str, Any], directory: Path | None) -> Any:
    """Report to Tune, which copies the directory; returns Tune's checkpoint, None without one."""
    from ray import tune

    if directory is None:
        tune.report(metrics)
        return None
    tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(directory))
    return tune.Checkpoint(session.storage.checkpoint_fs_path, session.storage.storage_filesystem)
