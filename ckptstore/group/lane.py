"""One order of meetings among the ranks of a board: the common part of the leader and the other ranks.

A meeting with number n:

    every rank   posts its value, or the error of its block, as n.<rank>     follower.py
    the leader   reads the answers as they come, watches for signs of life, makes the result, posts n.result  leader.py
    every rank   waits for n.result and watches the leader

A rank's answer to n + 1 proves that it no longer needs the messages of n, so the leader removes them then.

The leader's number counts. A rank without a result of its last meeting (it gave up, or the leader gave it up) looks for
the first number without a result and continues with that; its answer says so, and so does the result of a meeting that
the leader ended without it. A rank that gives up on the leader posts n.gone: a leader that comes late to n ends it
then. A leader that could not post a result posts it before its next meeting.

If ranks have come apart, the steps decide which of two calls is the later one. When steps differ for the first time,
all ranks fail, since it may be a mistake of the caller. After a failure, the call with the lower step fails, and the
one with the higher step waits for the others:

    an answer of a lower step    the leader posts n.<rank>.behind, and waits for the next answer, n.<rank>.1
    an answer of a higher step   the leader ends n without it; that rank answers again in n + 1
    a result of a lower step     the rank answers again in n + 1
    n.gone of another call       the leader ends n for any rank that still waits for it, and goes on to n + 1
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

from ckptstore.errors import CkptstoreError, InvalidInput, RankFailed, RankTimeout, from_wire, to_wire
from ckptstore.group.base import LEADER, Group
from ckptstore.group.board import Seat, Seated
from ckptstore.group.life import LEFT, Beater, Pace, Watch, beat_interval_seconds
from ckptstore.group.meeting import Meeting, unpack
from ckptstore.group.message import Keys, Message
from ckptstore.runtime.shown import show_ranks

logger = logging.getLogger("ckptstore")

_FAREWELL_SECONDS = 10.0
_COME_SECONDS = 10.0
"""The time after which the leader names the ranks that have not come to a call."""
_FIRST_MEETINGS = frozenset({"open the group", "probe the root", "save", "find", "resume", "require"})
"""Those with which a call begins. Ranks come late to others because of their work."""
EVERY_RANK = "The ranks have not met yet: every rank must call save, and resume or load, not one rank alone"

Fault = BaseException | None
"""The error of this rank that makes a meeting fail; None if there is none."""


class Attended(Meeting):
    """A meeting in progress."""

    has_ended = False
    """True once the result is posted or received, or can no longer be."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the meeting with an error of the block on this rank, and raise the error that all ranks raise."""


class Lanes(Protocol):
    """The group that owns the lanes."""

    def lane(self, name: str) -> Group:
        """See `Group.lane`."""

    def open_names(self) -> list[str]:
        """Return the names of the lanes that this rank has open, without the main one."""

    def close_lane(self, name: str) -> None:
        """Note that this rank no longer needs the lane."""

    def clear_lanes(self, open_names: Collection[str]) -> None:
        """Leader: remove the messages of closed lanes, except for lanes that other ranks have open: `open_names`."""


