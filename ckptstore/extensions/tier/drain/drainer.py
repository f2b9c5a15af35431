"""The drainer of one process: a thread that, together with those of the other ranks, brings fast checkpoints into the
store, one at a time.

The ranks meet in the lane `drain` of their group, so that saves go on beside it (`drain_rounds`).
"""

from __future__ import annotations

import logging
import threading

from ckptstore.errors import InvalidInput, RankFailed
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.drain.book import Book, Drain, given_up
from ckptstore.extensions.tier.drain.drain_rounds import Rounds
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.group.message import DRAIN_LANE
from ckptstore.job import Job
from ckptstore.runtime.fork import in_forked_child
from ckptstore.runtime.parallel import started
from ckptstore.saving.health import DrainHealth

logger = logging.getLogger("ckptstore")


class Drainer:
    """Brings fast checkpoints of one job into its store. Each process has one; all offer the same in the same order."""

    def __init__(self, job: Job, place: FastPlace) -> None:
        self._job, self._place = job, place
        self._book = Book(place)
        self._rounds = Rounds(job, place, self._book)
        self._thread: threading.Thread | None = None
        in_forked_child(self, Drainer._after_fork)

    def _after_fork(self) -> None:
        self._book.end_in_child(given_up("this process is a fork, and its parent brings it there"))
        self._rounds, self._thread = Rounds(self._job, self._place, self._book), None

    def offer(self, certificate: Certificate, *, is_due: bool = True) -> Drain:
        """Offer a fast checkpoint of this job that is whole on the nodes; return at once. All ranks offer the same.

        One that is due is drained; older ones that wait give way to it. Others are drained on request. Raises
        InvalidInput for one of another job, and for one that is not newer than the last.
        """
        place = self._place
        if (certificate.order.epoch, certificate.claim_number) != (place.epoch, place.claim_number):
            raise InvalidInput(
                f"The fast checkpoint is {certificate.order}, and this job has epoch {place.epoch}: what a job resumed"
                " from is not its own to drain",
                step=certificate.manifest.step,
            )
        drain = self._book.offer(certificate, is_active=is_due)
        self._start()
        return drain

    def want(self, drain: Drain) -> None:
        """Drain this one, or a newer one, though it is not due: a caller waits for it. Collective unless it is due."""
        self._book.want(drain)
        self._start()

    def drain_newest(self) -> Drain | None:
        """Drain the newest that was offered, due or not; return it at once, ended or not. None if there is none.
        Collective."""
        newest = self._book.want()
        self._start()
        return newest

    def finish(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no drain runs or waits. Return False if the time is over before, or if no thread could start."""
        changed = self._book.changed
        with changed:
            changed.wait_for(lambda: self._thread is None or not self._book.has_active(), timeout_seconds)
            return not self._book.has_active()

    def health(self) -> DrainHealth:
        """Return how far the store is behind."""
        steps = {drain.is_begun: drain.step for drain in self._book.all_active()}
        durable, (behind_since, failure) = self._rounds.durable, self._book.behind()
        error = self._rounds.error or failure
        return DrainHealth(
            draining=steps.get(True),
            waiting=steps.get(False),
            durable_step=None if durable is None else durable[0].entry.step,
            durable_at=None if durable is None else durable[1],
            not_durable_since=behind_since,
            away_since=self._rounds.away_since,
            error=None if error is None else str(error),
        )

    def close(self, timeout_seconds: float | None = None) -> None:
        """Drain the newest within that time, then end. Collective.

        Without a time the drain goes on until the store does not answer. A checkpoint that is not in the store then
        stays on the nodes, and this job never makes it visible in the store. A request or a rank that hangs is waited
        for as long as the configuration says. No thread is left.
        """
        self.drain_newest()
        self._rounds.hurry(is_last_try=timeout_seconds is None)
        self.finish(timeout_seconds)
        with self._book.changed:
            self._rounds.stopped.set()
            self._book.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._book.end(self._book.ended or given_up("the store was closed before"))
        self._rounds.close()

    # The thread

    def _start(self) -> None:
        with self._book.changed:
            if self._thread is None and self._book.has_active() and not self._rounds.stopped.is_set():
                # Nothing is lost when the interpreter ends: the checkpoints are on the disks of the nodes.
                self._thread = started(self._run, name="ckptstore-drain")
                if self._thread is None:
                    logger.warning("no thread can start: fast checkpoints stay on the nodes, and out of the store")

    def _run(self) -> None:
        lane = self._job.group.lane(DRAIN_LANE)
        try:
            while self._has_work():
                try:
                    self._rounds.round(lane)
                except Exception as error:  # a thread that died would leave its drains without an end
                    rank = self._place.members.rank
                    failure = RankFailed(f"{type(error).__name__}: {error}", rank=rank, committed=None)
                    failure.__cause__ = error
                    self._rounds.fail(self._book.all_active(), failure)
        finally:
            lane.close()

    def _has_work(self) -> bool:
        changed = self._book.changed
        with changed:
            changed.wait_for(lambda: self._rounds.stopped.is_set() or self._book.has_active())
            return self._book.has_active()  # if stopped, active drains are given up in a round, with the other ranks
