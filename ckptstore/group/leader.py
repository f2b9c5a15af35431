"""Meetings from the view of the leader."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from ckptstore.errors import CkptstoreError, RankFailed, RankTimeout, from_wire, to_wire
from ckptstore.group.base import LEADER
from ckptstore.group.board import Seat
from ckptstore.group.lane import Attended, Fault, Lane, Lanes
from ckptstore.group.meeting import pack, unpack
from ckptstore.group.message import Message, first_error


class LeaderLane(Lane):
    """See `Lane`."""

    def __init__(self, seat: Seat, name: str, lanes: Lanes) -> None:
        super().__init__(seat, name, lanes)
        self._own_error: Mapping[str, Any] | None = None
        """The error of the leader's own block in the present meeting."""
        self._posted_calls: list[int] = []
        """The meetings whose messages may be on the board."""
        self._refused: dict[int, dict[int, int]] = {}
        """The number of refused answers of each rank, by meeting."""
        self._met_at: float | None = None
        """The last time at which no rank had given up on the result of the meeting."""

    @contextmanager
    def _attend(self, tag: str) -> Iterator[Attended]:
        self._next_number()
        while self._comes_apart and self._is_past(tag):
            self._next_number()
        with self._beat.at_work():
            with self._owing(tag):
                self._seat.settle()
            yield _Led(self, tag)

    def _next_number(self) -> None:
        self._call += 1
        self._posted_calls.append(self._call)

    def _is_past(self, tag: str) -> bool:
        """Return True, and end the meeting for all ranks, if a rank has given it up in another call than this."""
        with self._owing(tag):
            mark = None if self._name else self._gone()
        if mark is None or (mark.tag == tag and self._order(mark) == 0):
            return False
        ended = self.message(tag, error=self._has_given_up(mark, tag).to_wire())
        self._post_result(replace(ended, step=mark.step), None)
        return True

    @contextmanager
    def _owing(self, tag: str) -> Iterator[None]:
        """If the block raises, owe the others the result of this meeting: that this rank was interrupted."""
        try:
            yield
        except BaseException as error:
            unsaid = RankFailed(f"Rank {LEADER} was interrupted in {tag!r}", rank=LEADER, committed=None)
            self._seat.owe(self._keys.result(self._call), self.message(tag, error=unsaid.to_wire()))
            if isinstance(error, CkptstoreError):
                error.committed = None
            raise

    def collect(self, answer: Message, fault: Fault) -> list[Any]:
        """Return the values of all ranks. If any has failed, post the error for all ranks and raise it."""
        tag, call = answer.tag, self._call
        self._own_error = answer.error
        received: dict[int, Message] = {}
        lost: RankFailed | None = None
        try:
            keys = {rank: self._keys.answer(call, rank) for rank in range(1, self.world_size)}
            lost = self._await(keys, tag, received)
            if lost is None:
                self._forget_calls(received.values(), call)
            answers = {LEADER: answer, **received}
            wire = first_error(answers, lost=lost)
            if wire is None:
                return [unpack(answers[rank].payload) for rank in sorted(answers)]
        except BaseException as error:
            self.tell_error(tag, error)
        missed = lost.ranks if lost is not None else ()
        result = replace(self.message(tag, error={**wire, "committed": False}), missed=missed)
        self._post_result(result, fault)
        raise from_wire({**wire, "committed": False}) from fault

    def _key_after(self, message: Message, rank: int, tag: str) -> str | None:
        if self._own_error is not None:  # it says more than a difference between the calls
            return None
        order = self._order(message) if message.after_failure else 0
        if order > 0 or (order == 0 and message.rejoins and message.tag != tag):
            raise RankFailed(
                f"Rank {rank} has no result of an earlier call and went on: it calls {message.tag!r}, not {tag!r}",
                ranks=(rank,),
                hint="Look at the error that it raised; the ranks meet again at their next call",
            )
        if order < 0:
            return self._refuse(rank, tag)
        return super()._key_after(message, rank, tag)

    def _refuse(self, rank: int, tag: str) -> str:
        """Refuse an answer that is for an earlier call. Return the key of the rank's next answer."""
        refused = self._refused.setdefault(self._call, {})
        tried = refused.get(rank, 0)
        self._seat.post(self._keys.behind(self._call, rank, tried), self.message(tag))
        refused[rank] = tried + 1
        return self._keys.answer(self._call, rank, tried + 1)

    def tell_error(self, tag: str, error: BaseException) -> NoReturn:
        """Post an error of the leader for all ranks, and raise it."""
        unknown = {} if isinstance(error, CkptstoreError) else {"committed": None}
        result = self.message(tag, error={**to_wire(error, rank=LEADER), **unknown})
        self._post_result(result, error)
        if isinstance(error, Exception):
            self._value(result, error)
        raise error

    def tell_value(self, tag: str, payload: bytes) -> Any:
        """Post a value for all ranks, and return it; an error if one of them has given up waiting for it."""
        result = self.message(tag, payload)
        with self._owing(tag):
            gone = self._given_up(tag)
        if gone:
            result = replace(self.message(tag, error=gone.to_wire()), missed=gone.ranks)
        self._post_result(result, None)
        return self._value(result, None)

    def _post_result(self, result: Message, fault: Fault) -> None:
        key = self._keys.result(self._call)
        try:
            self._seat.post(key, result)
        except BaseException as error:
            self._seat.owe(key, result)
            if not isinstance(error, CkptstoreError):
                raise
            if fault is None:  # otherwise the first error says more than this one
                error.committed = None
                raise

    def _given_up(self, tag: str) -> RankFailed | None:
        """Return an error about the rank that has given up on this leader, if it came late; None if none has."""
        # No rank gives up within half the timeout, so the board is not read that often.
        now, half_seconds = time.monotonic(), self.rank_timeout_seconds / 2
        if self._name or (self._met_at is not None and now - self._met_at < half_seconds):
            return None
        mark = self._gone()
        if mark is None:
            self._met_at = now
            return None
        return self._has_given_up(mark, tag)

    def _gone(self) -> Message | None:
        found = self._seat.board.fetch([self._keys.gone(self._call)])
        return Message.decode(next(iter(found.values()))) if found else None

    def _has_given_up(self, mark: Message, tag: str) -> RankTimeout:
        return RankTimeout(
            f"Rank {mark.rank} has given up {tag!r}: it {mark.payload.decode(errors='replace')}",
            ranks=(mark.rank,),
            hint="This rank came late, or its process was stopped; the ranks meet again at their next call",
        )

    def _forget_calls(self, answers: Collection[Message], call: int) -> None:
        """Remove the messages of earlier calls, once all ranks are in the present one."""
        self._seat.board.remove(
            [key for posted in self._posted_calls if posted != call for key in self._keys_of(posted)]
        )
        self._posted_calls = [call]
        self._refused = {posted: counts for posted, counts in self._refused.items() if posted == call}
        if not self._name:
            self._lanes.clear_lanes({name for answer in answers for name in answer.lanes})

    def _keys_of(self, call: int) -> list[str]:
        return self._keys.of_call(call, self._refused.get(call, {}))

    def call_keys(self) -> list[str]:
        return [key for call in self._posted_calls for key in self._keys_of(call)]


class _Led(Attended):
    """See `Meeting` and `Attended`."""

    def __init__(self, lane: LeaderLane, tag: str) -> None:
        self._lane, self._tag = lane, tag
        self._has_gathered = False

    def gather(self, value: Any = None) -> list[Any]:
        return self._collect(self._lane.message(self._tag, pack(value)), None)

    def tell(self, work: Callable[[], Any]) -> Any:
        if not self._has_gathered:
            self.gather()
        try:
            payload = pack(work())
        except BaseException as error:
            self.fail(error)
        self.has_ended = True
        return self._lane.tell_value(self._tag, payload)

    def fail(self, error: BaseException) -> NoReturn:
        if self._has_gathered or not isinstance(error, Exception):
            self.has_ended = True
            self._lane.tell_error(self._tag, error)
        self._collect(self._lane.failure(self._tag, error), error)
        raise error  # not reached: the answer is a failure

    def _collect(self, answer: Message, fault: Fault) -> list[Any]:
        self._has_gathered = self.has_ended = True
        values = self._lane.collect(answer, fault)
        self.has_ended = False
        return values
