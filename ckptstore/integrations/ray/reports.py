"""Report a store's commits to Ray: exactly one report per save, on every rank, in the order of the saves.

Ray registers only committed checkpoints: a report with a checkpoint is made after the commit, or, for a save in the
background, Ray gets a function that waits for the commit before Ray counts the report as made. Ray's controller
registers nothing before rank 0 has reported, and rank 0 writes the pointer before it does.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError
from ckptstore.format.record import Record
from ckptstore.integrations.ray.context import Worker, report_to_ray
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import default_directory
from ckptstore.integrations.ray.kept_by_ray.upload_fn import number_of_report
from ckptstore.integrations.ray.metrics import (
    REPLACED,
    plain_metrics,
    rank_last,
    safe_metrics,
    warn_of_worst,
    with_those_of_others,
)
from ckptstore.integrations.ray.pointer import Pointer, write_pointer
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.saving.background import PendingSave
from ckptstore.saving.save_state import Later

logger = logging.getLogger("ckptstore.ray")

_NOT_KNOWN = "it is on the nodes, and the store was closed before it came there"


@dataclass
class Counts:
    """Counts of the outcomes of this worker's saves so far. Those above 0 are part of every report."""

    failed_saves: int = 0
    """Saves that failed and were tolerated."""
    skipped_saves: int = 0
    """Saves that were left out: the one before was in flight, or the node was about to go."""
    waits: int = 0
    """Calls that had to wait, for a save in flight or for Ray to take a report."""
    wait_seconds: float = 0.0

    def as_metrics(self) -> dict[str, float]:
        """Return the counts above 0 under the names that Ray's results show; a printed table has few columns."""
        return {f"ckptstore_{name}": value for name, value in vars(self).items() if value}

    @contextmanager
    def waiting(self, is_waiting: bool) -> Iterator[None]:
        """Count the context as a wait, if it is one."""
        started = time.monotonic()
        yield
        if is_waiting:
            self.waits += 1
            self.wait_seconds += time.monotonic() - started


