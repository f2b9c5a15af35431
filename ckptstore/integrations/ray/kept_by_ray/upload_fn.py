"""Create the function that `ray.train.report` calls in place of its own upload: `ckptstore.ray.upload_fn`.

Ray calls it on every rank that reports a checkpoint, in the training thread or in one of its own, and allows no
collective of the training in it. So the ranks meet in a new group for each report.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptstore.errors import InvalidInput, RankTimeout
from ckptstore.group import Group, SoloGroup
from ckptstore.integrations.ray.context import Worker, current_worker, require_worker
from ckptstore.integrations.ray.filesystem import local_path_of
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RayPublisher, Run
from ckptstore.integrations.ray.kept_by_ray.ray_shards import RayDirectoryShard
from ckptstore.integrations.ray.kept_by_ray.tuning import refuse_in_tune
from ckptstore.integrations.ray.metrics import numbers_of, plain_metrics, warn_of_worst
from ckptstore.integrations.ray.metrics import safe_metrics as made_safe
from ckptstore.integrations.ray.worker_group import open_among
from ckptstore.saving import transaction
from ckptstore.saving.phases import SaveClock

Ranks = Literal["all"] | Collection[int]


def upload_fn(
    storage_options: Mapping[str, Any] | None = None,
    *,
    ranks: Ranks = "all",
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    shared: Collection[str] = (),
    rank_timeout_seconds: float | None = None,
) -> UploadFunction:
    """Return a function for `ray.train.report(metrics, checkpoint, checkpoint_upload_fn=...)`, SYNC or ASYNC.

    It stores the files of all ranks in Ray's directory for the checkpoint, in parallel and every byte hashed, and
    returns on each rank when the manifest exists. So a checkpoint that Ray has registered is whole, and opens with
    `ckptstore.ray.wrap`. The name of the directory begins with Ray's; a mark follows, so that no two attempts share a
    directory, under one name too. It is never the reported directory, so Ray may delete that one afterwards.

    Args:
        storage_options: credentials and the like for the run's storage, in fsspec's names; Ray's own by default.
        ranks: those that report a checkpoint: "all", or [0] where the others report None. Ray does not call this
            function on a rank that reports None, so nobody else can tell.
        step: for `Checkpoint.step`; the number of the report in the run by default.
        metrics: for `Checkpoint.metrics`; Ray does not pass those of the report to this function.
        shared: names that have the same bytes on all ranks; stored once, where others get the rank in their name.
        rank_timeout_seconds: how long a rank may give no sign of life (280).

    The function raises, on all ranks, the errors of storing any rank's files; written files are removed. In SYNC mode
    `ray.train.report` lets the error out; let it end the training function, since Ray counts the report as begun and
    would wait for it at the next one for ever. An error of `ckptstore.ray.report` can be caught.
    """
    refuse_in_tune("ckptstore.ray.upload_fn")
    if ranks != "all":
        ranks = tuple(sorted(set(ranks)))
        if not ranks or ranks[0] < 0:
            raise InvalidInput(f"ranks is {list(ranks)}, it is 'all' or the ranks that report a checkpoint")
    numbers = numbers_of(plain_metrics(metrics or {}))
    return UploadFunction(storage_options, ranks, step, numbers, tuple(shared), rank_timeout_seconds)


@dataclass
class UploadFunction:
    """The result of `upload_fn`. It can be pickled, and called from several threads, one after another on each."""

    storage_options: Mapping[str, Any] | None = field(repr=False)
    ranks: Ranks
    step: int | None
    metrics: Mapping[str, float]
    shared: Sequence[str]
    rank_timeout_seconds: float | None
    _runs: dict[str, Run] = field(default_factory=dict, repr=False)

    def __call__(self, checkpoint: Any, checkpoint_dir_name: str) -> Any:
        """Store `checkpoint`, and return a checkpoint of Ray's for the stored files."""
        import ray.train

        clock = SaveClock()
        worker = require_worker("What upload_fn gives")
        directory = local_path_of(checkpoint)
        run = self._run(worker)
        ranks = self._ranks_of(worker)
        shard = RayDirectoryShard(run, directory, ranks=ranks, shared=self.shared)
        options = {"metrics": self.metrics, "metadata": None, "exists": "replace", "shared": sorted(self.shared)}
        try:
            with closing(_meet(run, ranks, checkpoint_dir_name)) as group:
                step = number_of_report() if self.step is None else self.step
                request = transaction.checked(group, kind="directory", step=step, **options)
                publisher = RayPublisher(run, checkpoint_dir_name, lambda: shard.beside)
                attempt = transaction.save(group, publisher, shard, request, clock=clock)
        except RankTimeout as error:
            if self.ranks == "all":
                error.hint = "If it reported checkpoint=None, give upload_fn(ranks=[...]) without it"
            raise
        return ray.train.Checkpoint(worker.path_of(attempt.directory), worker.filesystem)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}

    def _run(self, worker: Worker) -> Run:
        if worker.run_path not in self._runs:
            timeout = self.rank_timeout_seconds
            opened = Run.open(worker, storage_options=self.storage_options, rank_timeout_seconds=timeout)
            self._runs[worker.run_path] = opened
        return self._runs[worker.run_path]

    def _ranks_of(self, worker: Worker) -> Sequence[int]:
        ranks = range(worker.world_size) if self.ranks == "all" else list(self.ranks)
        if worker.rank not in ranks:
            raise InvalidInput(
                f"Rank {worker.rank} reports a checkpoint, and upload_fn was given ranks={list(ranks)}",
                rank=worker.rank,
            )
        if max(ranks) >= worker.world_size:
            raise InvalidInput(f"upload_fn was given ranks={list(ranks)}, and the run has {worker.world_size} workers")
        return ranks


def _meet(run: Run, ranks: Sequence[int], directory: str) -> Group:
    """Open the group of one attempt. Messages of an attempt that died cannot be mistaken for its own."""
    if len(ranks) == 1:
        return SoloGroup(node=run.worker.node_id)
    name = f"{run.storage.uri}/{directory}"
    return open_among(run.worker, ranks, run.config, name=name)


def number_of_report(*, is_next: bool = False) -> int:
    """Return the number of the present report in the run, from 1 on; or of the next one."""
    from ray.train.v2._internal.execution.context import get_train_context

    context = get_train_context()
    if threading.current_thread() in context.checkpoint_upload_threadpool._threads:
        return int(context.current_report_index) + 1  # the one thread there makes report after report
    return int(context.report_call_index) + is_next


def safe_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Convert metrics for a `ray.train.report` with a checkpoint: Ray accepts them, and ranks by finite numbers.

    Scalars of numpy and torch become Python's numbers. In a worker of a run that ranks checkpoints by a metric, a
    missing or not finite one becomes the worst possible number, "ckptstore_replaced" records the original, and a
    warning is logged. `ckptstore.ray.report` does the same. Raises InvalidMetric, with the name, for a value that Ray
    cannot keep.
    """
    worker = current_worker()
    safe = made_safe(metrics, score=worker.score if worker else None)
    if worker is not None and worker.rank == 0:
        warn_of_worst(safe)
    return safe
