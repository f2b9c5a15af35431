"""The rounds in which the ranks bring one fast checkpoint after another into the store.

what each rank has → the leader chooses → each rank sends its own files → the leader commits → all hear

This is the save story once more, with files that are on the disks of the nodes, and a manifest that was made when the
fast checkpoint was certified. When the store does not answer, all ranks wait and begin at the top: by then a newer
checkpoint may be there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, RankTimeout, StoreFenced
from ckptstore.events import DrainEnded, DrainFailed, DrainRecovered, DrainStalled, DrainStarted, emit
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.drain.book import Book, Drain, choose, given_up
from ckptstore.fast.drain.own_files import OwnFiles
from ckptstore.fast.nodes.fast_place import FastPlace
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.group import Group
from ckptstore.job import Job
from ckptstore.runtime.beat import beat
from ckptstore.saving.commit import commit_prepared, covering, tell
from ckptstore.saving.log_publisher import prune_behind
from ckptstore.saving.transaction import remove_files
from ckptstore.storage.retry import hurried
from ckptstore.transfer import Transfer
from ckptstore.transfer.paced import Pacer

logger = logging.getLogger("ckptstore")

_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 10.0
"""One rank that waits keeps another one from closing its store for so long."""
_TICK_SECONDS = 0.5


class Rounds:
    """What one process does in them, on a thread that does nothing else."""

    def __init__(self, job: Job, place: FastPlace, book: Book) -> None:
        self._job, self._place, self._book = job, place, book
        self._rank = place.members.rank
        self._transfer = Transfer(job.storage, config=job.config.transfer, retry=job.config.retry, rank=self._rank)
        rate = place.tier.drain_bytes_per_second
        self._pacer = None if rate is None else Pacer(rate / len(place.members.ranks_of(place.members.node)))
        self.stopped = threading.Event()
        """Set by whoever wants them to end: what is active is given up."""
        self._is_last_try = False
        """Whether a store that is away is not waited for any more."""
        self._files: tuple[Drain, OwnFiles, float] | None = None
        """What was begun last, with the moment when it was."""
        self._failures = 0
        """How often the store has failed in a row."""
        self._retry_at = 0.0
        self.away_since: float | None = None
        """When the store failed first, if it has not answered since."""
        self.error: CkptstoreError | None = None
        """What it failed with last."""
        self.durable: tuple[Record, float] | None = None
        """What became durable last, and when."""

    def hurry(self, *, is_last_try: bool) -> None:
        """The job ends: a store that is away is tried at once, and with `is_last_try` not once more."""
        self._is_last_try, self._failures, self._retry_at = is_last_try, 0, 0.0

    def close(self) -> None:
        """Give threads and buffers back."""
        self._transfer.close()

    def _check(self) -> None:
        if self.stopped.is_set():
            raise given_up(f"rank {self._rank} closed its store before")

    def round(self, lane: Group) -> None:
        """The ranks agree on what is drained now, and drain it."""
        active = [drain.save_number for drain in self._book.all_active()]
        has_met = False

        try:
            with lane.meeting("next") as meeting:
                has_met = True
                offer = self._offer()
                active = offer["active"]
                offers = meeting.gather(offer)
                choice = meeting.tell(lambda: self._choice(offers))
        except CkptstoreError as error:
            if not has_met:  # the others cannot even be asked, and that may be said without any delay
                self.stopped.wait(_TICK_SECONDS)
            if isinstance(error, RankTimeout) and self._rank in error.ranks and not self.stopped.is_set():
                return  # this rank came late, and was given up: the others may come again
            drains = [drain for drain in self._book.all_active() if drain.save_number in active]
            self._failed(drains, error)
            return
        drain = self._book.hear(choice)
        if drain is not None:
            self._drain(lane, drain, is_over=choice["is_over"])

    def _offer(self) -> dict[str, Any]:
        """Wait until the store may be tried again, and return what this rank can drain."""
        while (left_seconds := self._retry_at - time.monotonic()) > 0 and not self.stopped.is_set():
            beat()
            self.stopped.wait(min(left_seconds, _TICK_SECONDS))
        self._check()
        begun = self._files
        has_sent = begun is not None and begun[1].has_sent and begun[0].is_active
        return self._book.told(begun[0].save_number if begun is not None and has_sent else 0)

    def _choice(self, offers: Sequence[Any]) -> dict[str, Any]:
        job, choice = self._job, choose(offers)
        with hurried():
            newest = job.claim(job.log.newest())  # before any byte moves for a job that is fenced
        return {**choice, "is_over": newest.state.save_number >= choice["go"] > 0}

    def _drain(self, lane: Group, drain: Drain, *, is_over: bool) -> None:
        """Send the files of this rank, and hear what became of the checkpoint. With `is_over` it, or a newer one, is
        committed already."""
        job, certificate = self._job, drain.certificate
        assert certificate is not None  # the ranks have just agreed on it, and what is begun is not dropped
        files, number = self._begun(drain, certificate), drain.save_number

        def publish() -> Any:
            with hurried():
                if is_over:
                    record = covering(job, number, step=drain.step)
                else:
                    manifest, data = certificate.manifest, certificate.manifest_data
                    record = commit_prepared(job, manifest, data, save_number=number)
            return record.number, record.encode()

        try:
            with lane.meeting(f"drain {drain.attempt}") as meeting:
                self._check()
                if not is_over:
                    files.send(job.storage, self._transfer, pacer=self._pacer, check=self._check)
                record_number, data = meeting.tell(publish)
            record = Record.decode(data, record_number)
        except CkptstoreError as error:
            drain.may_be_committed |= error.committed is not False
            self._failed([drain], error)
        else:
            self._ended(drain, record)

    def _begun(self, drain: Drain, certificate: Certificate) -> OwnFiles:
        if self._files is None or self._files[0] is not drain:
            files = OwnFiles(self._place, certificate)
            self._files = drain, files, time.monotonic()
            emit(
                DrainStarted(
                    step=drain.step,
                    attempt=drain.attempt,
                    rank=self._rank,
                    num_files=files.num_files,
                    size_bytes=files.size_bytes,
                    store=self._job.storage.uri,
                )
            )
        return self._files[1]

    # How it ends

    def _ended(self, drain: Drain, record: Record) -> None:
        """It is durable, or a newer one is."""
        assert self._files is not None  # it was begun
        _, files, began = self._files
        self._files, now = None, time.monotonic()
        seconds = now - began
        place = self._named(drain)
        is_superseded = record.entry.attempt != drain.attempt
        if is_superseded:
            self._discard(drain)
        else:
            tell(record, self._job.storage, rank=self._rank, seconds=seconds)
            if self._job.is_leader:
                prune_behind(self._job)
        if self.away_since is not None:
            emit(DrainRecovered(**place, seconds=now - self.away_since))
        self._failures, self.away_since, self.error = 0, None, None
        self.durable = record, now
        size_bytes = files.sent_bytes
        emit(
            DrainEnded(
                **place, number=record.number, is_superseded=is_superseded, size_bytes=size_bytes, seconds=seconds
            )
        )
        self._book.settle(record)

    def _named(self, drain: Drain) -> dict[str, Any]:
        """What every event says of a drain."""
        store = self._job.storage.uri
        return {"step": drain.step, "attempt": drain.attempt, "rank": self._rank, "store": store}

    def _failed(self, drains: Collection[Drain], error: CkptstoreError) -> None:
        """These were not drained, as far as is known. When the store may answer later, all ranks try again."""
        if self._look(drains):
            return
        if error.retryable and not self._is_last_try and not self.stopped.is_set():
            wait_seconds = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(self._failures, 10))
            self._failures += 1
            self.error, self._retry_at = error, time.monotonic() + wait_seconds
            logger.debug("the store is tried again in %g s: %s", wait_seconds, error)
            if self.away_since is None:
                self.away_since = time.monotonic()
                for drain in list(drains)[-1:]:
                    emit(DrainStalled(**self._named(drain), error=str(error)))
            return
        if error.retryable and self.stopped.is_set():  # it would have been tried again, had there been time
            failure = given_up(f"the store was closed before it answered: {error.message}")
            failure.__cause__, failure.committed = error, error.committed
            error = failure
        self.fail(drains, error)

    def _look(self, drains: Collection[Drain]) -> bool:
        """Whether one has a record after all, though this rank was not told so."""
        for drain in drains:
            attempt = Attempt.parse(drain.attempt)
            if drain.may_be_committed and attempt is not None:
                with hurried():
                    record = self._job.log.commit_of(attempt)
                if record is not None:
                    self._ended(drain, record)
                    return True
        return False

    def fail(self, drains: Collection[Drain], error: CkptstoreError) -> None:
        """These do not become durable."""
        for drain in drains:
            emit(DrainFailed(**self._named(drain), error=str(error)))
            drain.may_be_committed |= drain.is_begun and error.committed is not False
            error.committed = None if drain.may_be_committed else error.committed
            if not isinstance(error, StoreFenced):  # a job that is fenced removes nothing
                self._discard(drain)
        if isinstance(error, StoreFenced):
            self._job.is_fenced = True
            self._book.end(error)
        self._book.fail([drain.save_number for drain in drains], error)
        self._files = None

    def _discard(self, drain: Drain) -> None:
        """Leader: remove what the ranks have sent in vain. At the end of a job that is left to `gc`."""
        attempt = Attempt.parse(drain.attempt)
        is_mine = self._rank == 0 and drain.is_begun and not drain.may_be_committed and not self.stopped.is_set()
        if is_mine and attempt is not None:
            with hurried():
                remove_files(self._job.storage, attempt)
