"""One attempt at a checkpoint, from the agreement of the ranks to the verdict, for any kind of shard and publisher.

each rank describes → the leader decides → each rank stores → the leader publishes → all learn the outcome
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ckptstore.errors import CkptstoreError
from ckptstore.events import SaveFailed, emit
from ckptstore.format.layout import Attempt, known_step
from ckptstore.format.manifest import Kind
from ckptstore.group import Group
from ckptstore.runtime import tracing
from ckptstore.saving.phases import SaveClock, longest_seconds
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents, Decision, Plan, Shard
from ckptstore.storage.base import Storage
from ckptstore.storage.retry import hurried
from ckptstore.storage.traffic import counting

logger = logging.getLogger("ckptstore")

Published = TypeVar("Published", covariant=True)
"""The proof that a publisher makes of a checkpoint: a record, a certificate."""


class Ended(NamedTuple):
    """The timing of a save that has succeeded."""

    seconds: float
    slowest: Mapping[str, Any] = {}
    """The fields of an event on the rank that took longest to store its files; empty with one rank, or if unknown."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The place of the files of a checkpoint, and the rank that removes them after the verdict "not committed"."""

    storage: Storage
    store_uri: str
    """The URI of the store for events, without secrets."""
    rank: int
    """The rank of this process for events."""
    removes: bool
    """True on the one rank of all, or of a node, that removes files."""
    is_fast: bool = False
    """True for the disks of nodes."""


