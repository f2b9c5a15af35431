"""A real Ray cluster of two nodes on this machine, and a training run on it.

The second node has the address 127.0.0.2: Ray Train tells nodes apart by their addresses. Both have the same disk, so
workers that are to have caches of their own set `CKPTSTORE_CACHE_DIR` from their node id.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SECRET_ACCESS_KEY": "testsecret",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",
}
"""What the driver and every process of the cluster have in their environment before Ray is imported. Workers
that are nicer than others, as Ray has it, come to nothing on a machine that is busy."""

_OBJECT_STORE_BYTES = 80 << 20
"""Ray wants 75 MiB at least."""


@dataclass
class RayCluster:
    """A running cluster. This process is connected to it in `connected`."""

    temp_dir: str
    environment: Mapping[str, str]
    nodes: list[Any] = field(default_factory=list)
    _cluster: Any = None

    @property
    def address(self) -> str:
        """Where another driver reaches it."""
        return str(self._cluster.address)

    def add_node(self, *, num_cpus: int = 4) -> Any:
        """One more node, on an address of its own."""
        options = {"num_cpus": num_cpus, "object_store_memory": _OBJECT_STORE_BYTES}
        node = self._cluster.add_node(node_ip_address=f"127.0.0.{len(self.nodes) + 1}", **options)
        self.nodes.append(node)
        return node

    def remove_node(self, node: Any) -> None:
        """Kill a node with everything that runs on it."""
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect this process, whose environment is that of the cluster meanwhile. Ray ends what it has begun here."""
        import ray

        with _environment(self.environment):
            ray.init(address=self.address, logging_level="ERROR", log_to_driver=False)
            try:
                yield
            finally:
                ray.shutdown()

    def release(self) -> None:
        """Give back what is still reserved for runs that ended. Ray would learn of a killed controller from its
        dashboard, which is off here; and an elastic run waits for ever for what it believes to be free."""
        from ray import PlacementGroupID
        from ray.util import placement_group_table, remove_placement_group
        from ray.util.placement_group import PlacementGroup

        for number, group in placement_group_table().items():
            if group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))


@contextmanager
def ray_cluster(*, num_nodes: int = 2, num_cpus: int = 4, environment: Mapping[str, str] = {}) -> Iterator[RayCluster]:
    """A cluster for as long as the context lasts, and a connection to it."""
    started = started_cluster(num_nodes=num_nodes, num_cpus=num_cpus, environment=environment)
    with started as running, running.connected():
        yield running


@contextmanager
def started_cluster(
    *, num_nodes: int = 2, num_cpus: int = 4, environment: Mapping[str, str] = {}
) -> Iterator[RayCluster]:
    """A cluster for as long as the context lasts. CPUs are logical: there may be more than the machine has."""
    temp_dir = tempfile.mkdtemp(prefix="ckr-", dir="/tmp")  # short: paths of sockets are bounded
    variables = {**ENVIRONMENT, "RAY_TMPDIR": temp_dir, "PYTHONPATH": _python_path(), **environment}
    try:
        with _environment(variables):
            from ray.cluster_utils import Cluster

            cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": num_cpus,
                    "include_dashboard": False,
                    "object_store_memory": _OBJECT_STORE_BYTES,
                    "temp_dir": f"{temp_dir}/ray",  # where Ray looks for it by RAY_TMPDIR
                },
            )
        try:
            running = RayCluster(temp_dir, variables, [cluster.head_node], cluster)
            with _environment(variables):
                for _ in range(num_nodes - 1):
                    running.add_node(num_cpus=num_cpus)
            yield running
        finally:
            cluster.shutdown()
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, which what it starts gets too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _python_path() -> str:
    """Workers import the package and these helpers by name."""
    return os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def start_fewer_processes() -> None:
    """Have trainers of this process start two actors less, each of which imports as much as a worker.

    One hands out parts of datasets; it stays where there are any. The other gives back what a killed controller has
    reserved, which `RayCluster.release` does here. The demo and the script for GPUs run with both.
    """
    from ray.train.v2._internal.callbacks import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    if hasattr(DataParallelTrainer, "all_callbacks"):
        return

    def needed(trainer: Any) -> list[Any]:
        spared = (PlacementGroupCleanerCallback, *(() if trainer.datasets else (DatasetsCallback,)))
        return [callback for callback in trainer.all_callbacks() if not isinstance(callback, spared)]

    DataParallelTrainer.all_callbacks = DataParallelTrainer._create_default_callbacks
    DataParallelTrainer._create_default_callbacks = needed


def fit(
    train: Callable[[dict[str, Any]], Any],
    storage_path: str | os.PathLike[str],
    name: str = "run",
    config: Mapping[str, Any] | None = None,
    *,
    num_workers: Any = 2,
    torch: bool = False,
    max_failures: int = 0,
    environment: Mapping[str, str] = {},
    trainer: Mapping[str, Any] = {},
    **run_config: Any,
) -> Any:
    """Run `train` on workers that are spread over the nodes, and return Ray's result.

    With `torch` the workers have a process group of gloo; without it they need no torch, and start much faster.
    `environment` is set in the workers, `trainer` are more keywords of the trainer. Raises what Ray raises when the run
    fails.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    start_fewer_processes()
    if torch:
        from ray.train.torch import TorchTrainer as Trainer
    else:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer as Trainer
    return Trainer(
        train,
        train_loop_config={**(config or {})},
        scaling_config=ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            storage_path=str(storage_path),
            name=name,
            failure_config=FailureConfig(max_failures=max_failures),
            worker_runtime_env={"env_vars": dict(environment)} if environment else None,
            **run_config,
        ),
        **trainer,
    ).fit()
