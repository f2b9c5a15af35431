"""Create stores whose saves are reported to Ray Train: `ckptstore.ray.store()`. ckptstore keeps the files."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.errors import CheckpointGone, CkptstoreError, InvalidInput
from ckptstore.format.record import Record
from ckptstore.integrations.ray.context import Worker, current_worker
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.integrations.ray.handed import look, unknown_to_ray
from ckptstore.integrations.ray.kept_by_ray.tuning import refuse_in_tune
from ckptstore.integrations.ray.kept_by_ray.wrapping import kept_files
from ckptstore.integrations.ray.metrics import numbers_of, plain_metrics, safe_metrics, with_those_of_others
from ckptstore.integrations.ray.pointer import Pointer
from ckptstore.integrations.ray.preemption import MARGIN, Notice, PreemptionSave, current_notice
from ckptstore.integrations.ray.ray_snapshot import ROOT_NAME
from ckptstore.integrations.ray.reports import LateReports, Reports
from ckptstore.integrations.ray.worker_group import RayWorkers
from ckptstore.loading.newest import newest_first, refuse_load_options, resume
from ckptstore.opening import open_store
from ckptstore.saving.background import OnBusy, PendingSave
from ckptstore.saving.phases import SaveClock
from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    from ckptstore.extensions.tier.candidates import FastCandidate
    from ckptstore.integrations.dcp.target import StoreTarget
    from ckptstore.saving.save_state import SaveResult

logger = logging.getLogger("ckptstore.ray")

Prefer = Literal["newest", "ray"]


@dataclass(frozen=True, slots=True)
class RaysOrder:
    """The order of the checkpoint that Ray has registered, then older ones, then newer ones; see `Order`.

    Of a fast tier only what is in the store counts. What the nodes have besides is void then, and is deleted.
    """

    number: int
    """The record that committed the one of Ray."""

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        return sorted(numbers, key=self._place)

    def of_fast(self, candidates: Sequence[FastCandidate]) -> list[FastCandidate]:
        """See `FastOrder`."""
        return sorted((one for one in candidates if one.is_durable), key=lambda one: self._place(one.number or 0))

    def _place(self, number: int) -> tuple[bool, int]:
        return number > self.number, -number


class RayStore(CheckpointStore):
    """A `CheckpointStore` that reports every save to Ray Train, by one report on every rank, with a pointer to it.

    Do not report a step that was saved in it again. In Ray's results a checkpoint is a pointer; `ckptstore.ray.resolve`
    returns the checkpoint behind it. Ray's retention deletes pointers, the store's own deletes files. Outside of a
    worker of Ray Train it is a store like any other, and reports nothing.

    With a fast tier a save is reported when its outcome in the store is known: the save and its checkpoint if it came
    there, its metrics alone if a newer one did. The training function ends with `close`, which brings the newest there.

    Metrics may be anything that Ray takes, text and nested dicts too; the store keeps the numbers, nested ones as
    "a/b". Collective are `save`, `save_async`, `save_directory`, `load`, `resume`, `warm_up` and `close`; in the
    training thread, as Ray requires it of reports.
    """

    _reports: Reports | None = None
    _late: LateReports | None = None
    """Present if there is a fast tier."""
    _preempted: tuple[Notice, PreemptionSave] | None = None
    _ignores_ray: bool = False
    _run_options: Mapping[str, Any] | None = None
    """Storage options for the run's directory, which holds the store."""

    @property
    def worker(self) -> Worker | None:
        """This worker, None outside of Ray Train."""
        return self._reports.worker if self._reports else None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        validation: Any = False,
        **options: Any,
    ) -> Checkpoint:
        """`CheckpointStore.save`, then a report. Collective; returns when the checkpoint is committed and reported.

        An error is raised on all ranks, and nothing is reported then. `validation` is that of `ray.train.report`; its
        function gets the pointer, and its metrics come too late for `retention`. Raises InvalidInput if that ranks by
        one which `metrics` lack. The other keywords are those of `CheckpointStore.save`.
        """
        clock = SaveClock()
        self._settle()
        numbers = self._numbers(metrics, validation=validation)
        started, self._called = time.monotonic(), clock
        checkpoint = super().save(step, state, metrics=numbers, **options)
        return self._reported(checkpoint, metrics, validation, started)

    def save_directory(
        self,
        step: int,
        path: str | os.PathLike[str] | None,
        *,
        metrics: Mapping[str, Any] | None = None,
        validation: Any = False,
        **options: Any,
    ) -> Checkpoint:
        """`CheckpointStore.save_directory`, then a report; else as `save`."""
        clock = SaveClock()
        self._settle()
        numbers = self._numbers(metrics, validation=validation)
        started, self._called = time.monotonic(), clock
        checkpoint = super().save_directory(step, path, metrics=numbers, **options)
        return self._reported(checkpoint, metrics, validation, started)

    def save_async(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        on_busy: OnBusy = "wait",
        max_failures: int = 0,
        validation: Any = False,
        **options: Any,
    ) -> PendingSave:
        """`CheckpointStore.save_async`, and a report that Ray registers when the checkpoint is committed, not before.

        Returns once the state is copied and Ray has the report in its queue; it waits while `max_in_flight` earlier
        reports are still in it. A failing save is tolerated while no more than `max_failures` have failed in a row: its
        report carries a pointer that says so, ranks last by Ray's score, and is passed over by `resume`. One more ends
        this start of the run, as any error in a worker does, and `FailureConfig` decides. A skipped save
        (`on_busy="skip"`) reports its metrics alone. Metrics are those at the time of the call: the next report counts
        the outcome of this one.
        """
        reports, started, clock = self._reports, time.monotonic(), SaveClock()
        if reports and on_busy == "wait":
            with reports.counts.waiting(self._background.pending is not None):
                self._background.wait()
        numbers = self._numbers(metrics, validation=validation)
        options = {"metrics": numbers, "on_busy": on_busy, "max_failures": max_failures, **options}
        self._called = clock
        pending = super().save_async(step, state, **options)
        if reports and pending.skipped:
            reports.skipped(step, metrics)
        elif self._late:
            self._late.add(step, metrics, validation, pending)
            self._late.send()
        elif reports:
            reports.pending(pending, metrics, max_failures=max_failures, validation=validation, started=started)
        return pending

    def dcp_target(
        self, *, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> StoreTarget:
        """`CheckpointStore.dcp_target`. Raises InvalidInput in a worker, for Ray would not hear of the checkpoint."""
        if self._reports:
            raise InvalidInput(
                "What dcp.save writes into the store of a Ray Train run is not reported to Ray",
                hint="Use store.save(step, state): it reports to Ray",
            )
        return super().dcp_target(metrics=metrics, metadata=metadata)

    def save_on_preemption(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        needed_seconds: float | None = None,
        **options: Any,
    ) -> PreemptionSave | None:
        """`save` if there is time, once Ray announces that nodes of the run are to be taken away. Collective.

        All ranks call it after the same steps, each step or every few, and go on training whatever it returns; when the
        nodes are gone Ray restarts the run.

        None while there is no notice, and outside of Ray Train; without a notice it costs a barrier of Ray's. For one
        notice there is one save: later calls return its outcome, until more nodes are to go. When less time is left
        than a save needs it is skipped, with the reason; the metrics are reported alone then.

        Args:
            needed_seconds: the time that a save needs; by default 1.5 times the longest one of this start.
            options: the other keywords of `save`.
        """
        reports = self._reports
        notice = current_notice() if reports else None
        if reports is None or notice is None:
            return None
        if self._preempted is None or self._preempted[0] != notice:
            self._settle()
            objection = self._objection(notice, needed_seconds, longest_seconds=reports.longest_save_seconds)
            checkpoint = None
            if objection:
                reports.skipped(step, {**(metrics or {}), "ckptstore_error": objection})
            else:
                checkpoint = self._in_time(self.save(step, state, metrics=metrics, **options), notice)
            made = PreemptionSave(checkpoint=checkpoint, reason=objection, node_ids=notice.node_ids, ranks=notice.ranks)
            self._preempted = (notice, made)
        return self._preempted[1]

    def _in_time(self, checkpoint: Checkpoint, notice: Notice) -> Checkpoint:
        """Return the checkpoint in the store, if it comes there before the nodes go; else the fast one. Collective."""
        if self._late is None or checkpoint.number is not None:
            return checkpoint
        left = None if notice.deadline_seconds is None else max(0.0, notice.deadline_seconds - time.time())
        drain = self._state_saver.drain_newest(left)

        def record() -> Any:  # the leader's clock decides for all
            if drain is None or not drain.done() or drain.error() is not None:
                return None
            found = drain.result(0.0)
            return found.number, found.encode()

        with self._job.group.meeting("brought in time") as meeting:
            found = meeting.tell(record)
        self._late.send()
        return checkpoint if found is None else self._checkpoint(Record.decode(found[1], found[0]))

    def _objection(self, notice: Notice, needed_seconds: float | None, *, longest_seconds: float) -> str:
        """Return the reason why there is no time for a save, "" if there is time. Collective; by the leader's clock."""

        def decide() -> str:
            needed = MARGIN * max(longest) if needed_seconds is None else needed_seconds
            return notice.objection(needed_seconds=needed)

        with self._job.group.meeting("preemption") as meeting:
            longest = meeting.gather(longest_seconds)
            return str(meeting.tell(decide))

    def resume(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        prefer: Prefer = "newest",
        required: bool = False,
        **options: Any,
    ) -> Checkpoint | None:
        """Claim the store for this start of the run and load the checkpoint to resume from. Collective.

        All ranks get the same one; None, and the state as it was, when there is none. Damaged ones and failed saves are
        passed over. A checkpoint of `ckptstore.ray.report` that Ray hands back is loaded if it is newer than those of
        the store. What Ray does not know of, since a worker was killed before Ray took its report, is reported now,
        with the numbers of its metrics.

        Args:
            state: what to load into; None to get the checkpoint alone, for directories.
            prefer: "newest" for the newest checkpoint, which may be ahead of what Ray has registered when the run died
                in between; "ray" for the one that `ray.train.get_checkpoint()` gives, and from there on older ones,
                then newer ones. Outside of Ray Train there is only the newest.
            required: raise StoreMissing, and write nothing, if there is none.
            options: the keywords of `CheckpointStore.resume`: `include`, `strict`, `device`, `read_once`, `per_rank`,
                `allow_pickle`.

        Raises NoUsableCheckpoint and StateMismatch as `CheckpointStore.resume` does. Raises NoUsableCheckpoint too when
        Ray hands back a checkpoint that cannot be loaded: files that Ray stored itself, a checkpoint of another store,
        or one that is gone while the store is empty. `ckptstore.ray.store(ignore_ray=True)` leaves it out on purpose.
        """
        if prefer not in ("newest", "ray"):
            raise InvalidInput(f"prefer is {prefer!r}, it is 'newest' or 'ray'")
        if state is None:
            refuse_load_options(options)
        if self._reports is None:
            return super().resume(state, required=required, **options)
        self._background.wait()
        handed = handed_back()

        def decide() -> Any:
            if handed is None or self._ignores_ray:
                return None, ""
            return look(handed, self._job, prefers_ray=prefer == "ray", storage_options=self._run_options)

        with self._job.group.meeting("what Ray hands back") as meeting:
            number, path = meeting.tell(decide)
        if path:
            return self._resume_from_ray(path, state, prefers_ray=prefer == "ray", **options)
        if prefer == "newest" or number is None:
            checkpoint = super().resume(state, required=required, **options)
        elif state is not None:
            checkpoint = self._load(state, claim=True, order=RaysOrder(number), **options)
        else:
            files = resume(self._in_turn(), order=RaysOrder(number))
            checkpoint = Checkpoint(files) if files else None
        if checkpoint is not None and checkpoint.number not in (None, number):
            self._report_lost(self._reports, handed, checkpoint.number)
        return checkpoint

    def _resume_from_ray(
        self, path: str, state: Mapping[str, Any] | None, *, prefers_ray: bool, **options: Any
    ) -> Checkpoint | None:
        """`resume` from a checkpoint that Ray keeps, unless the nodes have a newer one. Collective."""
        import ray.train

        assert self.worker is not None
        config, group = StoreConfig.from_env(), RayWorkers(self.worker)
        kept_by_ray = ray.train.Checkpoint(path, self.worker.filesystem)
        files = kept_files(kept_by_ray, config, storage_options=self._run_options, group=group)
        if not prefers_ray and self._nodes_have_newer(files.read_manifest()[0].step):
            return super().resume(state, **options)
        resume(self._job, order=lambda _numbers: ())  # claims
        report = None if state is None else Checkpoint(files).load(state, **options)
        return Checkpoint(files, load_report=report)

    def _report_lost(self, reports: Reports, handed: Any, taken: int | None) -> None:
        """Report the checkpoints up to that number which Ray does not know. Collective."""

        def look() -> list[Any]:
            assert taken is not None
            lost = unknown_to_ray(handed, self._job, taken, is_of_run=reports.root == ROOT_NAME)
            if lost:
                steps = ", ".join(str(record.entry.step) for record in lost)
                logger.info("reported now, for Ray does not know of it: step %s", steps)
            # In directories of their own: Ray may have the old ones still.
            return [[record.number, record.encode().decode(), secrets.token_hex(4)] for record in lost]

        with self._job.group.meeting("what Ray has lost") as meeting:
            found = meeting.tell(look)
        for number, text, mark in found:
            checkpoint = self._checkpoint(Record.decode(text.encode(), number))
            reports.committed(checkpoint, checkpoint.metrics, validation=False, mark=mark)

    def _nodes_have_newer(self, step: int) -> bool:
        """True if the fast tier has a checkpoint of a later step. Collective."""
        job = self._in_turn()
        if job.tier is None:
            return False
        found = job.tier.candidates(job, newest_first, is_loaded=False).files
        return bool(found) and found[0].step > step

    def at(self, pointer: Pointer) -> Checkpoint:
        """Return the checkpoint of a pointer of this store, from the trash too; if it was thinned since, what is left.

        Raises CheckpointGone, which names the live ones.
        """
        job = self._job
        newest = job.log.newest()
        live = newest.state.live if newest else ()
        number = newest.state.live_at(pointer.number) if newest and pointer.number is not None else None
        if number is None and newest and pointer.number in newest.state.trash:
            number = pointer.number  # Ray may only now validate it, and keeps pointers by rules of its own
        if number is not None and pointer.number is not None:
            committed, record = job.log.records([pointer.number, number])
            if committed.entry.attempt == pointer.attempt:
                return self._checkpoint(job.log.annotated([record], newest)[0])
        steps = [record.entry.step for record in job.log.records(live)]
        left = ", ".join(map(str, steps[-10:])) or "none"
        what = "was removed" if pointer.number is not None else f"was never committed ({pointer.error})"
        raise CheckpointGone(
            f"The checkpoint of step {pointer.step} {what}; live steps at {self.uri}: {left}",
            step=pointer.step,
            hint="Ray keeps pointers by its own rules: take one of the live ones from the store",
        )

    def close(self) -> None:
        """`CheckpointStore.close`, after reporting the outcome of every save to Ray."""
        self._settle()
        super().close()

    def _saves_ended(self) -> None:
        if self._late and self._deadline.left_seconds() != 0.0:
            self._late.send(is_last=True)

    def _saved(self, saved: SaveResult) -> Checkpoint:
        checkpoint = super()._saved(saved)
        if self._late and self._job.is_leader and saved.later is not None:  # the leader alone reports drains
            self._late.drains[saved.later.attempt] = saved.later
        return checkpoint

    def _report_to(self, worker: Worker, *, root: str, max_in_flight: int) -> None:
        """Report every save from now on; pointers name the store `root`."""
        self._reports = Reports(
            worker=worker,
            job=self._job,
            root=root,
            retry=RetryConfig.from_env(),
            max_in_flight=max_in_flight,
            forgive=self._background.forgive,
            ranked_by=self.retention.required_metrics(),
        )
        if self._job.tier is not None:
            self._late = LateReports(job=self._job, reports=self._reports)

    def _settle(self) -> None:
        if self._reports and not self._late:  # late reports wait for the store, and no save does
            self._reports.settle()

    def _numbers(self, metrics: Mapping[str, Any] | None, *, validation: Any) -> Any:
        """Return the numbers for the store. If metrics or validation are bad, raise the error on all ranks; only then
        collective."""
        if not self._reports:  # outside of Ray the save alone judges
            return metrics
        try:
            plain = plain_metrics({} if metrics is None else metrics)
            safe_metrics(plain, score=self.worker.score if self.worker else None)  # what the report would refuse
            numbers = numbers_of(plain)
            absent = ", ".join(map(repr, sorted(self.retention.required_metrics() - numbers.keys())))
            if validation and absent and self._job.is_leader:
                raise InvalidInput(
                    f"retention ranks by {absent}, which the metrics lack: what validation measures comes too late, "
                    "and what Ray ranks best would be deleted",
                    hint="Use ckptstore.ray.report, where Ray keeps what it ranks best, or another retention",
                )
        except CkptstoreError as error:
            self._job.raise_on_all(error)
        return numbers

    def _reported(
        self, checkpoint: Checkpoint, metrics: Mapping[str, Any] | None, validation: Any, started: float
    ) -> Checkpoint:
        if self._reports:
            self._reports.took(time.monotonic() - started)
            metrics = with_those_of_others(metrics, checkpoint.metrics)
            if self._late:
                self._late.add(checkpoint.step, metrics, validation, checkpoint)
                self._late.send()
            else:
                self._reports.committed(checkpoint, metrics, validation=validation)
        return checkpoint


_opened: list[RayStore] = []
"""The store that this training function opened last."""


def store(
    root: str | os.PathLike[str] | None = None,
    *,
    max_in_flight: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    group: object = None,
    ignore_ray: bool = False,
    **options: Any,
) -> RayStore:
    """Open the store of this run, in the training function; on every rank, without waiting.

    Args:
        root: where it lies; by default in the run's own directory, `<storage_path>/<run name>/_ckptstore`, which is
            reached with the endpoint and the credentials of `RunConfig`. Outside of Ray Train it is required.
        max_in_flight: how many reports of asynchronous saves Ray may be behind before the next `save_async` waits. Of
            saves themselves one at most is in flight.
        storage_options: in fsspec's names; for the default root they replace those of `RunConfig`.
        group: another group than that of Ray's workers.
        ignore_ray: have `resume` leave out what Ray hands back, and take what the store has, if anything: to start
            from scratch on purpose, or where you load files that Ray stored itself.
        options: the other keywords of `ckptstore.open_store`: `retention`, `grace_seconds`, `fast`...
            `missing` is "worst" in a worker: a save without a metric that retention ranks by is logged as a warning.

    Raises InvalidInput for a bad value, when the storage of the run is one that ckptstore cannot open by itself, and in
    a function of Ray Tune, where `ckptstore.ray.report` works instead.
    """
    refuse_in_tune("ckptstore.ray.store")
    if type(max_in_flight) is not int or max_in_flight < 1:
        raise InvalidInput(f"max_in_flight is {max_in_flight!r}, it must be an integer above 0")
    worker = current_worker()
    run_options = storage_options if root is None else None
    if root is not None:
        uri = os.fspath(root)
    elif worker is None:
        raise InvalidInput("Outside of Ray Train a store needs a root", hint="Give ckptstore.ray.store a path or a URI")
    else:
        place = place_of(worker.filesystem, worker.path_of(ROOT_NAME), storage_options=storage_options)
        uri, storage_options = place.uri, place.storage_options
    if group is None and worker is not None:
        group = RayWorkers(worker)
    if worker is not None:
        options.setdefault("missing", "worst")
    opened = RayStore(job_of(open_store(uri, storage_options=storage_options, group=group, **options)))
    opened._ignores_ray, opened._run_options = ignore_ray, run_options
    if worker is not None:
        opened._report_to(worker, root=ROOT_NAME if root is None else opened.uri, max_in_flight=max_in_flight)
    _opened[:] = [opened]
    return opened


def handed_back() -> Any:
    """Return the checkpoint that Ray hands back to this worker."""
    from ray.train import get_checkpoint

    return get_checkpoint()


def current_store() -> RayStore:
    """Return the store that this process opened last with `store`; the default one when there is none."""
    return _opened[0] if _opened else store()
