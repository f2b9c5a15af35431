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

Where ranks have come apart, steps say which of two calls is the later one. The first time that they differ all ranks
fail, since it may be a mistake of the caller. After a failure the call with the lower step fails, and the one with the
higher step waits for the others:

    an answer of a lower step    the leader posts n.<rank>.behind, and waits for the next answer, n.<rank>.1
    an answer of a higher step   the leader ends n without it; that rank answers again in n + 1
    a result of a lower step     the rank answers again in n + 1
    n.gone of another call       the leader ends n for whoever may still wait there, and goes on in n + 1
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

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
from ckptstore.group.keys import Keys
from ckptstore.group.life import LEFT, Beater, Pace, Watch, beat_interval_seconds
from ckptstore.group.message import Message, first_error
from ckptstore.group.tree import Bundles, Fetch, Head

_FAREWELL_SECONDS = 10.0
_COLLECTING_POLL_SECONDS = 1.0
"""In a tree: between two looks of the leader and of a head, for whom all others wait."""

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
        self._keys = Keys(name, seat.world_size, seat.board.fan_in)
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._calls = 0
        self._kept_calls: list[int] = []
        self._is_broken = False
        self._is_behind = False
        """Whether this rank, no leader, has no result of its last exchange that was made with its answer."""
        self._has_failed = False
        """Whether the last exchange raised an error here."""
        self._step: int | None = None
        """The step of the present call."""
        self._again = 0
        """How many answers of this rank, no leader, were refused in the exchange where it is."""
        self._is_refused = False
        """Whether the last one was, so that the exchange goes on."""
        self._refused: dict[int, dict[int, int]] = {}
        """Leader: how many answers of each rank it has refused, by exchange."""
        self._met_at: float | None = None
        """When the leader last posted a result that nobody had given up before."""
        timeout_seconds = seat.rank_timeout_seconds
        self._beat = Beater(
            lambda: seat.board.give_sign(self.life_key),
            interval_seconds=beat_interval_seconds(timeout_seconds),
            patience_seconds=timeout_seconds,
        )

    def exchange(self, tag: str, work: Work, join: Join, *, step: int | None = None) -> bytes:
        """See `Group.exchange`."""
        with self._in_turn():
            self._step = step
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
                self._has_failed = True
                raise
            else:
                self._has_failed = False
            finally:
                self._holder = None

    # A rank that is not the leader

    def _follow(self, tag: str, work: Work) -> tuple[Message, Fault]:
        rejoins, self._is_behind = self._is_behind, True
        with self._beat.at_work():
            answer, fault = self._answer(tag, work)
        comes_apart = rejoins or self._has_failed
        answer = replace(answer, rejoins=rejoins, after_failure=comes_apart, lanes=tuple(self._open_names()))
        while True:
            self._next_number()
            try:
                if rejoins:
                    self._skip_finished()
                unposted = self._post_answer(answer)
                if fault is not None and not isinstance(fault, Exception):
                    return answer, fault  # interrupted: the others know, and this process goes its way
                result = self._result(answer)
            except CkptstoreError as error:
                error.committed = None  # what the leader did is not known here
                raise
            is_missed = self.rank in result.missed
            is_past = comes_apart and self._order(result) < 0
            if not is_past and not (rejoins and is_missed):  # else that exchange was over before this rank came
                self._is_behind = is_missed
                return result, fault or unposted

    def _next_number(self) -> None:
        """Where the next answer goes: to the next exchange, or once more to one in which the last was refused."""
        if not self._is_refused:
            self._calls += 1
            self._again = 0
        self._is_refused = False

    def _skip_finished(self) -> None:
        while self._seat.board.fetch([self._keys.result(self._calls)]):
            self._calls += 1
            self._again = 0

    def _order(self, message: Message) -> int:
        """Below 0 when the message is of a lower step than the present call, above 0 when of a higher one."""
        if message.step is None or self._step is None:
            return 0
        return message.step - self._step

    def _post_answer(self, answer: Message) -> Fault:
        """Post the answer. An error is returned where it may be on the board all the same: the leader knows then."""
        try:
            self._seat.post(self._keys.answer(self._calls, self.rank, self._again), answer)
        except StorageUnavailable as error:
            return error
        return None

    def _result(self, answer: Message) -> Message:
        """The leader's result. Whoever gives up waiting for it leaves a mark for a leader that comes late."""
        tag, refusal_key = answer.tag, None
        if answer.after_failure and answer.step is not None:
            refusal_key = self._keys.behind(self._calls, self.rank, self._again)
        try:
            messages, lost = self._await({LEADER: self._keys.result(self._calls)}, tag, refusal_key=refusal_key)
        except BaseException as error:
            if not isinstance(error, CkptstoreError):
                self._mark_gone(tag, f"was interrupted ({type(error).__name__})")
            raise
        if LEADER in messages:
            return messages[LEADER]
        if (refusal := messages.get(self.rank)) is not None:
            self._again, self._is_refused = self._again + 1, True
            raise RankFailed(
                f"The others are at step {refusal.step}, and this call of rank {self.rank} is for step {self._step}",
                ranks=(self.rank,),
                hint="This rank lost its place when an earlier call failed. The others wait for its next call",
            )
        self._mark_gone(tag, f"has waited for rank 0 for {self.rank_timeout_seconds:g} s")
        assert lost is not None  # else there would be a result
        raise lost

    def _mark_gone(self, tag: str, why: str) -> None:
        """In the main lane; what is posted in any other one may be committed later, by whoever is alive."""
        if not self._name:
            with suppress(CkptstoreError):
                self._seat.board.post(self._keys.gone(self._calls), self._message(tag, why.encode()).encode())

    # The leader

    def _lead(self, tag: str, work: Work, join: Join) -> tuple[Message, Fault]:
        self._calls += 1
        while self._has_failed and self._is_past(tag):
            self._calls += 1
        call, key = self._calls, self._keys.result(self._calls)
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

    def _is_past(self, tag: str) -> bool:
        """Whether a rank has given up this exchange in another call than the present one. It is ended then, for all."""
        mark = None if self._name else self._gone(self._calls)
        if mark is None or (mark.tag == tag and self._order(mark) == 0):
            return False
        self._kept_calls.append(self._calls)
        ended = self._message(tag, error=self._has_given_up(mark, tag).to_wire())
        self._seat.post(self._keys.result(self._calls), replace(ended, step=mark.step))
        return True

    def _unsaid(self, tag: str) -> Message:
        """The result of an exchange that the leader was kept from ending."""
        error = RankFailed(f"Rank {LEADER} was interrupted in {tag!r}", rank=LEADER, committed=None)
        return self._message(tag, error=error.to_wire())

    def _decide(self, call: int, tag: str, work: Work, join: Join) -> tuple[Message, Fault]:
        answer, fault = self._answer(tag, work)
        if fault is not None and not isinstance(fault, Exception):
            return answer, fault
        lost: RankFailed | None = None
        try:
            keys = {rank: self._keys.answer(call, rank) for rank in range(1, self.world_size)}
            messages, lost = self._await(keys, tag, answer)
            if lost is None:
                self._forget_calls(messages, call)
            messages[LEADER] = answer
            wire = first_error(messages, lost=lost)
        except BaseException as error:
            return self._message(tag, error=to_wire(error, rank=LEADER)), error
        if wire is not None:  # nothing was joined
            missed = lost.ranks if lost is not None else ()
            return replace(self._message(tag, error={**wire, "committed": False}), missed=missed), fault
        try:
            payload = join([messages[rank].payload for rank in sorted(messages)], self._beat)
        except BaseException as error:
            wire = to_wire(error, rank=LEADER)
            unknown = {} if isinstance(error, CkptstoreError) else {"committed": None}
            return self._message(tag, error={**wire, **unknown}), error
        gone = self._given_up(call, tag)
        if gone is not None:
            return replace(self._message(tag, error=gone.to_wire()), missed=gone.ranks), None
        return self._message(tag, payload), None

    def _given_up(self, call: int, tag: str) -> RankFailed | None:
        """Who went on without this leader, if it was late. Nobody does so within half the timeout."""
        now, half_seconds = time.monotonic(), self.rank_timeout_seconds / 2
        if self._name or (self._met_at is not None and now - self._met_at < half_seconds):
            return None
        mark = self._gone(call)
        if mark is None:
            self._met_at = now
            return None
        return self._has_given_up(mark, tag)

    def _gone(self, call: int) -> Message | None:
        found = self._seat.board.fetch([self._keys.gone(call)])
        return Message.decode(next(iter(found.values()))) if found else None

    def _has_given_up(self, mark: Message, tag: str) -> RankTimeout:
        return RankTimeout(
            f"Rank {mark.rank} has given up {tag!r}: it {mark.payload.decode(errors='replace')}",
            ranks=(mark.rank,),
            hint="This rank came late, or its process was stopped; the ranks meet again at their next call",
        )

    def _message(self, tag: str, payload: bytes = b"", *, error: Mapping[str, Any] | None = None) -> Message:
        return replace(self._seat.message(tag, payload, error=error), step=self._step)

    def _answer(self, tag: str, work: Work) -> tuple[Message, Fault]:
        try:
            return self._message(tag, work(self._beat)), None
        except BaseException as error:
            return self._message(tag, error=to_wire(error, rank=self._seat.rank)), error

    def _await(
        self, keys: dict[int, str], tag: str, mine: Message | None = None, *, refusal_key: str | None = None
    ) -> tuple[dict[int, Message], RankFailed | None]:
        """The messages of these ranks, and an error about those that will not come. `mine` is the leader's answer.

        What is found at `refusal_key` ends it too; it is returned as the message of this rank itself.
        """
        board, watch = self._seat.board, Watch(keys, timeout_seconds=self.rank_timeout_seconds)
        fetch, longest_seconds = self._fetch()
        pace = Pace(shortest_seconds=board.shortest_poll_seconds, longest_seconds=longest_seconds)
        messages: dict[int, Message] = {}
        while watch.awaited:
            pace.look()
            if watch.due():
                life = {self._keys.life(rank): rank for rank in watch.awaited}
                watch.look({life[key]: sign for key, sign in board.signs(list(life)).items()})
            rank_of = {keys[rank]: rank for rank in watch.awaited} | ({refusal_key: self.rank} if refusal_key else {})
            for key, data in fetch(list(rank_of)).items():
                message, rank = Message.decode(data), rank_of[key]
                if message is None:
                    continue
                if rank == self.rank:
                    return {rank: message}, None
                if mine is None or mine.error is None:  # an error of one's own says more than a difference
                    if self._is_ahead(message, tag):
                        return messages, self._strayed(message, tag)
                    if message.after_failure and self._order(message) < 0:
                        keys[rank] = self._refuse(rank, tag)
                        continue
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

    def _fetch(self) -> tuple[Fetch, float]:
        """How this rank reads what it awaits in the present call, and the longest time between two looks."""
        board, call = self._seat.board, self._calls
        often_seconds = min(board.longest_poll_seconds, _COLLECTING_POLL_SECONDS)
        if self.rank == LEADER:
            bundles = self._keys.bundles(call)
            if bundles:
                return Bundles(board, bundles).fetch, often_seconds
        elif (bundle := self._keys.bundle_of_head(call, self.rank)) is not None:
            key, answers = bundle
            return Head(board, answers, key, message=lambda payload: self._seat.message("bundle", payload)).fetch, (
                often_seconds
            )
        return board.fetch, board.longest_poll_seconds

    def _is_ahead(self, message: Message, tag: str) -> bool:
        """Whether the rank has left this exchange behind: its answer is for a later call."""
        order = self._order(message) if message.after_failure else 0
        return order > 0 or (order == 0 and message.rejoins and message.tag != tag)

    def _refuse(self, rank: int, tag: str) -> str:
        """Leader: tell a rank that its answer is for an earlier call; returns the key of its next one."""
        refused = self._refused.setdefault(self._calls, {})
        tried = refused.get(rank, 0)
        self._seat.post(self._keys.behind(self._calls, rank, tried), self._message(tag))
        refused[rank] = tried + 1
        return self._keys.answer(self._calls, rank, tried + 1)

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
        self._seat.board.remove([key for kept in self._kept_calls if kept != call for key in self._keys_of(kept)])
        self._kept_calls = [call]
        self._refused = {kept: counts for kept, counts in self._refused.items() if kept == call}
        self._all_met({name for message in messages.values() for name in message.lanes})

    def close(self) -> None:
        """This rank needs the lane no more. The main lane is closed with its group."""
        if self._name:
            self._close_lane(self._name)

    def leave(self) -> None:
        """Tell the others that this rank takes part no more."""
        self._seat.board.give_sign(self.life_key, last=True)

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

    @property
    def life_key(self) -> str:
        """The key of the signs of life of this rank."""
        return self._keys.life(self.rank)

    def life_keys(self) -> list[str]:
        """The keys of the signs of life of all ranks."""
        return [self._keys.life(rank) for rank in range(self.world_size)]

    def _keys_of(self, call: int) -> list[str]:
        return self._keys.of_call(call, self._refused.get(call, {}))

    def call_keys(self) -> list[str]:
        """The keys of every exchange that may be on the board."""
        return [key for call in self._kept_calls for key in self._keys_of(call)]