@dataclass(kw_only=True)
class Reports:
    """The reports of one store in one worker. Called from the training thread."""

    worker: Worker
    job: Job
    root: str
    """The store's name in pointers."""
    retry: RetryConfig
    max_in_flight: int
    forgive: Callable[[PendingSave], None]
    """Called with a failed save that is tolerated."""
    ranked_by: frozenset[str] = frozenset()
    """The metrics that the store's retention ranks by."""
    counts: Counts = field(default_factory=Counts)
    longest_save_seconds: float = 0.0
    """From a call to its commit."""
    _waiting: list[threading.Event] = field(default_factory=list)
    """One for each report in the background whose outcome Ray has not fetched yet, oldest first."""
    _failed_in_row: int = 0

    def took(self, seconds: float) -> None:
        """Note the duration of a committed save."""
        self.longest_save_seconds = max(self.longest_save_seconds, seconds)

    def committed(
        self, checkpoint: Checkpoint, metrics: Mapping[str, Any] | None, *, validation: Any, mark: str = ""
    ) -> None:
        """Report a checkpoint, in a directory with that mark or the attempt's own. Collective; returns when Ray's
        controller is about to take it. If the pointer cannot be written, all ranks report the metrics alone.
        """
        import ray.train

        name = f"{default_directory(checkpoint.step)}-{mark or checkpoint.uri.rpartition('-')[2]}"
        try:  # ranks that do not meet would wait at Ray's barrier for ever
            with self.job.group.meeting("pointer", step=checkpoint.step):
                pointing = self._pointing(name, lambda: Pointer.to(checkpoint, root=self.root))
        except CkptstoreError as error:
            text = f"step {checkpoint.step} is committed, and Ray hears of it at the next start: {error}"
            if self.worker.rank == 0:
                logger.warning("%s", text)
            self.alone({**self._metrics(checkpoint.step, metrics), "ckptstore_error": text})
            return
        report_to_ray(
            self.ranked(checkpoint.step, metrics),
            checkpoint=pointing,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            validation=validation,
        )

    def pending(
        self,
        pending: PendingSave,
        metrics: Mapping[str, Any] | None,
        *,
        max_failures: int,
        validation: Any,
        started: float,
    ) -> None:
        """Report a save in flight that began at `started`; Ray registers it when it is committed.

        Returns at once, unless `max_in_flight` reports before it are still waiting.
        """
        self._wait_until_at_most(self.max_in_flight - 1)
        name = f"{default_directory(pending.step)}-{secrets.token_hex(4)}"  # that of rank 0 counts
        own = plain_metrics(metrics or {})
        ranked = self._metrics(pending.step, own)
        judge = cache(partial(self._judge, pending, own, ranked, max_failures, started))
        self._report_later(name, ranked, judge, validation)

    def stored(self, checkpoint: Checkpoint, metrics: dict[str, Any], *, validation: Any) -> None:
        """Report a checkpoint that came into the store after its save; returns as `pending` does.

        The pointer to it is written in the background.
        """
        self._wait_until_at_most(self.max_in_flight - 1)
        name = f"{default_directory(checkpoint.step)}-{checkpoint.uri.rpartition('-')[2]}"
        pointer = Pointer.to(checkpoint, root=self.root)
        self._report_later(name, metrics, lambda: pointer, validation)

    def _report_later(
        self, name: str, metrics: dict[str, Any], pointer: Callable[[], Pointer], validation: Any
    ) -> None:
        """Report with a function that Ray calls on its own thread in the order of the reports, possibly repeatedly."""
        import ray.train

        ended, number = threading.Event(), number_of_report()

        def upload(_reported: Any, directory_name: str) -> Any:
            try:
                return self._pointing(directory_name, pointer)
            finally:
                ended.set()

        report_to_ray(
            metrics,
            checkpoint=ray.train.Checkpoint(self.worker.path_of(name), self.worker.filesystem),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,  # there is nothing but what was just reported
            validation=validation,
        )
        if number_of_report() > number:  # else Ray left it out, for it lost a worker, and never calls the function
            self._waiting.append(ended)

    def _pointing(self, directory_name: str, pointer: Callable[[], Pointer]) -> Any:
        """Return Ray's checkpoint in that directory, into which rank 0 writes the pointer."""
        import ray.train

        found = pointer()
        if self.worker.rank == 0:
            write_pointer(self.worker, directory_name, found, retry=self.retry)
        return ray.train.Checkpoint(self.worker.path_of(directory_name), self.worker.filesystem)

    def alone(self, metrics: dict[str, Any]) -> None:
        """Report metrics without a checkpoint, after the reports before them; returns at once."""
        import ray.train

        report_to_ray(metrics, validation=False, checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC)

    def skipped(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """Report the metrics of a save that was left out, after the reports before it; returns at once."""
        self.counts.skipped_saves += 1
        self.alone(self._metrics(step, metrics))

    def settle(self) -> None:
        """Wait until this worker and Ray know the outcome of every save in the background."""
        self._wait_until_at_most(0)

    def _judge(
        self,
        pending: PendingSave,
        own: Mapping[str, Any],
        metrics: dict[str, Any],
        max_failures: int,
        started: float,
    ) -> Pointer:
        """Wait for the save, and put the metrics of all ranks into `metrics`, which Ray reads once the upload is over;
        turn a tolerated failure into a pointer that records it."""
        is_timed = not pending.done()  # else it ended while Ray was behind
        try:
            checkpoint = pending.result()
            assert checkpoint is not None  # a save that was skipped is not reported with a pointer
        except CkptstoreError as error:
            self._failed_in_row += 1
            if self._failed_in_row > max_failures:
                raise
            self.counts.failed_saves += 1
            self.forgive(pending)
            logger.warning("step %d is not saved, and training goes on: %s", pending.step, error)
            metrics["ckptstore_error"] = str(error)
            if self.worker.score:
                rank_last(metrics, self.worker.score, "save failed")
            return Pointer(root=self.root, step=pending.step, number=None, error=str(error))
        self._failed_in_row = 0
        if is_timed:
            self.took(time.monotonic() - started)
        metrics.pop(REPLACED, None)
        metrics.update(self.ranked(pending.step, with_those_of_others(own, checkpoint.metrics)))
        return Pointer.to(checkpoint, root=self.root)

    def ranked(self, step: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the metrics of a checkpoint, with a warning if it ranks last for want of one."""
        safe = self._metrics(step, metrics)
        if self.worker.rank == 0:  # those of the others are ignored
            warn_of_worst(safe, step=step, ranked_by=self.ranked_by)
        return safe

    def _metrics(self, step: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        own = {"ckptstore_step": step, **self.counts.as_metrics()}
        return safe_metrics({**(metrics or {}), **own}, score=self.worker.score)

    def _wait_until_at_most(self, num_waiting: int) -> None:
        self._waiting = [event for event in self._waiting if not event.is_set()]
        if len(self._waiting) <= num_waiting:
            return
        with self.counts.waiting(True):
            while len(self._waiting) > num_waiting:
                self._waiting.pop(0).wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unreported:
    """A save that is not reported to Ray yet."""

    step: int
    metrics: dict[str, Any]
    """Its metrics, at the time of the call."""
    validation: Any
    saved: PendingSave | Checkpoint | str
    """Only the attempt for one that is on the nodes: a checkpoint would hold its manifest."""

    def shortened(self) -> _Unreported:
        """Return it without references that are no longer needed."""
        saved = self.saved
        if isinstance(saved, PendingSave) and saved.done() and saved.error() is None:
            found = saved.result()
            assert found is not None  # one that was left out is not added
            saved = found
        if isinstance(saved, Checkpoint) and saved.number is None:
            saved = saved.uri.rpartition("/")[2]
        return replace(self, saved=saved)


@dataclass(kw_only=True)
class LateReports:
    """The reports of a store with a fast tier, in one worker: of saves that are complete before they are in the store.

    Ray registers only checkpoints in the store. So a report waits, in the order of the saves, until the outcome of the
    save is known: it is in the store, a newer one took its place there, or it could not be brought there. The leader
    finds that out between two steps of the training; no rank waits for the store. Called from the training thread.
    """

    job: Job
    reports: Reports
    drains: dict[str, Later] = field(default_factory=dict)
    """On the leader, maps attempts to their drains. Added by the thread of the save."""
    _waiting: list[_Unreported] = field(default_factory=list)

    def add(
        self, step: int, metrics: Mapping[str, Any] | None, validation: Any, saved: PendingSave | Checkpoint
    ) -> None:
        """Add a save that was made, or begun. All ranks add the same, and call `send` afterwards."""
        ranked = self.reports.ranked(step, metrics)
        self._waiting.append(_Unreported(step=step, metrics=ranked, validation=validation, saved=saved))

    def send(self, *, is_last: bool = False) -> None:
        """Report the saves with a known outcome, and with `is_last` the others too. Collective."""

        def look() -> list[Any]:
            found: list[Any] = []
            for save in self._waiting:
                outcome = self._outcome(save)
                if outcome is None and not is_last:
                    break
                found.append({"error": _NOT_KNOWN} if outcome is None else outcome)
            return found

        self._waiting = [save.shortened() for save in self._waiting]
        with self.job.group.meeting("reports") as meeting:
            outcomes = meeting.tell(look)
        known, self._waiting = self._waiting[: len(outcomes)], self._waiting[len(outcomes) :]
        for save, outcome in zip(known, outcomes, strict=True):
            if "record" in outcome:
                number, text = outcome["record"]
                checkpoint = Checkpoint(files_of(self.job, Record.decode(text.encode(), number)))
                self.reports.stored(checkpoint, save.metrics, validation=save.validation)
                continue
            if "error" in outcome:
                self.reports.counts.failed_saves += 1
            self.reports.alone({**save.metrics, **{f"ckptstore_{name}": text for name, text in outcome.items()}})
        if is_last:
            self.reports.settle()

    def _outcome(self, save: _Unreported) -> dict[str, Any] | None:
        """Return the outcome of a save, on the leader; None if it is not known yet.

        It is a dict of a record, of an error, or of the step that took its place.
        """
        saved = save.shortened().saved
        if isinstance(saved, PendingSave):
            return {"error": str(saved.error())} if saved.done() else None
        if isinstance(saved, Checkpoint):  # it went to the store: the disk of a node was full
            assert saved.number is not None  # of what is in the store
            return _record_fields(self.job.log.records([saved.number])[0])
        drain = self.drains[saved]
        if not drain.done():
            return None
        del self.drains[saved]
        if (failed := drain.error()) is not None:
            return {"error": str(failed)}
        newer = drain.superseded_by
        return _record_fields(drain.result(0.0)) if newer is None else {"superseded_by_step": newer.entry.step}


def _record_fields(record: Record) -> dict[str, Any]:
    return {"record": [record.number, record.encode().decode()]}
