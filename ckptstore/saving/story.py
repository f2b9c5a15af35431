"""The story of a save, top to bottom: whatever is saved, and whoever keeps it.

what each rank has → the leader decides → each rank stores → the leader publishes → all hear
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ckptstore.errors import CkptstoreError, InvalidInput, InvalidStep
from ckptstore.events import SaveFailed, emit
from ckptstore.format.layout import Attempt, known_step
from ckptstore.format.manifest import Kind
from ckptstore.group import Group
from ckptstore.runtime import tracing
from ckptstore.runtime.beat import Beat, beat
from ckptstore.saving.phases import SaveClock, longest_seconds
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents, Decision, Shard
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.retry import hurried
from ckptstore.storage.traffic import counted_twice

logger = logging.getLogger("ckptstore")

Kept = TypeVar("Kept")
"""What a keeper returns of a checkpoint that it keeps."""


class Keeper(Protocol[Kept]):
    """Who keeps checkpoints: the log of a store (`log_keeper`), or Ray."""

    @property
    def storage(self) -> Storage:
        """Where the checkpoints lie."""

    @property
    def store_uri(self) -> str:
        """What events call the store, without secrets."""

    @property
    def is_fast(self) -> bool:
        """Whether what it keeps lies on the disks of nodes."""

    @property
    def rank(self) -> int:
        """What events call this process."""

    def begin(self, request: Request, decision: Decision, beat: Beat) -> Mapping[str, Any]:
        """Leader: own the place, make sure that there is room, name the attempt. What all ranks hear of it, as JSON."""

    def attempt(self, request: Request, begun: Mapping[str, Any]) -> Attempt:
        """Any rank: the attempt that the leader has begun."""

    def lane(self, attempt: Attempt) -> str:
        """The name of the lane in which the ranks of this attempt meet. No other attempt has it."""

    def publish(self, request: Request, attempt: Attempt, contents: Contents, beat: Beat) -> Any:
        """Leader: make the checkpoint visible, whole. An error says by `committed` whether it is."""

    def outcome(self, lane: Group, attempt: Attempt, published: Any) -> Kept:
        """Any rank: what `publish` returned, read. All ranks that heard of it call this, and may meet in the lane."""

    def find(self, attempt: Attempt) -> Kept | None:
        """The checkpoint, for a rank that did not hear the leader; None if it is not there (yet), or cannot be read."""

    def discard(self, attempt: Attempt) -> None:
        """Any rank, after the leader's verdict that it never will be committed: remove what is this rank's to remove.
        Best effort; what others still write is garbage."""

    def committed(self, kept: Kept, *, seconds: float, slowest: Sequence[Any]) -> None:
        """Any rank: the save has ended well. `slowest` is the rank that took longest to store its files, and by how
        many seconds; empty with one rank, and where it is not known."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A save on which all ranks have agreed, before any byte has moved."""

    request: Request
    attempt: Attempt
    lane: Group
    """Where the ranks meet for this attempt and no other: who missed the agreement cannot be mistaken there."""
    clock: SaveClock


def begin_elsewhere(begun: Begun, keeper: Keeper[Any]) -> Begun:
    """Begin anew with another keeper, after `finish` has failed on all ranks: what they agreed on holds. Collective, on
    any thread."""
    request = begun.request
    lane = begun.lane.lane(f"{begun.attempt} elsewhere")
    try:
        with lane.meeting("save", step=request.step) as meeting:
            told = meeting.tell(lambda: dict(keeper.begin(request, Decision(b"", 0), beat)))
    finally:
        lane.close()
    attempt = keeper.attempt(request, told)
    return Begun(request, attempt, lane.lane(keeper.lane(attempt)), begun.clock)


def save(group: Group, keeper: Keeper[Kept], shard: Shard, request: Request, *, clock: SaveClock | None = None) -> Kept:
    """Save the shards of all ranks as one checkpoint. Collective. The clock was started by the call.

    Any error on any rank before the commit is raised on all ranks, and the leader removes what was written.
    """
    return finish(keeper, shard, begin(group, keeper, shard, request, clock=clock))


def begin(
    group: Group, keeper: Keeper[Any], shard: Shard, request: Request, *, clock: SaveClock | None = None
) -> Begun:
    """The first meeting, before any byte moves. Collective."""
    clock = clock or SaveClock()
    clock.asked(step=request.step, rank=keeper.rank)

    def agree(decision: Decision, beat: Beat) -> Mapping[str, Any]:
        begun = keeper.begin(request, decision, beat)
        return {**begun, **tracing.told(lambda: clock.traced(str(keeper.attempt(request, begun))))}

    with clock.part(keeper.store_uri, is_fast=keeper.is_fast, is_last=False):
        begun = meet(group, "save", shard, request, agree)
        attempt = keeper.attempt(request, begun)
        tracing.hear(begun, lambda: clock.traced(str(attempt)))
        lane = group.lane(keeper.lane(attempt))
        clock.agreed(str(attempt), step=request.step, rank=keeper.rank)
        return Begun(request, attempt, lane, clock)


