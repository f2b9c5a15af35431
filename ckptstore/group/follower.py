"""Meetings from the view of a rank that is not the leader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from ckptstore.errors import CkptstoreError, RankFailed, StorageUnavailable
from ckptstore.group.base import LEADER
from ckptstore.group.board import Seat
from ckptstore.group.lane import Attended, Fault, Lane, Lanes
from ckptstore.group.meeting import pack
from ckptstore.group.message import Message
from ckptstore.storage.retry import hurried


class FollowerLane(Lane):
    """See `Lane`."""

    def __init__(self, seat: Seat, name: str, lanes: Lanes) -> None:
        super().__init__(seat, name, lanes)
        self._is_behind = False
        """True if this rank has not received a result of its last meeting that includes its answer."""
        self._again = 0
        """The number of answers of this rank that were refused in the present meeting."""
        self._is_refused = False
        """True if the last answer was refused, so that the meeting goes on."""

    @contextmanager
    def _attend(self, tag: str) -> Iterator[Attended]:
        with ExitStack() as at_work:
            at_work.enter_context(self._beat.at_work())
            yield _Followed(self, tag, at_work)

    def follow(self, answer: Message, fault: Fault) -> Any:
        """Post the answer of this rank, and return the leader's value."""
        rejoins, self._is_behind = self._is_behind, True
        comes_apart = rejoins or self._comes_apart
        names = () if self._name else tuple(self._lanes.open_names())
        answer = replace(answer, rejoins=rejoins, after_failure=comes_apart, lanes=names)
        while True:
            self._next_number()
            try:
                if rejoins:
                    self._skip_finished()
                unposted = self._post_answer(answer)
                if fault is not None and not isinstance(fault, Exception):
                    raise fault  # interrupted: the others know, so this process does not wait for the result
                with hurried() if unposted is not None else nullcontext():  # the retries of the post took long enough
                    result = self._result(answer)
            except CkptstoreError as error:
                error.committed = None  # this rank does not know what the leader did
                raise
            is_missed = self.rank in result.missed
            is_past = comes_apart and self._order(result) < 0
            if not is_past and not (rejoins and is_missed):  # otherwise the meeting ended before this rank came
                self._is_behind = is_missed
                return self._value(result, fault or unposted)

    def _next_number(self) -> None:
        """Go to the next meeting, or stay in one where the last answer was refused."""
        if not self._is_refused:
            self._call += 1
            self._again = 0
        self._is_refused = False

    def _skip_finished(self) -> None:
        while self._seat.board.fetch([self._keys.result(self._call)]):
            self._call += 1
            self._again = 0

    def _post_answer(self, answer: Message) -> Fault:
        """Post the answer. Return an error after which it may be on the board: the leader's result shows."""
        try:
            self._seat.post(self._keys.answer(self._call, self.rank, self._again), answer)
        except StorageUnavailable as error:
            return error
        return None

    def _result(self, answer: Message) -> Message:
        """Wait for the leader's result. A rank that gives up leaves a mark for a leader that comes late."""
        tag, refusal_key = answer.tag, None
        if answer.after_failure and answer.step is not None:
            refusal_key = self._keys.behind(self._call, self.rank, self._again)
        received: dict[int, Message] = {}
        try:
            lost = self._await({LEADER: self._keys.result(self._call)}, tag, received, refusal_key=refusal_key)
        except BaseException as error:
            if not isinstance(error, CkptstoreError):
                self._mark_gone(tag, f"was interrupted ({type(error).__name__})")
            raise
        if LEADER in received:
            return received[LEADER]
        if lost is not None:
            self._mark_gone(tag, f"has waited for rank 0 for {self.rank_timeout_seconds:g} s")
            raise lost
        self._again, self._is_refused = self._again + 1, True
        raise RankFailed(
            f"The others are at step {received[self.rank].step}, and this call of rank {self.rank} is for step "
            f"{self._step}",
            ranks=(self.rank,),
            hint="This rank lost its place when an earlier call failed. The others wait for its next call",
        )

    def _mark_gone(self, tag: str, why: str) -> None:
        """Leave a mark that this rank has given up, in the main lane only."""
        # An attempt in any other lane may still be committed later, by the ranks that are alive.
        if not self._name:
            with suppress(CkptstoreError):
                self._seat.board.post(self._keys.gone(self._call), self.message(tag, why.encode()).encode())


class _Followed(Attended):
    """See `Meeting` and `Attended`."""

    def __init__(self, lane: FollowerLane, tag: str, at_work: ExitStack) -> None:
        """`at_work` gives signs of life until this rank only waits for the leader's result."""
        self._lane, self._tag, self._at_work = lane, tag, at_work
        self._payload = b""

    def gather(self, value: Any = None) -> list[Any]:
        """See `Meeting.gather`. The value is posted by `tell`, or at the end of the meeting."""
        self._payload = pack(value)
        return []

    def tell(self, work: Callable[[], Any]) -> Any:
        return self._follow(self._lane.message(self._tag, self._payload), None)

    def fail(self, error: BaseException) -> None:
        self._follow(self._lane.failure(self._tag, error), error)

    def _follow(self, answer: Message, fault: Fault) -> Any:
        self.has_ended = True
        self._at_work.close()
        return self._lane.follow(answer, fault)
