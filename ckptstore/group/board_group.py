"""The group whose ranks meet at a board, where they post small messages under keys.

A meeting with number n of a lane, which is one order of meetings:

    every rank   posts its value, or the error of its block, as n.<rank>
    the leader   reads the answers as they come, watches for signs of life, makes the result, posts n.result
    every rank   waits for n.result and watches the leader

A rank's answer to n + 1 proves that it no longer needs the messages of n, so the leader removes them then.

The leader's number counts. A rank whose call failed goes on with the first number that has no result, and its answer
says so. When steps differ for the first time, all ranks fail, since it may be a mistake of the caller. After a failure,
the call with the lower step fails, and the one with the higher step waits for the others:

    an answer of a lower step     the result fails the call of that rank; all others answer again in n + 1
    an answer of a later call     the leader ends n without it; that rank answers again in n + 1
    a result of a lower step      the rank answers again in n + 1

A rank that gives up on the leader posts n.gone: a leader that comes late to n ends it then, with an error in that very
call. A leader that could not post a result posts it before its next meeting.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn, Protocol, cast

from ckptstore.errors import (
    CkptstoreError,
    InvalidInput,
    RankFailed,
    RankTimeout,
    StorageUnavailable,
    from_wire,
    to_wire,
)
from ckptstore.group.base import LEADER, new_start_token, this_node, this_process
from ckptstore.group.life import LEFT, Beater, Pace, Watch, beat_interval_seconds
from ckptstore.group.meeting import Meeting, pack, unpack
from ckptstore.group.message import Keys, Message, first_error
from ckptstore.runtime.shown import show_ranks
from ckptstore.storage.retry import hurried

logger = logging.getLogger("ckptstore")

_FAREWELL_SECONDS = 10.0
_COME_SECONDS = 10.0
"""The time after which the leader names the ranks that have not come to a call."""
_FIRST_MEETINGS = frozenset({"open the group", "probe the root", "save", "find", "resume", "require"})
"""Those with which a call begins. Ranks come late to others because of their work."""
EVERY_RANK = "The ranks have not met yet: every rank must call save, and resume or load, not one rank alone"

Fault = BaseException | None
"""The error of this rank that makes a meeting fail; None if there is none."""


class Board(Protocol):
    """A place where ranks post messages. Safe for threads. Its errors are CkptstoreErrors."""

    hint: str
    """The advice for the case that a rank gives no sign of life."""
    shortest_poll_seconds: float
    longest_poll_seconds: float

    def post(self, key: str, data: bytes) -> bytes | None:
        """Create the key. Return None if it now holds `data`, else its existing bytes, which stay."""

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the existing ones of the keys, with their bytes. Does not wait."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys soon. Best effort, never raises."""

    def give_sign(self, key: str, *, last: bool = False) -> None:
        """Change the value that `signs` returns for the key; with `last`, to LEFT."""

    def signs(self, keys: Sequence[str]) -> Mapping[str, Hashable]:
        """Return the last sign for each key: a value that changes with each new sign, or LEFT. Keys without a sign are
        left out."""

    def close(self, *, emptied: bool) -> None:
        """Release all resources. `emptied` says that no rank uses the board any more. Never raises."""