def finish(keeper: Keeper[Kept], shard: Shard, begun: Begun) -> Kept:
    """All of a save after the first meeting. Collective, on any thread.

    Every rank stores its files; when all have, the leader publishes. A rank that does not hear what became of it looks
    once. Only the leader removes files, and only after its own verdict.
    """
    with begun.clock.part(keeper.store_uri, is_fast=keeper.is_fast, is_last=True):
        return _finish(keeper, shard, begun)


def _finish(keeper: Keeper[Kept], shard: Shard, begun: Begun) -> Kept:
    request, attempt, lane, clock = begun.request, begun.attempt, begun.lane, begun.clock

    def publish() -> Any:
        reports, stored = zip(*answers, strict=True)
        contents = shard.join(attempt, stored, beat)._replace(timings=lambda: clock.timings(reports))
        published = keeper.publish(request, attempt, contents, beat)
        uploads = [report["seconds"]["upload"] for report in reports]
        return {"slowest": _slowest(uploads), "longest_seconds": longest_seconds(reports)}, published

    told: Mapping[str, Any] = {}
    try:
        with lane.meeting("receipts") as meeting:
            with counted_twice() as traffic:
                stored = shard.store(attempt, beat)
            clock.ended("upload")
            answers = meeting.gather((clock.report(traffic, node=lane.node), stored))
            told, published = meeting.tell(publish)
        kept = keeper.outcome(lane, attempt, published)
    except CkptstoreError as error:
        with hurried():  # ranks that have raised it may wait for this one
            found = keeper.find(attempt) if error.committed is None else None
            if found is None:
                error.at(step=request.step)
                emit(SaveFailed(step=request.step, rank=keeper.rank, error=str(error)))
                if error.committed is False:
                    keeper.discard(attempt)
                raise
        logger.warning("step %d is committed, though this rank did not hear of it: %s", request.step, error)
        kept = found
    finally:
        lane.close()
    clock.met(told.get("longest_seconds"))
    keeper.committed(kept, seconds=clock.elapsed_seconds, slowest=told.get("slowest", ()))
    return kept


def meet(
    group: Group,
    tag: str,
    shard: Shard,
    request: Request,
    agree: Callable[[Decision, Beat], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Who has what, and who writes what: one meeting, more when the leader has to know more. Collective.

    The leader calls `agree` with what the shards have decided; all ranks get what it returns.
    """

    def decide(offers: Sequence[Any]) -> Any:
        heads, descriptions = zip(*offers, strict=True)
        _check_same_request(heads)
        decision = shard.decide(descriptions)
        return None if decision.size_bytes is None else dict(agree(decision, beat)), decision.told

    while True:
        try:
            with group.meeting(tag, step=request.step) as meeting:
                asked = {"step": request.step, "options": dict(request.options)}
                offers = meeting.gather((asked, shard.describe()))
                agreed, told = meeting.tell(lambda: decide(offers))  # noqa: B023 - called at once
        except CkptstoreError as error:
            error.at(step=request.step)
            raise
        shard.hear(told)
        if agreed is not None:
            return dict(agreed)


def checked(group: Group, *, kind: Kind, step: Any, **asked: Any) -> Request:
    """What the caller of a save asks for, checked. Raises what is wrong with it, on all ranks. Collective where so."""
    try:
        return Request.of(kind=kind, step=step, **asked)
    except Exception:
        with group.meeting("save", step=known_step(step)):
            raise


def _check_same_request(heads: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidStep or InvalidInput unless all ranks ask for the same."""
    first = heads[0]
    for rank, head in enumerate(heads):
        if head["step"] != first["step"]:
            raise InvalidStep(f"rank {rank} saves step {head['step']}, rank 0 step {first['step']}", ranks=(0, rank))
        if head["options"] != first["options"]:
            raise InvalidInput(
                f"rank {rank} asks for {head['options']}, rank 0 for {first['options']}", ranks=(0, rank)
            )


def _slowest(seconds: Sequence[float]) -> list[Any]:
    """The rank that took longest, and how much longer than the one in the middle; nothing for one rank."""
    if len(seconds) == 1:
        return []
    rank = max(range(len(seconds)), key=lambda number: seconds[number])
    return [rank, seconds[rank] - sorted(seconds)[(len(seconds) - 1) // 2]]


def remove_files(storage: Storage, attempt: Attempt) -> None:
    """Leader, after its verdict "not committed": nothing will ever refer to the attempt. Best effort."""
    try:
        storage.delete([file.key for file in storage.list(attempt.prefix)])
        if isinstance(storage, Disk):
            storage.remove_directories(attempt.prefix.rstrip("/"))
    except CkptstoreError as error:
        logger.warning("what step %d left could not be removed: %s", attempt.step, error)
