"""The algorithm of `exchange`, written once for every board.

An exchange with number n, counted alike on all ranks:

    every rank   runs its work and posts the answer, or the error, as n.<rank>
    the leader   reads the answers as they come, watches for signs of life, runs join, posts n.result
    every rank   waits for n.result and watches the leader

A rank's answer to n + 1 proves that it has read the result of n, so the leader takes the posts of n away then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ckptstore.errors import CkptstoreError, InvalidInput, RankFailed, RankTimeout, from_wire, to_wire
from ckptstore.group.base import LEADER, Group, Join, Work, spoken
from ckptstore.group.board import Seat, Seated
from ckptstore.group.life import LEFT, Beater, Pace, Watch, beat_interval_seconds
from ckptstore.group.message import Message, first_error

_FAREWELL_SECONDS = 10.0

Fault = BaseException | None


class Lane(Seated):
    """One order of exchanges among the ranks; a `Group` itself (see there for what is guaranteed)."""

    def __init__(self, seat: Seat, name: str, *, open_lane: Callable[[str], Group]) -> None:
        super().__init__(seat)
        self.lane = open_lane
        self._prefix = f"{name}." if name else ""
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._calls = 0
        self._kept_calls: list[int] = []
        self._is_broken = False
        self._beat = Beater(
            lambda: seat.board.give_sign(self._life_key(seat.rank)),
            interval_seconds=beat_interval_seconds(seat.rank_timeout_seconds),
        )

    def exchange(self, tag: str, work: Work, join: Join) -> bytes:
        """See `Group.exchange`."""
        with self._next_call() as call:
            self._seat.take()
            if self._seat.rank == LEADER:
                result, fault = self._lead(call, tag, work, join)
            else:
                result, fault = self._follow(call, tag, work)
            if fault is not None and not isinstance(fault, Exception):
                raise fault
            if result.error is not None:
                raise from_wire(dict(result.error)) from fault
            return result.payload

    @contextmanager
    def _next_call(self) -> Iterator[int]:
        if self._holder == threading.get_ident():
            raise RuntimeError("an exchange was begun inside the work or join of another one of the same lane")
        with self._turn:
            self._holder = threading.get_ident()
            self._calls += 1
            self._beat.begin()
            try:
                yield self._calls
            except BaseException as error:
                self._is_broken |= isinstance(error, RankFailed) or not isinstance(error, CkptstoreError)
                raise
            finally:
                self._holder = None

    def _follow(self, call: int, tag: str, work: Work) -> tuple[Message, Fault]:
        answer, fault = self._answer(tag, work)
        self._seat.post(self._key(call, self._seat.rank), answer)
        if fault is not None and not isinstance(fault, Exception):
            return answer, fault  # interrupted: the others know, and this process goes its way
        try:
            messages, lost = self._await({LEADER: self._result_key(call)}, tag)
            if lost is not None:
                raise lost
        except CkptstoreError as error:
            error.committed = None  # what the leader did is not known here
            raise
        return messages[LEADER], fault

    def _lead(self, call: int, tag: str, work: Work, join: Join) -> tuple[Message, Fault]:
        result, fault = self._decide(call, tag, work, join)
        self._kept_calls.append(call)
        try:
            self._seat.post(self._result_key(call), result)
        except CkptstoreError as error:
            if fault is not None:  # the first failure says more than that the others could not be told
                return result, fault
            error.committed = None
            raise
        return result, fault

    def _decide(self, call: int, tag: str, work: Work, join: Join) -> tuple[Message, Fault]:
        answer, fault = self._answer(tag, work)
        if fault is not None and not isinstance(fault, Exception):
            return answer, fault
        try:
            messages, lost = self._await({rank: self._key(call, rank) for rank in range(1, self.world_size)}, tag)
            if lost is None:
                self._forget_calls()
            messages[LEADER] = answer
            wire = first_error(messages, lost=lost)
        except BaseException as error:
            return self._seat.message(tag, error=to_wire(error, rank=LEADER)), error
        if wire is not None:
            return self._seat.message(tag, error=wire), fault
        try:
            return self._seat.message(
                tag, join([messages[rank].payload for rank in sorted(messages)], self._beat)
            ), None
        except BaseException as error:
            wire = to_wire(error, rank=LEADER)
            unknown = {} if isinstance(error, CkptstoreError) else {"committed": None}
            return self._seat.message(tag, error={**wire, **unknown}), error

    def _answer(self, tag: str, work: Work) -> tuple[Message, Fault]:
        try:
            return self._seat.message(tag, work(self._beat)), None
        except BaseException as error:
            return self._seat.message(tag, error=to_wire(error, rank=self._seat.rank)), error

    def _await(self, keys: Mapping[int, str], tag: str) -> tuple[dict[int, Message], RankFailed | None]:
        """The messages of these ranks, and an error about those that will not come."""
        board, rank_of = self._seat.board, {key: rank for rank, key in keys.items()}
        watch = Watch(keys, timeout_seconds=self.rank_timeout_seconds)
        pace = Pace(shortest_seconds=board.shortest_poll_seconds, longest_seconds=board.longest_poll_seconds)
        messages: dict[int, Message] = {}
        while watch.awaited:
            pace.look()
            if watch.due():
                life = {self._life_key(rank): rank for rank in watch.awaited}
                watch.look({life[key]: sign for key, sign in board.signs(list(life)).items()})
            for key, data in board.fetch([keys[rank] for rank in watch.awaited]).items():
                message = Message.decode(data)
                if message is not None:
                    rank = rank_of[key]
                    self._compare(message, tag)
                    messages[rank] = message
                    watch.answered(rank)
                    pace.progress()
            if lost := self._lost(watch, tag):  # after the fetch: who answered and died has answered
                return messages, lost
            if watch.awaited:
                if self.rank == LEADER:
                    self._beat()  # the others wait for this rank, which is alive
                time.sleep(pace.seconds())
        return messages, None

    def _compare(self, message: Message, tag: str) -> None:
        """Raise InvalidInput when the ranks do not mean the same exchange."""
        mine, other = self._seat, message
        if message.error is not None and mine.rank != LEADER:
            return  # the leader says what is wrong
        if other.world_size != mine.world_size:
            what = f"has world size {mine.world_size}", f"world size {other.world_size}"
        elif other.tag != tag:
            what = f"calls {tag!r}", f"{other.tag!r}"
        else:
            return
        raise InvalidInput(
            f"The ranks do not do the same: rank {mine.rank} {what[0]}, rank {other.rank} {what[1]}",
            rank=other.rank,
            ranks=tuple(sorted((mine.rank, other.rank))),
            hint="Collective calls are made by all ranks, in the same order and with the same step",
        )

    def _lost(self, watch: Watch, tag: str) -> RankFailed | None:
        if left := watch.left():
            return RankFailed(f"{spoken(left).capitalize()} left the group before {tag!r}", ranks=left)
        if silent := watch.silent():
            seconds = self.rank_timeout_seconds
            return RankTimeout(
                f"{spoken(silent).capitalize()} gave no sign of life for {seconds:g} s in {tag!r}",
                ranks=silent,
                hint=self._seat.board.hint,
            )
        return None

    def _forget_calls(self) -> None:
        """All ranks are in the present call, so nobody needs the posts of earlier ones."""
        self._seat.board.remove([key for call in self._kept_calls for key in self._keys(call)])
        self._kept_calls.clear()

    def close(self) -> None:
        """A lane is closed with its group."""

    def leave(self) -> None:
        """Tell the others that this rank takes part no more."""
        self._seat.board.give_sign(self._life_key(self._seat.rank), last=True)

    def have_all_left(self) -> bool:
        """Whether every rank has left, waiting a few seconds for it; less when some may be dead."""
        board, keys = self._seat.board, [self._life_key(rank) for rank in range(self.world_size)]
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

    def all_keys(self) -> list[str]:
        """Every key of the lane that may be on the board."""
        life = [self._life_key(rank) for rank in range(self.world_size)]
        return [*life, *(key for call in self._kept_calls for key in self._keys(call))]

    def _keys(self, call: int) -> list[str]:
        return [self._result_key(call), *(self._key(call, rank) for rank in range(1, self.world_size))]

    def _key(self, call: int, rank: int) -> str:
        return f"{self._prefix}{call:08d}.{rank:05d}"

    def _result_key(self, call: int) -> str:
        return f"{self._prefix}{call:08d}.result"

    def _life_key(self, rank: int) -> str:
        return f"{self._prefix}life.{rank:05d}"