class Lane:
    """One order of meetings; it is a `Group`, with the guarantees described there."""

    rank: int
    world_size: int
    node: str

    def __init__(self, group: BoardGroup, name: str) -> None:
        self._group, self._board, self._name = group, group.board, name
        self.rank, self.world_size, self.node = group.rank, group.world_size, group.node
        self._keys = Keys(name, self.world_size)
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._call = 0
        self._step: int | None = None
        """The step of the present call."""
        self._has_failed = False
        """True if the last meeting raised an error on this rank, or the present one has not succeeded yet."""
        self._comes_apart = False
        """True if the meeting before the present one failed on this rank."""
        self._is_lost = False
        """Not the leader: True if this rank has no result of its last meeting that includes its answer."""
        self._is_broken = False
        """True once a rank was lost, or an error that is no CkptstoreError was raised."""
        self._has_own_error = False
        """Leader: True if its own block has failed in the present meeting."""
        self._behind: list[int] = []
        """Leader: the ranks whose answer is for a lower step than the present call."""
        self._posted_calls: list[int] = []
        """Leader: the meetings whose messages may be on the board."""
        self._met_at: float | None = None
        """Leader: the last time at which no rank had given up on the result of the meeting."""
        timeout_seconds = group.rank_timeout_seconds
        self._beat = Beater(
            lambda: self._board.give_sign(self.life_key),
            interval_seconds=beat_interval_seconds(timeout_seconds),
            patience_seconds=timeout_seconds,
        )

    @property
    def start_token(self) -> str:
        """See `Group.start_token`."""
        return self._group.token

    def lane(self, name: str) -> Lane:
        """See `Group.lane`."""
        return self._group.open_lane(name)

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        """See `Group.meeting`."""
        return cast("AbstractContextManager[Meeting, None]", self._meeting(tag, step))  # it swallows no exception

    @contextmanager
    def _meeting(self, tag: str, step: int | None) -> Iterator[Meeting]:
        with self._in_turn(step), ExitStack() as at_work:
            self._group.take()
            if self.rank == LEADER:
                self._next_number()
                while self._comes_apart and self._is_past(tag):
                    self._next_number()
            at_work.enter_context(self._beat.at_work())
            if self.rank == LEADER:
                with self._owing(tag):
                    self._group.settle()
            attended = _Attended(self, tag, at_work)
            try:
                yield attended
            except BaseException as error:
                if attended.has_ended:
                    raise
                attended.fail(error)
            if not attended.has_ended:
                attended.tell(lambda: None)

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
        return replace(self._group.claim(tag), payload=payload, error=error, step=self._step)

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

    # A rank that is not the leader

    def follow(self, answer: Message, fault: Fault) -> Any:
        """Post the answer of this rank, and return the leader's value."""
        was_lost, self._is_lost = self._is_lost, True
        comes_apart = was_lost or self._comes_apart
        names = () if self._name else self._group.open_names()
        answer = replace(answer, after_failure=comes_apart, lanes=names)
        while True:
            self._call += 1
            try:
                while was_lost and self._board.fetch([self._keys.result(self._call)]):
                    self._call += 1
                unposted = self._post_answer(answer)
                if fault is not None and not isinstance(fault, Exception):
                    raise fault  # interrupted: the others know, so this process does not wait for the result
                with hurried() if unposted is not None else nullcontext():  # the retries of the post took long enough
                    result = self._result(answer.tag)
            except CkptstoreError as error:
                error.committed = None  # this rank does not know what the leader did
                raise
            if self.rank in result.behind:
                raise RankFailed(
                    f"The others are at step {result.step}, and this call of rank {self.rank} is for step {self._step}",
                    ranks=(self.rank,),
                    committed=None,
                    hint="This rank lost its place when an earlier call failed. The others wait for its next call",
                )
            is_missed = self.rank in result.missed
            is_past = (comes_apart and self._order(result) < 0) or (was_lost and is_missed)
            if not is_past and not result.behind:  # otherwise the meeting ended before this rank came
                self._is_lost = is_missed
                return self._value(result, fault or unposted)

    def _post_answer(self, answer: Message) -> Fault:
        """Post the answer. Return an error after which it may be on the board: the leader's result shows."""
        try:
            self._group.post(self._keys.answer(self._call, self.rank), answer)
        except StorageUnavailable as error:
            return error
        return None

    def _result(self, tag: str) -> Message:
        """Wait for the leader's result. A rank that gives up leaves a mark for a leader that comes late."""
        received: dict[int, Message] = {}
        try:
            lost = self._await({LEADER: self._keys.result(self._call)}, tag, received)
        except BaseException as error:
            if not isinstance(error, CkptstoreError):
                self._mark_gone(tag, f"was interrupted ({type(error).__name__})")
            raise
        if lost is not None:
            self._mark_gone(tag, f"has waited for rank 0 for {self._group.rank_timeout_seconds:g} s")
            raise lost
        return received[LEADER]

    def _mark_gone(self, tag: str, why: str) -> None:
        """Leave a mark that this rank has given up, in the main lane only."""
        # An attempt in any other lane may still be committed later, by the ranks that are alive.
        if not self._name:
            with suppress(CkptstoreError):
                self._board.post(self._keys.gone(self._call), self.message(tag, why.encode()).encode())

    # The leader

    def _next_number(self) -> None:
        self._call += 1
        self._posted_calls.append(self._call)

    def _is_past(self, tag: str) -> bool:
        """Return True, and end the meeting for all ranks, if a rank has given it up in another call than this."""
        with self._owing(tag):
            mark = None if self._name else self._gone()
        if mark is None or (mark.tag == tag and self._order(mark) == 0):
            return False
        self._post_result(replace(self.message(tag, error=_has_given_up(mark, tag).to_wire()), step=mark.step), None)
        return True

    @contextmanager
    def _owing(self, tag: str) -> Iterator[None]:
        """If the block raises, owe the others the result of this meeting: that this rank was interrupted."""
        try:
            yield
        except BaseException as error:
            unsaid = RankFailed(f"Rank {LEADER} was interrupted in {tag!r}", rank=LEADER, committed=None)
            self._group.owed[self._keys.result(self._call)] = self.message(tag, error=unsaid.to_wire())
            if isinstance(error, CkptstoreError):
                error.committed = None
            raise

    def collect(self, answer: Message, fault: Fault) -> list[Any]:
        """Return the values of all ranks. If any has failed, post the error for all ranks and raise it."""
        tag, lost = answer.tag, None
        self._has_own_error = answer.error is not None
        while True:
            received: dict[int, Message] = {}
            self._behind = []
            try:
                keys = {rank: self._keys.answer(self._call, rank) for rank in range(1, self.world_size)}
                lost = self._await(keys, tag, received)
                if not self._behind:
                    if lost is None:
                        self._forget_calls(received.values())
                    answers = {LEADER: answer, **received}
                    wire = first_error(answers, lost=lost)
                    if wire is None:
                        return [unpack(answers[rank].payload) for rank in sorted(answers)]
                    break
            except BaseException as error:
                self.tell_error(tag, error)
            self._post_result(replace(self.message(tag), behind=tuple(self._behind)), None)
            self._next_number()
        wire = {**wire, "committed": False}
        missed = lost.ranks if lost is not None else ()
        self._post_result(replace(self.message(tag), error=wire, missed=missed), fault)
        raise from_wire(wire) from fault

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
        # No rank gives up within half the timeout, so the board is not read that often.
        now, half_seconds = time.monotonic(), self._group.rank_timeout_seconds / 2
        if not self._name and (self._met_at is None or now - self._met_at >= half_seconds):
            with self._owing(tag):
                mark = self._gone()
            if mark is None:
                self._met_at = now
            else:
                result = replace(self.message(tag, error=_has_given_up(mark, tag).to_wire()), missed=(mark.rank,))
        self._post_result(result, None)
        return self._value(result, None)

    def _post_result(self, result: Message, fault: Fault) -> None:
        key = self._keys.result(self._call)
        try:
            with hurried() if isinstance(fault, StorageUnavailable) else nullcontext():  # it was retried for long
                self._group.post(key, result)
        except BaseException as error:
            self._group.owed[key] = result
            if not isinstance(error, CkptstoreError):
                raise
            if fault is None:  # otherwise the first error says more than this one
                error.committed = None
                raise

    def _gone(self) -> Message | None:
        found = self._board.fetch([self._keys.gone(self._call)])
        return Message.decode(next(iter(found.values()))) if found else None

    def _forget_calls(self, answers: Collection[Message]) -> None:
        """Remove the messages of earlier calls, once all ranks are in the present one."""
        self._board.remove([key for call in self._posted_calls[:-1] for key in self._keys.of_call(call)])
        self._posted_calls = [self._call]
        if not self._name:
            self._group.clear_lanes({name for answer in answers for name in answer.lanes})

    # Waiting

    def _await(self, keys: dict[int, str], tag: str, received: dict[int, Message]) -> RankFailed | None:
        """Wait for the messages of these ranks, and put them into `received`. Return the error about ranks that will
        not answer; None if all have answered, or some are behind."""
        board, watch = self._board, Watch(keys, timeout_seconds=self._group.rank_timeout_seconds)
        pace = Pace(shortest_seconds=board.shortest_poll_seconds, longest_seconds=board.longest_poll_seconds)
        late_at = time.monotonic() + _COME_SECONDS
        while True:
            pace.look()
            if watch.due():
                life = {self._keys.life(rank): rank for rank in watch.awaited}
                watch.look({life[key]: sign for key, sign in board.signs(list(life)).items()})
            rank_of = {keys[rank]: rank for rank in watch.awaited}
            for key, data in board.fetch(list(rank_of)).items():
                message, rank = Message.decode(data), rank_of[key]
                if message is None:
                    continue
                if strayed := self._strayed(message, tag):
                    return strayed
                received[rank] = message
                watch.answered(rank)
                pace.progress()
            if self._behind or not watch.awaited:
                return None
            if lost := self._lost(watch, tag):  # after the fetch: a rank that answered before it died has answered
                return lost
            if self.rank == LEADER:
                if tag in _FIRST_MEETINGS and time.monotonic() > late_at:
                    late_at = math.inf
                    away = list(watch.awaited)
                    come = [rank for rank in range(self.world_size) if rank not in away]
                    said = f"{show_ranks(away)} in {tag!r}; {show_ranks(come)} came"
                    logger.warning("waited %g s for %s. Every rank must make the call", _COME_SECONDS, said)
                self._beat()  # the other ranks watch the leader for signs of life
            time.sleep(pace.seconds())

    def _strayed(self, message: Message, tag: str) -> RankFailed | None:
        """Leader: return the error about a rank that is past this meeting, and note one that is behind.

        Raises InvalidInput if the ranks are in different meetings.
        """
        if self._has_own_error or message.behind:  # which says more than a difference between the calls
            return None
        order, other = self._order(message) if message.after_failure else 0, message
        went_on = message.after_failure and not self._comes_apart and message.tag != tag
        if order > 0 or (order == 0 and went_on):
            return RankFailed(
                f"Rank {other.rank} has no result of an earlier call and went on: it calls {other.tag!r}, not {tag!r}",
                ranks=(other.rank,),
                hint="Look at the error that it raised; the ranks meet again at their next call",
            )
        if order < 0:
            self._behind.append(other.rank)
            return None
        if message.error is not None and other.world_size == self.world_size:
            return None  # the error says more than a difference between the calls
        if other.world_size != self.world_size:
            differs = f"has world size {self.world_size}", f"world size {other.world_size}"
        elif other.tag != tag:
            differs = f"calls {tag!r}", f"{other.tag!r}"
        else:
            return None
        raise InvalidInput(
            f"The ranks do not do the same: rank {self.rank} {differs[0]}, rank {other.rank} {differs[1]}",
            rank=other.rank,
            ranks=tuple(sorted((self.rank, other.rank))),
            hint="Collective calls are made by all ranks, in the same order and with the same step",
        )

    def _lost(self, watch: Watch, tag: str) -> RankFailed | None:
        if left := watch.left():
            return RankFailed(f"{show_ranks(left).capitalize()} left the group before {tag!r}", ranks=left)
        if silent := watch.silent():
            seconds, hint = self._group.rank_timeout_seconds, self._board.hint
            return RankTimeout(
                f"{show_ranks(silent).capitalize()} gave no sign of life for {seconds:g} s in {tag!r}",
                ranks=silent,
                hint=hint if self._name or self._call > 1 else f"{EVERY_RANK}. {hint}",
            )
        return None

    # The end

    def close(self) -> None:
        """See `Group.close`. The main lane is closed with its group."""
        self._group.close_lane(self._name)

    @property
    def life_key(self) -> str:
        """The key of the signs of life of this rank."""
        return self._keys.life(self.rank)

    def life_keys(self) -> list[str]:
        """Return the keys of the signs of life of all ranks."""
        return [self._keys.life(rank) for rank in range(self.world_size)]

    def call_keys(self) -> list[str]:
        """Leader: return the keys of all messages that may be on the board."""
        return [key for call in self._posted_calls for key in self._keys.of_call(call)]


