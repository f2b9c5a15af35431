"""The algorithm of `exchange`, written once for every board.

An exchange with number n:

    every rank   runs its work and posts the answer, or the error, as n.<rank>
    the leader   reads the answers as they come, watches for signs of life, runs join, posts n.result
    every rank   waits for n.result and watches the leader

A rank's answer to n + 1 proves that it needs the posts of n no more, so the leader takes them away then.

The leader's number counts. A rank that has no result of its last exchange (it gave up, or the leader gave it up) looks
for the first number without a result and goes on there; its answer says so, and so does the result of an exchange that
the leader ended without it. A rank that gives up the leader posts n.gone: a leader that comes late to n ends it then.
A leader that could not post a result posts it before its next exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from ckptstore.errors import (
    CkptstoreError,
    InvalidInput,
    RankFailed,
    RankTimeout,
    StorageUnavailable,
    from_wire,
    to_wire,
)
from ckptstore.group.base import LEADER, Group, Join, Work, spoken
from ckptstore.group.board import Seat, Seated
from ckptstore.group.life import LEFT, Beater, Pace, Watch, beat_interval_seconds
from ckptstore.group.message import Message, first_error

_FAREWELL_SECONDS = 10.0
LANES_LIFE = "lane."
"""Before the keys of the signs of life in all lanes but the main one: a rank is in one of them at a time."""

Fault = BaseException | None


class Lane(Seated):
    """One order of exchanges among the ranks; a `Group` itself (see there for what is guaranteed)."""

    def __init__(
        self,
        seat: Seat,
        name: str,
        *,
        open_lane: Callable[[str], Group],
        close_lane: Callable[[str], None],
        open_names: Callable[[], Collection[str]] = tuple,
        all_met: Callable[[Collection[str]], None] = lambda names: None,
    ) -> None:
        """`open_names` are the lanes that this rank has open; the leader calls `all_met` with those that any rank has,
        whenever all ranks are in one exchange. The main lane alone is given these two."""
        super().__init__(seat)
        self.lane = open_lane
        self._name = name
        self._close_lane, self._open_names, self._all_met = close_lane, open_names, all_met
        self._prefix = f"{name}." if name else ""
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._calls = 0
        self._kept_calls: list[int] = []
        self._is_broken = False
        self._is_behind = False
        """Whether this rank, no leader, has no result of its last exchange that was made with its answer."""
        self._met_at: float | None = None
        """When the leader last posted a result that nobody had given up before."""
        timeout_seconds = seat.rank_timeout_seconds
        self._beat = Beater(
            lambda: seat.board.give_sign(self._life_key(seat.rank)),
            interval_seconds=beat_interval_seconds(timeout_seconds),
            patience_seconds=timeout_seconds,
        )

    def exchange(self, tag: str, work: Work, join: Join) -> bytes:
        """See `Group.exchange`."""
        with self._in_turn():
            self._seat.take()
            if self._seat.rank == LEADER:
                result, fault = self._lead(tag, work, join)
            else:
                result, fault = self._follow(tag, work)
            if fault is not None and not isinstance(fault, Exception):
                raise fault
            if result.error is not None:
                raise from_wire(dict(result.error)) from fault
            return result.payload

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            raise RuntimeError("an exchange was begun inside the work or join of another one of the same lane")
        with self._turn:
            self._holder = threading.get_ident()
            self._beat.begin()
            try:
                yield
            except BaseException as error:
                self._is_broken |= isinstance(error, RankFailed) or not isinstance(error, CkptstoreError)
                raise
            finally:
                self._holder = None

    # A rank that is not the leader

    def _follow(self, tag: str, work: Work) -> tuple[Message, Fault]:
        rejoins, self._is_behind = self._is_behind, True
        with self._beat.at_work():
            answer, fault = self._answer(tag, work)
        answer = replace(answer, rejoins=rejoins, lanes=tuple(self._open_names()))
        while True:
            self._calls += 1
            try:
                if rejoins:
                    self._skip_finished()
                unposted = self._post_answer(answer)
                if fault is not None and not isinstance(fault, Exception):
                    return answer, fault  # interrupted: the others know, and this process goes its way
                result = self._result(tag)
            except CkptstoreError as error:
                error.committed = None  # what the leader did is not known here
                raise
            is_missed = self.rank in result.missed
            if not (rejoins and is_missed):  # else that exchange was over before this rank came
                self._is_behind = is_missed
                return result, fault or unposted

    def _skip_finished(self) -> None:
        while self._seat.board.fetch([self._result_key(self._calls)]):
            self._calls += 1

    def _post_answer(self, answer: Message) -> Fault:
        """Post the answer. An error is returned where it may be on the board all the same: the leader knows then."""
        try:
            self._seat.post(self._key(self._calls, self.rank), answer)
        except StorageUnavailable as error:
            return error
        return None

    def _result(self, tag: str) -> Message:
        """The leader's result. Whoever gives up waiting for it leaves a mark for a leader that comes late."""
        try:
            messages, lost = self._await({LEADER: self._result_key(self._calls)}, tag)
        except BaseException as error:
            if not isinstance(error, CkptstoreError):
                self._mark_gone(tag, f"was interrupted ({type(error).__name__})")
            raise
        if lost is not None:
            self._mark_gone(tag, f"has waited for rank 0 for {self.rank_timeout_seconds:g} s")
            raise lost
        return messages[LEADER]

    def _mark_gone(self, tag: str, why: str) -> None:
        """In the main lane; what is posted in any other one may be committed later, by whoever is alive."""
        if not self._prefix:
            with suppress(CkptstoreError):
                self._seat.board.post(self._gone_key(self._calls), self._seat.message(tag, why.encode()).encode())

    # The leader

    def _lead(self, tag: str, work: Work, join: Join) -> tuple[Message, Fault]:
        self._calls += 1
        call, key = self._calls, self._result_key(self._calls)
        self._kept_calls.append(call)
        result, fault, is_posted = self._unsaid(tag), None, False
        with self._beat.at_work():
            try:
                self._seat.settle()
                result, fault = self._decide(call, tag, work, join)
                self._seat.post(key, result)
                is_posted = True
            except CkptstoreError as error:
                if fault is None:  # else the first failure says more than that the others could not be told
                    error.committed = None
                    raise
            finally:
                if not is_posted:
                    self._seat.owe(key, result)
        return result, fault

    def _unsaid(self, tag: str) -> Message:
        """The result of an exchange that the leader was kept from ending."""
        error = RankFailed(f"Rank {LEADER} was interrupted in {tag!r}", rank=LEADER, committed=None)
        return self._seat.message(tag, error=error.to_wire())

    def _decide(self, call: int, tag: str, work: Work, join: Join) -> tuple[Message, Fault]:
        answer, fault = self._answer(tag, work)
        if fault is not None and not isinstance(fault, Exception):
            return answer, fault
        lost: RankFailed | None = None
        try:
            keys = {rank: self._key(call, rank) for rank in range(1, self.world_size)}
            messages, lost = self._await(keys, tag, answer)
            if lost is None:
                self._forget_calls(messages, call)
            messages[LEADER] = answer
            wire = first_error(messages, lost=lost)
        except BaseException as error:
            return self._seat.message(tag, error=to_wire(error, rank=LEADER)), error
        if wire is not None:  # nothing was joined
            missed = lost.ranks if lost is not None else ()
            return replace(self._seat.message(tag, error={**wire, "committed": False}), missed=missed), fault
        try:
            payload = join([messages[rank].payload for rank in sorted(messages)], self._beat)
        except BaseException as error:
            wire = to_wire(error, rank=LEADER)
            unknown = {} if isinstance(error, CkptstoreError) else {"committed": None}
            return self._seat.message(tag, error={**wire, **unknown}), error
        gone = self._given_up(call, tag)
        if gone is not None:
            return replace(self._seat.message(tag, error=gone.to_wire()), missed=gone.ranks), None
        return self._seat.message(tag, payload), None

    def _given_up(self, call: int, tag: str) -> RankFailed | None:
        """Who went on without this leader, if it was late. Nobody does so within half the timeout."""
        now, half_seconds = time.monotonic(), self.rank_timeout_seconds / 2
        if self._prefix or (self._met_at is not None and now - self._met_at < half_seconds):
            return None
        found = self._seat.board.fetch([self._gone_key(call)])
        mark = Message.decode(next(iter(found.values()))) if found else None
        if mark is None:
            self._met_at = now
            return None
        return RankTimeout(
            f"Rank {mark.rank} has given up {tag!r}: it {mark.payload.decode(errors='replace')}",
            ranks=(mark.rank,),
            hint="This rank came late, or its process was stopped; the ranks meet again at their next call",
        )

    def _answer(self, tag: str, work: Work) -> tuple[Message, Fault]:
        try:
            return self._seat.message(tag, work(self._beat)), None
        except BaseException as error:
            return self._seat.message(tag, error=to_wire(error, rank=self._seat.rank)), error

    def _await(
        self, keys: Mapping[int, str], tag: str, mine: Message | None = None
    ) -> tuple[dict[int, Message], RankFailed | None]:
        """The messages of these ranks, and an error about those that will not come. `mine` is the leader's answer."""
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
                    if mine is None or mine.error is None:  # an error of one's own says more than a difference
                        if message.rejoins and message.tag != tag:
                            return messages, self._strayed(message, tag)
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
        if message.error is not None and other.world_size == mine.world_size:
            return  # it says more than that a call differs
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

    def _strayed(self, message: Message, tag: str) -> RankFailed:
        """About a rank that missed the result of an earlier exchange, and is in another one of its calls already."""
        return RankFailed(
            f"Rank {message.rank} has no result of an earlier call and went on: it calls {message.tag!r}, not {tag!r}",
            ranks=(message.rank,),
            hint="Look at the error that it raised; the ranks meet again at their next call",
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

    def _forget_calls(self, messages: Mapping[int, Message], call: int) -> None:
        """All ranks are in the present call, so nobody needs the posts of earlier ones."""
        self._seat.board.remove([key for kept in self._kept_calls if kept != call for key in self._keys(kept)])
        self._kept_calls = [call]
        self._all_met({name for message in messages.values() for name in message.lanes})

    def close(self) -> None:
        """This rank needs the lane no more. The main lane is closed with its group."""
        if self._name:
            self._close_lane(self._name)

    def leave(self) -> None:
        """Tell the others that this rank takes part no more."""
        self._seat.board.give_sign(self._life_key(self._seat.rank), last=True)

    def have_all_left(self) -> bool:
        """Whether every rank has left, waiting a few seconds for it; less when some may be dead."""
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

    def life_keys(self) -> list[str]:
        """The keys of the signs of life of all ranks."""
        return [self._life_key(rank) for rank in range(self.world_size)]

    def call_keys(self) -> list[str]:
        """The keys of every exchange that may be on the board."""
        return [key for call in self._kept_calls for key in self._keys(call)]

    def _keys(self, call: int) -> list[str]:
        gone = [] if self._prefix else [self._gone_key(call)]
        return [self._result_key(call), *gone, *(self._key(call, rank) for rank in range(1, self.world_size))]

    def _key(self, call: int, rank: int) -> str:
        return f"{self._prefix}{call:08d}.{rank:05d}"

    def _result_key(self, call: int) -> str:
        return f"{self._prefix}{call:08d}.result"

    def _gone_key(self, call: int) -> str:
        return f"{self._prefix}{call:08d}.gone"

    def _life_key(self, rank: int) -> str:
        return f"{LANES_LIFE if self._prefix else ''}life.{rank:05d}"
