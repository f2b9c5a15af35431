"""Store a checkpoint of all ranks in Ray's own directory and report it: `ckptstore.ray.report`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput, RankTimeout
from ckptstore.format.layout import check_step
from ckptstore.group import Group
from ckptstore.integrations.ray.context import Worker, current_worker, report_to_ray
from ckptstore.integrations.ray.filesystem import local_path_of
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RayAttempt, RayPublisher, Run, default_directory
from ckptstore.integrations.ray.kept_by_ray.ray_shards import RayDirectoryShard
from ckptstore.integrations.ray.kept_by_ray.tuning import staging, tell_tune, tune_session
from ckptstore.integrations.ray.kept_by_ray.upload_fn import number_of_report
from ckptstore.integrations.ray.kept_by_ray.wrapping import files_at, kept_files
from ckptstore.integrations.ray.metrics import (
    Score,
    numbers_of,
    plain_metrics,
    safe_metrics,
    warn_of_worst,
    with_those_of_others,
)
from ckptstore.integrations.ray.worker_group import RayWorkers
from ckptstore.saving import transaction
from ckptstore.saving.phases import SaveClock
from ckptstore.saving.shard import Shard

if TYPE_CHECKING:
    from ckptstore.state.write.assignment import SaveMemo

logger = logging.getLogger("ckptstore.ray")


def report(
    metrics: Mapping[str, Any],
    *,
    checkpoint: Any = None,
    directory: str | os.PathLike[str] | None = None,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    shared: Collection[str] = (),
    validation: Any = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """Store a checkpoint of all ranks where Ray keeps checkpoints, and report it. Collective, in the training thread.

    Use it instead of `ray.train.report`: Ray ranks, shows, deletes and hands back the checkpoint as any other. It
    reports after the manifest exists, and Ray uploads nothing. Returns the checkpoint, None without one.

    Args:
        metrics: what one rank alone gives is reported too; of unlike values that of the lowest rank. Scalars of numpy
            and torch become numbers. Where Ray ranks checkpoints by one of them and it is missing or not finite, the
            worst possible number is reported, and a warning is logged.
        checkpoint: a local checkpoint of Ray's, `Checkpoint.from_directory(path)`; or
        directory: a local path. None on ranks that have none. Names that several ranks bring get the rank in them.
        state: in place of these, on all ranks: a dict of modules, optimizers, tensors and plain values, as for
            `CheckpointStore.save`; loaded by `ckptstore.ray.wrap(checkpoint).load(state)`.
        step: for `Checkpoint.step`; the number of the report in the run by default.
        metadata: for `Checkpoint.metadata`; its entries count as metrics do.
        shared: names of files that have the same bytes on all ranks; stored once, under their own names.
        validation: as for `ray.train.report`, which raises ValueError for one without a checkpoint.
        storage_options: credentials and the like for the run's storage, in fsspec's names; Ray's own by default.

    Raises InvalidMetric and other kinds of InvalidInput before anything is written, and the errors of storing any
    rank's files; on all ranks, and nothing is reported then. Outside of a worker of Ray Train metrics are checked and
    nothing is stored: in local mode (`num_workers=0`) Ray gets all but a state, elsewhere nothing is reported. A store
    of ckptstore's own works there. Raises RankTimeout when a worker has not called it within the rank timeout
    (`CKPTSTORE_RANK_TIMEOUT_SECONDS`, 280).

    In a function of Ray Tune use it instead of `ray.tune.report`: the checkpoint is made on this node, whole and with
    its manifest, and Tune copies it. `ckptstore.ray.wrap(ray.tune.get_checkpoint())` opens it, in a clone of another
    trial too. Tune ranks and deletes.
    """
    brought = _Brought(metrics, checkpoint, directory, state, step, metadata, tuple(sorted(shared)))
    if (session := tune_session()) is not None:
        if validation or storage_options:
            raise InvalidInput(
                "validation and storage_options are for Ray Train; Ray Tune has none, and copies by itself"
            )
        return _report_to_tune(session, brought)
    worker = current_worker()
    if worker is None:
        _report_outside(brought)
        return None
    return _reporter(worker, storage_options).report(brought, validation=validation)


@dataclass(frozen=True)
class _Brought:
    """The arguments of one rank for one report."""

    metrics: Mapping[str, Any]
    checkpoint: Any
    directory: str | os.PathLike[str] | None
    state: Mapping[str, Any] | None
    step: int | None
    metadata: Mapping[str, Any] | None
    shared: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """ "nothing", "state" or "directory". Raises InvalidInput for several at once."""
        sources = {"directory": self.directory, "checkpoint": self.checkpoint, "state": self.state}
        kinds = [name for name, value in sources.items() if value is not None]
        if len(kinds) > 1:
            raise InvalidInput(f"report takes a checkpoint, a directory or a state, not {' and '.join(kinds)}")
        if self.shared and kinds == ["state"]:
            raise InvalidInput("shared names files, and a state has none: it stores once what all ranks share")
        return "nothing" if not kinds else "state" if kinds == ["state"] else "directory"

    def path(self) -> str | None:
        """Return the local directory. Raises InvalidSource when the checkpoint is not on this node."""
        if self.checkpoint is not None:
            return local_path_of(self.checkpoint)
        return None if self.directory is None else os.fspath(self.directory)


def _agree_on_kind(group: Group, brought: _Brought, *, score: Score | None) -> tuple[str, dict[str, Any]]:
    """Check, in one meeting, that all ranks bring compatible kinds, and metrics that Ray can keep. Return the kind, and
    the metrics of this rank with those that other ranks alone give."""
    with _expecting_every_worker(), group.meeting("report") as meeting:
        metrics = plain_metrics(brought.metrics)
        safe_metrics(metrics, score=score)
        brought.path()
        if brought.step is not None:
            check_step(brought.step)
        offers = meeting.gather((brought.kind, numbers_of(metrics)))
        kind, joined = meeting.tell(
            lambda: (_agreed_kind([kind for kind, _ in offers]), _first_of_each(numbers for _, numbers in offers))
        )
        return str(kind), with_those_of_others(metrics, joined)


def _first_of_each(offers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric as the lowest rank that gives it does."""
    joined: dict[str, float] = {}
    for numbers in offers:
        joined = {**numbers, **joined}
    return joined