class _Attended(Meeting):
    """A meeting in progress."""

    def __init__(self, lane: Lane, tag: str, at_work: ExitStack) -> None:
        """`at_work` gives signs of life until its end, or until this rank only waits for the leader's result."""
        self._lane, self._tag, self._at_work = lane, tag, at_work
        self._leads = lane.rank == LEADER
        self._payload: bytes | None = None
        """The value of this rank, once it is gathered."""
        self.has_ended = False
        """True once the result is posted or received, or can no longer be."""

    def gather(self, value: Any = None) -> list[Any]:
        """See `Meeting.gather`. A rank that is not the leader posts the value in `tell`, or at the end of the
        meeting."""
        payload = pack(value)
        answer = self._lane.message(self._tag, payload)
        found = self._collect(answer, None) if self._leads else []
        self._payload = payload
        return found

    def tell(self, work: Callable[[], Any]) -> Any:
        """See `Meeting.tell`."""
        if not self._leads:
            return self._follow(self._lane.message(self._tag, self._payload or b""), None)
        if self._payload is None:
            self.gather()
        try:
            payload = pack(work())
        except BaseException as error:
            self.fail(error)
        self.has_ended = True
        return self._lane.tell_value(self._tag, payload)

    def fail(self, error: BaseException) -> NoReturn:
        """End the meeting with an error of the block on this rank, and raise the error that all ranks raise."""
        if self._leads and (self._payload is not None or not isinstance(error, Exception)):
            self.has_ended = True
            self._lane.tell_error(self._tag, error)
        answer = self._lane.message(self._tag, error=to_wire(error, rank=self._lane.rank))
        if self._leads:
            self._collect(answer, error)
        else:
            self._follow(answer, error)
        raise error  # not reached: the answer is a failure

    def _collect(self, answer: Message, fault: Fault) -> list[Any]:
        self.has_ended = True
        values = self._lane.collect(answer, fault)
        self.has_ended = False
        return values

    def _follow(self, answer: Message, fault: Fault) -> Any:
        self.has_ended = True
        self._at_work.close()
        return self._lane.follow(answer, fault)


