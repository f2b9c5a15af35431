"""Describe this process in a Ray Train run: its rank, its node, and the run's storage.

Ray Train derives local ranks from IP addresses, so two nodes of one host look like one to it. ckptstore's nodes are
those of Ray Core, by node id.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInput
from ckptstore.integrations.ray.metrics import Score

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

logger = logging.getLogger("ckptstore.ray")


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker of a Ray Train run, as it sees itself. It holds for one start of the worker group."""

    rank: int
    world_size: int
    node_id: str
    """Ray's id of the node, in hex."""
    run_path: str
    """The run's directory in `filesystem`, `<storage_path>/<run name>`: Ray's checkpoints lie right below it."""
    filesystem: FileSystem = field(repr=False)
    """The very object that Ray compares with; another one for the same place may be refused."""
    score: Score | None = None
    """The metric by which Ray ranks the checkpoints of this run, None when it keeps the latest ones."""

    def path_of(self, directory_name: str) -> str:
        """Return the path of a checkpoint directory of Ray's, in `filesystem`."""
        return f"{self.run_path.rstrip('/')}/{directory_name}"

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's small value on every rank. Collective among the workers, in the training thread.

        It waits without a deadline for a rank that does not call it.
        """
        from ray.train.collective import broadcast_from_rank_zero

        return broadcast_from_rank_zero(value)


def current_worker() -> Worker | None:
    """Return this worker; None in the driver, an actor, a plain process, and in local mode (`num_workers=0`).

    Raises InvalidInput in a training function of Ray Train's first version, or of ray before 2.51, which lack the
    necessary calls.
    """
    if "ray.train" not in sys.modules:
        return None
    import ray
    from ray import train

    try:
        context = train.get_context()
        storage = context.get_storage()
    except (RuntimeError, NotImplementedError, DeprecationWarning):
        return None  # not inside a training function, or in local mode, or in a function of Ray Tune
    if not hasattr(train, "CheckpointUploadMode"):
        if context.get_world_size() is not None:
            is_new = tuple(map(int, ray.__version__.split(".")[:2])) >= (2, 51)
            raise InvalidInput(
                f"This Ray Train, of ray {ray.__version__}, has no reports without an upload, and is not supported",
                hint="Unset RAY_TRAIN_V2_ENABLED, for its first version" if is_new else "Install ray 2.51 or newer",
            )
        return None
    return Worker(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        node_id=ray.get_runtime_context().get_node_id(),
        run_path=storage.experiment_fs_path,
        filesystem=storage.storage_filesystem,
        score=_score(),
    )


def report_to_ray(metrics: dict[str, Any], *, validation: Any, **options: Any) -> None:
    """Call `ray.train.report`. `validation`, which older ones do not know, is passed on where it is given."""
    from ray import train

    train.report(metrics, **options, **({"validation": validation} if validation else {}))


def require_worker(what: str) -> Worker:
    """Return this worker. Raises InvalidInput, which names the call `what`, outside of one."""
    worker = current_worker()
    if worker is None:
        raise InvalidInput(
            f"{what} was called outside of a worker of Ray Train",
            hint="Call it in the function that is given to the trainer",
        )
    return worker


def _score() -> Score | None:
    """Read the score from `RunConfig.checkpoint_config`, which no public name of Ray gives to a worker."""
    try:
        from ray.train.v2._internal.execution.context import get_train_context

        config: Any = get_train_context().train_run_context.run_config.checkpoint_config
        name, order = config.checkpoint_score_attribute, config.checkpoint_score_order
    except (ImportError, AttributeError) as error:
        logger.warning("this version of Ray does not say by which metric it ranks checkpoints: %s", error)
        return None
    return None if name is None else Score(name, order)