@contextmanager
def _expecting_every_worker() -> Iterator[None]:
    try:
        yield
    except RankTimeout as error:
        error.hint = "Every worker calls ckptstore.ray.report, with metrics alone too; else look at its log"
        raise


def _agreed_kind(kinds: list[str]) -> str:
    """Return the common kind of all ranks. Ranks without files may accompany ranks with files."""
    found = set(kinds)
    if "state" in found and len(found) > 1:
        ranks = tuple(rank for rank, kind in enumerate(kinds) if kind != "state")
        raise InvalidInput(
            f"Some ranks give a state, and rank {ranks[0]} gives {kinds[ranks[0]]}",
            ranks=ranks,
            hint="A state is given by all ranks, also where it is the same on all",
        )
    return max(found - {"nothing"}, default="nothing")


@dataclass
class _Reporter:
    """The state of one worker between reports."""

    run: Run
    storage_options: Mapping[str, Any] | None
    _group: Group | None = None
    _memo: SaveMemo | None = None

    def report(self, brought: _Brought, *, validation: Any) -> Checkpoint | None:
        import ray.train

        clock = SaveClock()
        run, worker, group = self.run, self.run.worker, self._met()
        kind, metrics = _agree_on_kind(group, brought, score=worker.score)
        brought = replace(brought, metrics=metrics)
        if kind == "nothing":
            report_to_ray(metrics, validation=validation)
            return None
        attempt = self._store(group, kind, brought, clock)
        reported = safe_metrics(brought.metrics, score=worker.score)
        if worker.rank == 0:
            warn_of_worst(reported, step=attempt.step)
        report_to_ray(
            reported,
            checkpoint=ray.train.Checkpoint(worker.path_of(attempt.directory), worker.filesystem),
            checkpoint_dir_name=attempt.directory,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            validation=validation,
        )
        return Checkpoint(files_at(run.storage, run.config, prefix=attempt.prefix, group=RayWorkers(worker)))

    def _met(self) -> Group:
        """Return the group of all reports. Collective on use."""
        if self._group is None:
            with _expecting_every_worker():
                self._group = RayWorkers(self.run.worker).open_group(self.run.storage, self.run.config)
        return self._group

    def _store(self, group: Group, kind: str, brought: _Brought, clock: SaveClock) -> RayAttempt:
        step = number_of_report(is_next=True) if brought.step is None else check_step(brought.step)
        metrics = numbers_of(plain_metrics(brought.metrics))
        options = {"step": step, "metrics": metrics, "metadata": brought.metadata, "exists": "replace"}
        if kind == "state":
            request = transaction.checked(group, kind="state", **options)
            publisher = RayPublisher(self.run, default_directory(step))
            return transaction.save(group, publisher, self._state(group, brought), request, clock=clock)
        shard = RayDirectoryShard(self.run, brought.path(), ranks=range(group.world_size), shared=brought.shared)
        request = transaction.checked(group, kind="directory", shared=list(brought.shared), **options)
        publisher = RayPublisher(self.run, default_directory(step), lambda: shard.beside)
        return transaction.save(group, publisher, shard, request, clock=clock)

    def _state(self, group: Group, brought: _Brought) -> Shard:
        from ckptstore.saving.state_shard import StateOptions, StateShard
        from ckptstore.state.live.apply import collect
        from ckptstore.state.write.assignment import SaveMemo

        if self._memo is None:
            self._memo = SaveMemo()
        state = brought.state or {}
        return StateShard(
            lambda: collect(state),
            rank=group.rank,
            world_size=group.world_size,
            memo=self._memo,
            storage=self.run.storage,
            upload=self.run.transfer.upload,
            options=StateOptions(algorithm=self.run.transfer.algorithm, compare_every=self.run.config.compare_every),
        )