class BoardGroup(Lane):
    """One process as one rank at a board. See `Group` for what is guaranteed. It is the main lane itself."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        rank_timeout_seconds: float,
        start_token: str | None = None,
        node: str | None = None,
    ) -> None:
        """`rank_timeout_seconds` is the longest time that a rank may give no sign of life."""
        self.board, self.rank, self.world_size, self.node = board, rank, world_size, node or this_node()
        self.rank_timeout_seconds = rank_timeout_seconds
        self.token = start_token or new_start_token()
        """The start token. A rank of torch.distributed hears it from its leader when the group is open."""
        self.owed: dict[str, Message] = {}
        """The messages that could not be posted, for `settle` to post them before anything else of this rank."""
        self._by = this_process(self.node)
        self._is_taken = self._is_closed = False
        self._lanes: dict[str, Lane] = {}
        """The open lanes by name, without the main one. A name means the same lane until it is closed."""
        self._closed: dict[str, Lane] = {}
        """Leader: the lanes that it has closed and other ranks perhaps have not."""
        self._givers: dict[str, Lane] = {}
        """A lane for each key of signs of life, without the main lane: many lanes share one key."""
        self._lock = threading.Lock()
        super().__init__(self, "")

    def claim(self, tag: str) -> Message:
        """Make a message from this process."""
        return Message(tag=tag, rank=self.rank, world_size=self.world_size, by=self._by)

    def post(self, key: str, message: Message) -> None:
        """Post a message. Raises InvalidInput if another process has posted a different one under its key."""
        there = self.board.post(key, message.encode())
        if there is None:
            return
        other = Message.decode(there)
        whose = f"{other.by} (world size {other.world_size})" if other else "a process that stopped half-way"
        raise InvalidInput(
            f"Two processes take part as rank {self.rank} of the job start {self.token!r}: "
            f"{message.by} (world size {self.world_size}) and {whose}",
            ranks=(self.rank,),
            hint="Give a start_token that is new for every start of the job, and each rank to one process",
        )

    def settle(self) -> None:
        """Post the messages that are owed. Raises as `post` does."""
        for key, message in list(self.owed.items()):
            self.post(key, message)
            self.owed.pop(key, None)

    def take(self) -> None:
        """Claim the rank for this process before its first meeting. Raises InvalidInput if another process has it, so a
        start token that is used twice is detected, or if the group is closed."""
        with self._lock:
            if self._is_closed:
                raise InvalidInput("The group is closed: its store was closed before this call")
            if not self._is_taken:
                self.post(self._keys.member(self.rank), self.claim("member"))
                self._is_taken = True

    def open_lane(self, name: str) -> Lane:
        """Return the lane of that name."""
        with self._lock:
            lane = self._lanes.setdefault(name, Lane(self, name))
            self._givers[lane.life_key] = lane
            return lane

    def open_names(self) -> tuple[str, ...]:
        """Return the names of the lanes that this rank has open, without the main one."""
        with self._lock:
            return tuple(sorted(self._lanes))

    def close_lane(self, name: str) -> None:
        """Note that this rank no longer needs the lane."""
        with self._lock:
            lane = self._lanes.pop(name, None)
            if lane is not None and self.rank == LEADER:
                self._closed[name] = lane

    def clear_lanes(self, open_names: Collection[str]) -> None:
        """Leader: remove the messages of closed lanes, except for lanes that other ranks have open: `open_names`."""
        with self._lock:
            done = [self._closed.pop(name) for name in sorted(self._closed.keys() - open_names)]
        self.board.remove([key for lane in done for key in lane.call_keys()])

    def close(self) -> None:
        """See `Group.close`: the leader waits for the others, then clears the board."""
        emptied = False
        try:
            if self._is_taken:
                self.settle()
                # The main lane last: by its signs the leader sees that all ranks have left, and clears the board.
                lanes = [*self._givers.values(), self]
                for lane in lanes:
                    self.board.give_sign(lane.life_key, last=True)
                emptied = self.rank == LEADER and self._have_all_left()
                if emptied:
                    members = [self._keys.member(rank) for rank in range(self.world_size)]
                    life = [key for lane in lanes for key in lane.life_keys()]
                    posted = [self, *self._closed.values(), *self._lanes.values()]
                    calls = [key for lane in posted for key in lane.call_keys()]
                    self.board.remove([*members, *life, *calls])
        except CkptstoreError as error:
            logger.warning("rank %d could not take leave of its group: %s", self.rank, error)
        self._is_taken, self._is_closed = False, True
        self.board.close(emptied=emptied)

    def _have_all_left(self) -> bool:
        """Wait a few seconds, or less if some ranks may be dead, and return True if every rank has left."""
        board, keys = self.board, self.life_keys()
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


def _has_given_up(mark: Message, tag: str) -> RankTimeout:
    return RankTimeout(
        f"Rank {mark.rank} has given up {tag!r}: it {mark.payload.decode(errors='replace')}",
        ranks=(mark.rank,),
        hint="This rank came late, or its process was stopped; the ranks meet again at their next call",
    )