class Publisher(Protocol[Published]):
    """The part that makes checkpoints visible: the log of a store, certificates on the disks of nodes, Ray."""

    @property
    def destination(self) -> Destination:
        """The place of the files."""

    def begin(self, request: Request, decision: Decision) -> Mapping[str, Any]:
        """Leader: take ownership of the place, check that there is room, and name the attempt.

        Return the argument of `join`, as JSON.
        """

    def join(self, request: Request, begun: Mapping[str, Any]) -> Attempt:
        """Any rank: return the attempt that the leader has begun."""

    def publish(self, request: Request, attempt: Attempt, contents: Contents) -> Any:
        """Leader: make the whole checkpoint visible. `committed` of an error says if it is visible all the same."""

    def outcome(
        self, lane: Group, attempt: Attempt, published: Any, end: Callable[[], Ended]
    ) -> Published | CkptstoreError | None:
        """Any rank: read the result of `publish`, call `end`, and emit the event of a successful save. Return the error
        if the checkpoint cannot exist after all; one that is raised says nothing of that.

        All ranks that received the leader's result call this, and may meet in the lane. On a rank that did not receive
        it, `published` is None: that rank looks for the checkpoint alone, and returns None if it does not exist (yet)
        or cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Transaction(Generic[Published]):
    """An attempt on which all ranks have agreed, before any byte moved. It leaves nothing unless it is published."""

    publisher: Publisher[Published]
    request: Request
    """The request of this rank; on the leader with the metrics and metadata of all ranks."""
    attempt: Attempt
    lane: Group
    """The lane of this attempt alone, so that a rank that missed the agreement cannot be mistaken for one of another.
    """
    clock: SaveClock

    @staticmethod
    def begin(
        group: Group,
        publisher: Publisher[Published],
        shard: Shard,
        request: Request,
        *,
        clock: SaveClock | None = None,
    ) -> Transaction[Published]:
        """Let the ranks agree on an attempt. Collective. `clock` was started by the call of the save."""
        clock, destination = clock or SaveClock(), publisher.destination
        clock.asked(step=request.step, rank=destination.rank)

        joined = request  # on the leader, which publishes, that of all ranks

        def agree(request: Request, decision: Decision) -> Mapping[str, Any]:
            nonlocal joined
            joined = request
            request.warn_of_unlike(destination.store_uri)
            begun = publisher.begin(request, decision)
            return {**begun, **tracing.told(lambda: clock.traced(str(publisher.join(request, begun))))}

        with clock.part(destination.store_uri, is_fast=destination.is_fast, is_last=False):
            begun = meet(group, "save", shard, request, agree)
            attempt = publisher.join(request, begun)
            tracing.hear(begun, lambda: clock.traced(str(attempt)))
            # Messages of an attempt that failed on some ranks may still be on their way: none counts for the next.
            lane = group.lane(attempt.lane)
            clock.agreed(str(attempt), step=request.step, rank=destination.rank)
            return Transaction(publisher, joined, attempt, lane, clock)

    def elsewhere(self, publisher: Publisher[Any]) -> Transaction[Any]:
        """Begin again with another publisher, after `finish` has failed on all ranks; their agreement still holds.
        Collective, on any thread."""
        request = self.request
        # The first lane has ended on each rank at another message.
        lane = self.lane.lane(f"{self.attempt} elsewhere")
        with closing(lane), lane.meeting("save", step=request.step) as meeting:
            begun = meeting.tell(lambda: publisher.begin(request, Decision(None, 0)))
        attempt = publisher.join(request, begun)
        return Transaction(publisher, request, attempt, lane.lane(attempt.lane), self.clock)

    def finish(self, shard: Shard) -> Published:
        """Store the files of all ranks, and publish them. Collective, on any thread.

        An error on any rank before the commit is raised on all ranks, and the written files are removed, by the leader
        alone and only after its own verdict. A rank that does not learn the outcome looks for the checkpoint once.
        """
        clock, destination, timing = self.clock, self.publisher.destination, dict[str, Any]()
        ending = clock.part(destination.store_uri, is_fast=destination.is_fast, is_last=True)
        with ending, closing(self.lane):
            try:
                with self.lane.meeting("receipts") as meeting:
                    with counting(twice=True) as traffic:
                        plan = shard.plan()
                        stored = plan.store(self.attempt)
                    clock.ended("upload")
                    answers = meeting.gather((clock.report(traffic, node=self.lane.node), stored))
                    timing, published = meeting.tell(partial(self._publish, plan, answers))
                found = self._outcome(published, **timing)
            except CkptstoreError as error:
                return self._found(error, **timing)
            assert found is not None  # it was published
            return found

    def _publish(self, plan: Plan, answers: Sequence[Any]) -> Any:
        reports, stored = zip(*answers, strict=True)
        contents = plan.join(self.attempt, stored)._replace(
            timings=lambda: self.clock.timings(reports), num_hosts=len({report["node"] for report in reports})
        )
        published = self.publisher.publish(self.request, self.attempt, contents)
        uploads = [report["seconds"]["upload"] for report in reports]
        return {"slowest": _slowest(uploads), "longest_seconds": longest_seconds(reports)}, published

    def _outcome(self, published: Any, **timing: Any) -> Published | None:
        """Return the outcome, as the publisher reads it. An error is one of a checkpoint that exists, if it is known to
        be published."""
        try:
            found = self.publisher.outcome(self.lane, self.attempt, published, lambda: self._end(**timing))
        except CkptstoreError as error:
            if error.committed is False:  # as by default; its files must stay
                error.committed = None if published is None else True
            raise
        if isinstance(found, CkptstoreError):
            raise found
        return found

    def _end(self, slowest: Mapping[str, Any] = {}, longest_seconds: float | None = None) -> Ended:
        self.clock.met(longest_seconds)
        return Ended(self.clock.elapsed_seconds, slowest)

    def _found(self, error: CkptstoreError, **timing: Any) -> Published:
        """Return the checkpoint if it was published despite the error; else remove the written files and raise it."""
        destination, step = self.publisher.destination, self.request.step
        if error.committed is None:
            with hurried():  # other ranks, which have raised the error, may be waiting for this one
                found = self._outcome(None, **timing)
            if found is not None:
                logger.warning("step %d is committed, though this rank did not hear of it: %s", step, error)
                return found
        error.at(step=step)
        emit(SaveFailed(step=step, rank=destination.rank, error=str(error)))
        # With `committed` None the record may exist: its files stay, and become garbage for `gc` if it does not.
        if error.committed is False and destination.removes:
            with hurried():
                remove_files(destination.storage, self.attempt)
        raise error

    def close(self) -> None:
        """Give up without `finish`."""
        self.lane.close()


def save(
    group: Group, publisher: Publisher[Published], shard: Shard, request: Request, *, clock: SaveClock | None = None
) -> Published:
    """Save the shards of all ranks as one checkpoint. Collective. `clock` was started by the call."""
    return Transaction.begin(group, publisher, shard, request, clock=clock).finish(shard)


def meet(
    group: Group, tag: str, shard: Shard, request: Request, agree: Callable[[Request, Decision], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Let the leader decide who writes what, in one meeting, or in more if it needs more details. Collective.

    The leader calls `agree` with the joined request of all ranks and the decision of its shard; the result is returned
    on all ranks.
    """

    def decide(offers: Sequence[Any]) -> Any:
        requests, descriptions = zip(*offers, strict=True)
        joined = request.joined(requests)
        decision = shard.decide(descriptions)
        return None if decision.size_bytes is None else dict(agree(joined, decision)), decision.told

    while True:
        try:
            with group.meeting(tag, step=request.step) as meeting:
                offers = meeting.gather((request.offer(), shard.describe()))
                agreed, told = meeting.tell(lambda: decide(offers))  # noqa: B023 - called at once
        except CkptstoreError as error:
            error.at(step=request.step)
            raise
        shard.hear(told)
        if agreed is not None:
            return dict(agreed)


def checked(group: Group, *, kind: Kind, step: Any, **options: Any) -> Request:
    """Return the checked request of a save. If it is bad, raise its error on all ranks; only then collective."""
    try:
        return Request.of(kind=kind, step=step, **options)
    except Exception:
        with group.meeting("save", step=known_step(step)):
            raise


def _slowest(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the fields of an event on the rank that took longest, above the median; none for one rank."""
    if len(seconds) == 1:
        return {}
    rank = max(range(len(seconds)), key=lambda number: seconds[number])
    return {"slowest_rank": rank, "slowest_by_seconds": seconds[rank] - sorted(seconds)[(len(seconds) - 1) // 2]}


def remove_files(storage: Storage, attempt: Attempt) -> None:
    """Remove all files of an attempt after the leader's verdict "not committed": nothing will ever refer to it.

    Best effort: files that other ranks still write become garbage.
    """
    try:
        storage.delete([file.key for file in storage.list(attempt.prefix)])
        storage.remove_directories(attempt.prefix.rstrip("/"))
    except CkptstoreError as error:
        logger.warning("what step %d left could not be removed: %s", attempt.step, error)