_reporters: list[_Reporter] = []
"""At most one: a worker is a process of its own."""


def _reporter(worker: Worker, storage_options: Mapping[str, Any] | None) -> _Reporter:
    """Return the reporter of this worker."""
    for known in _reporters:
        if known.run.worker.run_path == worker.run_path and known.storage_options == storage_options:
            return known
    run = Run.open(worker, storage_options=storage_options)
    made = _Reporter(run, storage_options)
    _reporters.append(made)
    return made


def _report_to_tune(session: Any, brought: _Brought) -> Checkpoint | None:
    """Report in a trial: make its checkpoint whole on this node, let Tune copy it, and remove it."""
    if brought.step is None:
        brought = replace(brought, step=session.storage.current_checkpoint_index + 1)
    with staging() as worker:
        clock = SaveClock()
        reporter = _Reporter(Run.open(worker, durable=False), None)
        attempt = None if brought.kind == "nothing" else reporter._store(reporter._met(), brought.kind, brought, clock)
        made = None if attempt is None else Path(worker.path_of(attempt.directory))
        reported = tell_tune(session, plain_metrics(brought.metrics), made)
    return None if reported is None else Checkpoint(kept_files(reported, StoreConfig.from_env()))


def _report_outside(brought: _Brought) -> None:
    plain, path = plain_metrics(brought.metrics), brought.path()
    if brought.kind == "state":
        logger.warning("nothing is stored: report was called with a state outside of a worker of Ray Train")
    if "ray.train" not in sys.modules:
        return
    import ray.train

    try:
        ray.train.get_context()
    except (RuntimeError, DeprecationWarning):
        return  # outside of a training function
    ray.train.report(plain, checkpoint=None if path is None else ray.train.Checkpoint.from_directory(path))