class Lane(Seated):
    """One order of meetings; it is a `Group`, with the guarantees described there."""

    def __init__(self, seat: Seat, name: str, lanes: Lanes) -> None:
        super().__init__(seat)
        self.lane = lanes.lane
        self._name, self._lanes = name, lanes
        self._keys = Keys(name, seat.world_size)
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._call = 0
        self._step: int | None = None
        """The step of the present call."""
        self._has_failed = False
        """True if the last meeting raised an error on this rank, or the present one has not succeeded yet."""
        self._comes_apart = False
        """True if the meeting before the present one failed on this rank."""
        self._is_broken = False
        """True once a rank was lost, or an error that is no CkptstoreError was raised."""
        timeout_seconds = seat.rank_timeout_seconds
        self._beat = Beater(
            lambda: seat.board.give_sign(self.life_key),
            interval_seconds=beat_interval_seconds(timeout_seconds),
            patience_seconds=timeout_seconds,
        )

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        return cast("AbstractContextManager[Meeting, None]", self._meeting(tag, step))  # it swallows no exception

    @contextmanager
    def _meeting(self, tag: str, step: int | None) -> Iterator[Meeting]:
        with self._in_turn(step):
            self._seat.take()
            with self._attend(tag) as attended:
                try:
                    yield attended
                except BaseException as error:
                    if attended.has_ended:
                        raise
                    attended.fail(error)
                if not attended.has_ended:
                    attended.tell(lambda: None)

    def _attend(self, tag: str) -> AbstractContextManager[Attended]:
        raise NotImplementedError

    @contextmanager
    def _in_turn(self, step: int | None) -> Iterator[None]:
        if self._holder == threading.get_ident():
            raise RuntimeError("a meeting was begun inside another one of the same lane")
        with self._turn:
            self._holder = threading.get_ident()
            self._step = step
            self._comes_apart, self._has_failed = self._has_failed, True
            self._beat.begin()
            try:
                yield
            except BaseException as error:
                if self._has_failed:  # otherwise the error came after the end of the meeting
                    self._is_broken |= isinstance(error, RankFailed) or not isinstance(error, CkptstoreError)
                raise
            finally:
                self._holder = None

    def message(self, tag: str, payload: bytes = b"", *, error: Mapping[str, Any] | None = None) -> Message:
        """Make a message of this rank in the present call."""
        return replace(self._seat.message(tag, payload, error=error), step=self._step)

    def failure(self, tag: str, error: BaseException) -> Message:
        """Make the message of this rank for an error of its block."""
        return self.message(tag, error=to_wire(error, rank=self.rank))

    def _value(self, result: Message, fault: Fault) -> Any:
        """Return the value of a result, or raise its error because of `fault`."""
        if result.error is not None:
            raise from_wire(dict(result.error)) from fault
        self._has_failed = False
        return unpack(result.payload)

    def _order(self, message: Message) -> int:
        """Return a number below 0 if the message is of a lower step than the present call, above 0 if higher."""
        if message.step is None or self._step is None:
            return 0
        return message.step - self._step

    def _await(
        self, keys: dict[int, str], tag: str, received: dict[int, Message], *, refusal_key: str | None = None
    ) -> RankFailed | None:
        """Wait for the messages of these ranks, or for one at `refusal_key`, which counts as a message of this rank.

        Put the messages into `received`. Return the error about ranks that will not answer; None if all have answered.
        """
        board, watch = self._seat.board, Watch(keys, timeout_seconds=self.rank_timeout_seconds)
        pace = Pace(shortest_seconds=board.shortest_poll_seconds, longest_seconds=board.longest_poll_seconds)
        late_at = time.monotonic() + _COME_SECONDS
        while watch.awaited and self.rank not in received:
            pace.look()
            if watch.due():
                life = {self._keys.life(rank): rank for rank in watch.awaited}
                watch.look({life[key]: sign for key, sign in board.signs(list(life)).items()})
            rank_of = {keys[rank]: rank for rank in watch.awaited} | ({refusal_key: self.rank} if refusal_key else {})
            for key, data in board.fetch(list(rank_of)).items():
                message, rank = Message.decode(data), rank_of[key]
                if message is None:
                    continue
                try:
                    next_key = None if rank == self.rank else self._key_after(message, rank, tag)
                except RankFailed as strayed:
                    return strayed
                if next_key is not None:
                    keys[rank] = next_key
                    continue
                received[rank] = message
                watch.answered(rank)
                pace.progress()
            if lost := self._lost(watch, tag):  # after the fetch: a rank that answered before it died has answered
                return lost
            if watch.awaited and self.rank not in received:
                if self.rank == LEADER and tag in _FIRST_MEETINGS and time.monotonic() > late_at:
                    late_at = math.inf
                    away = list(watch.awaited)
                    come = [rank for rank in range(self.world_size) if rank not in away]
                    said = f"{show_ranks(away)} in {tag!r}; {show_ranks(come)} came"
                    logger.warning("waited %g s for %s. Every rank must make the call", _COME_SECONDS, said)
                if self.rank == LEADER:
                    self._beat()  # the other ranks watch the leader for signs of life
                time.sleep(pace.seconds())
        return None

    def _key_after(self, message: Message, rank: int, tag: str) -> str | None:
        """Return None if this is the awaited message, else the key of the rank's next message.

        Raises InvalidInput if the ranks are in different meetings, RankFailed if that rank is past this one.
        """
        mine, other = self._seat, message
        if message.error is not None and other.world_size == mine.world_size:
            return None  # the error says more than a difference between the calls
        if other.world_size != mine.world_size:
            differs = f"has world size {mine.world_size}", f"world size {other.world_size}"
        elif other.tag != tag:
            differs = f"calls {tag!r}", f"{other.tag!r}"
        else:
            return None
        raise InvalidInput(
            f"The ranks do not do the same: rank {mine.rank} {differs[0]}, rank {other.rank} {differs[1]}",
            rank=other.rank,
            ranks=tuple(sorted((mine.rank, other.rank))),
            hint="Collective calls are made by all ranks, in the same order and with the same step",
        )

    def _lost(self, watch: Watch, tag: str) -> RankFailed | None:
        if left := watch.left():
            return RankFailed(f"{show_ranks(left).capitalize()} left the group before {tag!r}", ranks=left)
        if silent := watch.silent():
            seconds, hint = self.rank_timeout_seconds, self._seat.board.hint
            return RankTimeout(
                f"{show_ranks(silent).capitalize()} gave no sign of life for {seconds:g} s in {tag!r}",
                ranks=silent,
                hint=hint if self._name or self._call > 1 else f"{EVERY_RANK}. {hint}",
            )
        return None

    def close(self) -> None:
        """See `Group.close`. The main lane is closed with its group."""
        if self._name:
            self._lanes.close_lane(self._name)

    def leave(self) -> None:
        """Signal to the others that this rank takes part no longer."""
        self._seat.board.give_sign(self.life_key, last=True)

    def have_all_left(self) -> bool:
        """Wait a few seconds, or less if some ranks may be dead, and return True if every rank has left."""
        board, keys = self._seat.board, self.life_keys()
        patience_seconds = min(self.rank_timeout_seconds, 1.0 if self._is_broken else _FAREWELL_SECONDS)
        until = time.monotonic() + patience_seconds
        pace = Pace(shortest_seconds=board.shortest_poll_seconds, longest_seconds=board.longest_poll_seconds)
        while True:
            pace.look()
            signs = board.signs(keys)
            if all(signs.get(key) is LEFT for key in keys):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(pace.seconds())

    @property
    def life_key(self) -> str:
        """The key of the signs of life of this rank."""
        return self._keys.life(self.rank)

    def life_keys(self) -> list[str]:
        """Return the keys of the signs of life of all ranks."""
        return [self._keys.life(rank) for rank in range(self.world_size)]

    def call_keys(self) -> list[str]:
        """Return the keys of all messages that may be on the board, as far as this rank removes them."""
        return []
