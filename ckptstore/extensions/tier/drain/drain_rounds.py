"""The rounds in which the ranks bring one fast checkpoint after another into the store.

each rank reports → the leader chooses → each rank sends its own files → the leader commits → all learn the outcome

The story is that of a save, with files from the disks of the nodes, and the manifest that was made when the fast
checkpoint was certified. When the store does not answer, all ranks wait and begin at the top: by then there may be a
newer checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, RankTimeout, StorageFull, StoreFenced
from ckptstore.events import DrainEnded, DrainFailed, DrainRecovered, DrainStalled, DrainStarted, emit
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.drain.book import Book, Drain, choose, given_up
from ckptstore.extensions.tier.drain.committing import commit_prepared, covering
from ckptstore.extensions.tier.drain.own_files import OwnFiles
from ckptstore.extensions.tier.drain.paced import Pacer
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.group import Group
from ckptstore.job import Job
from ckptstore.runtime.beat import beat
from ckptstore.saving.commit import tell
from ckptstore.saving.log_publisher import making_room, prune_behind
from ckptstore.saving.transaction import remove_files
from ckptstore.storage.retry import hurried
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")

_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 10.0
"""The longest wait for a store; for so long a rank that waits keeps another one from closing its store."""
_TICK_SECONDS = 0.5


class Rounds:
    """The part of one process in the rounds, on a thread that does nothing else."""

    def __init__(self, job: Job, place: FastPlace, book: Book) -> None:
        self._job, self._place, self._book = job, place, book
        self._rank = place.members.rank
        self._transfer = Transfer(job.storage, config=job.config.transfer, retry=job.config.retry, rank=self._rank)
        rate = place.tier.drain_bytes_per_second
        self._pacer = None if rate is None else Pacer(rate / len(place.members.ranks_of(place.members.node)))
        self.stopped = threading.Event()
        """Set to end the rounds: active drains are given up."""
        self._is_last_try = False
        """True if the rounds do not wait for a store that is away."""
        self._files: tuple[Drain, OwnFiles, float] | None = None
        """The drain that was begun last, its files, and the `time.monotonic` of its beginning."""
        self._failures = 0
        """The number of failures of the store in a row."""
        self._retry_at = 0.0
        self.away_since: float | None = None
        """The `time.monotonic` of the first failure of the store; None if it has answered since."""
        self.error: CkptstoreError | None = None
        """The last error of the store; None if it has answered since."""
        self.durable: tuple[Record, float] | None = None
        """The record that became durable last, with the `time.monotonic`."""

    def hurry(self, *, is_last_try: bool) -> None:
        """Try a store that is away at once, for the job ends; with `is_last_try` only once."""
        self._is_last_try, self._failures, self._retry_at = is_last_try, 0, 0.0

    def close(self) -> None:
        """Give threads and buffers back."""
        self._transfer.close()

    def _check(self) -> None:
        if self.stopped.is_set():
            raise given_up(f"rank {self._rank} closed its store before")

    def round(self, lane: Group) -> None:
        """Agree with the other ranks on a fast checkpoint, and drain it."""
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
            if not has_met:  # the others cannot be reached, and that error may come without any delay
                self.stopped.wait(_TICK_SECONDS)
            if isinstance(error, RankTimeout) and self._rank in error.ranks and not self.stopped.is_set():
                return  # this rank was late, and the others gave it up: they may meet again
            drains = [drain for drain in self._book.all_active() if drain.save_number in active]
            self._failed(drains, error)
            return
        drain = self._book.hear(choice)
        if drain is not None:
            self._drain(lane, drain, is_over=choice["is_over"])

    def _offer(self) -> dict[str, Any]:
        """Wait until the store may be tried again, and return the report of this rank."""
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
        """Send the files of this rank, and end the drain with the outcome.

        With `is_over` the checkpoint, or a newer one, is committed already.
        """
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
            return record.to_wire()

        try:
            with making_room(job), lane.meeting(f"drain {drain.attempt}") as meeting:
                self._check()
                if not is_over:
                    files.send(job.storage, self._transfer, pacer=self._pacer, check=self._check)
                record = Record.from_wire(meeting.tell(publish))
        except CkptstoreError as error:
            drain.may_be_committed |= error.committed is not False
            if isinstance(error, StorageFull) and not drain.has_made_room:
                drain.has_made_room = True  # the next round finds the trash empty
            else:
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
        """End a drain with a record: its own, or that of a newer checkpoint."""
        begun, now = self._files, time.monotonic()
        is_own = begun is not None and begun[0] is drain  # else it was found in the log after all
        seconds, size_bytes = (now - begun[2], begun[1].sent_bytes) if begun is not None and is_own else (0.0, 0)
        self._files = None
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
        emit(
            DrainEnded(
                **place, number=record.number, is_superseded=is_superseded, size_bytes=size_bytes, seconds=seconds
            )
        )
        self._book.settle(record)

    def _named(self, drain: Drain) -> dict[str, Any]:
        """Return the fields that every event of a drain has."""
        store = self._job.storage.uri
        return {"step": drain.step, "attempt": drain.attempt, "rank": self._rank, "store": store}

    def _failed(self, drains: Collection[Drain], error: CkptstoreError) -> None:
        """Handle an error of these drains: try again if the store may answer later, else fail them."""
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
        """End the first drain that has a record after all, and return True; False if none has."""
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
        """End these drains with an error."""
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
        """Leader: remove the files of a drain in vain. At the end of a job this is left to `gc`."""
        attempt = Attempt.parse(drain.attempt)
        is_mine = self._rank == 0 and drain.is_begun and not drain.may_be_committed and not self.stopped.is_set()
        if is_mine and attempt is not None:
            with hurried():
                remove_files(self._job.storage, attempt)
