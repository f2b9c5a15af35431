"""Ranks that missed a result, or were stopped: how they meet again, and what lanes leave behind. Threads are ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from exchanging import exchange
from outcomes import error_of
from test_group import RETRY, joined, opened, together
from thread_ranks import in_threads

from ckptstore.errors import CkptstoreError, InvalidInput, RankFailed, RankTimeout, StorageUnavailable
from ckptstore.group.board_group import BoardGroup
from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing import Call, FailAt, combine, wrap

STORY = ("state", "save")
"""The exchanges of one call of the caller."""


@pytest.fixture
def memory(tmp_path: Path) -> MemoryStorage:
    return MemoryStorage(f"memory://{tmp_path.name}")


def told(group: BoardGroup, tag: str, what: str, *, step: int | None = None) -> str:
    """An exchange in which all ranks say the same; InvalidInput when they do not."""

    def join(answers: list[bytes]) -> bytes:
        if len(set(answers)) > 1:
            raise InvalidInput(f"the ranks say {answers}")
        return answers[0]

    return exchange(group, tag, lambda: what.encode(), join, step=step).decode()


def test_a_rank_that_missed_a_result_is_in_step_at_its_next_call(memory: MemoryStorage) -> None:
    # No timeout may be waited for: the others are told that the rank is elsewhere, and it waits for their next call.
    missing = wrap(memory, FailAt("read group/start/00000001.result", times=RETRY.retry_attempts))

    def run(rank: int) -> list[Any]:
        group = opened(missing if rank == 1 else memory, rank, 3, timeout_seconds=600)
        return [error_of(lambda n=n: [told(group, tag, f"{n}") for tag in STORY]) for n in range(3)]

    ends = in_threads(3, run)
    assert (type(ends[1][0]), ends[1][0].committed) == (StorageUnavailable, None)
    for rank in (0, 2):
        assert (type(ends[rank][0]), ends[rank][0].ranks) == (RankFailed, (1,))
        assert "Rank 1 has no result of an earlier call" in str(ends[rank][0])
    assert [end[1:] for end in ends] == [[None, None]] * 3


def test_a_rank_that_missed_a_result_passes_over_those_since(memory: MemoryStorage) -> None:
    missing = wrap(memory, FailAt("read group/start/00000001.result", times=RETRY.retry_attempts))
    gone_on = threading.Event()

    def run(rank: int) -> list[Any]:
        group = opened(missing if rank == 1 else memory, rank, 3, timeout_seconds=600)
        ends = [error_of(lambda: told(group, "save", "1"))]
        if rank != 1:  # two of the three call different things meanwhile
            ends.append(error_of(lambda: told(group, "save" if rank else "load", "2")))
            gone_on.set()
        gone_on.wait(120)
        return [*map(type, ends), error_of(lambda: told(group, "save", "3"))]

    ends = in_threads(3, run)
    assert ends == [[type(None), InvalidInput, None], [StorageUnavailable, None], [type(None), InvalidInput, None]]


def test_a_rank_that_came_too_late_is_told_once(memory: MemoryStorage) -> None:
    gone_on = threading.Event()

    def run(rank: int) -> list[Any]:
        group = opened(memory, rank, 2, timeout_seconds=1 if rank == 0 else 60)
        ends: list[Any] = []
        if rank == 1:
            gone_on.wait(60)
        for number in range(3):
            ends.append(error_of(lambda number=number: told(group, "save", f"{number}")))
            if number == 0:
                gone_on.set()
                group.rank_timeout_seconds = 60
        return ends

    ends = in_threads(2, run)
    for end in ends:
        assert type(end[0]) is RankTimeout
        assert end[0].ranks == (1,)
    assert [end[1:] for end in ends] == [[None, None]] * 2


def test_a_leader_that_was_stopped_fails_at_once_until_it_has_caught_up(memory: MemoryStorage) -> None:
    given_up = threading.Event()

    def run(rank: int) -> list[Any]:
        group = opened(memory, rank, 3, timeout_seconds=1 if rank else 600)
        ends: list[Any] = []
        if rank == 0:
            given_up.wait(120)
        for number in range(100):
            ends.append(error_of(lambda number=number: told(group, "save", f"{number}")))
            if ends[-1] is None:
                return ends
            if number == 2:
                given_up.set()
        return ends

    ends = in_threads(3, run)
    assert [end[-1] for end in ends] == [None] * 3
    assert len({len(end) for end in ends}) == 1  # at the very same call
    assert len(ends[0]) > 3
    for error in ends[0][:-1]:
        assert type(error) is RankTimeout
        assert "has given up 'save'" in str(error)
    for error in (*ends[1][:2], *ends[2][:2]):
        assert type(error) is RankTimeout
        assert (error.ranks, error.committed) == ((0,), None)


def test_a_result_that_could_not_be_posted_is_posted_with_the_next_call(memory: MemoryStorage) -> None:
    refusing = wrap(memory, FailAt("create group/start/00000001.result", times=RETRY.retry_attempts))

    def run(rank: int) -> list[Any]:
        group = opened(refusing if rank == 0 else memory, rank, 2, timeout_seconds=600)
        return [error_of(lambda number=number: told(group, "save", f"{number}")) for number in range(3)]

    ends = in_threads(2, run)
    assert type(ends[0][0]) is StorageUnavailable
    assert ends[0][0].committed is None
    assert [ends[0][1:], ends[1]] == [[None, None], [None, None, None]]


@pytest.mark.parametrize("failing", [(1,), (1, 2), (1, 2, 3)])
def test_a_leader_that_cannot_look_for_marks_tells_the_others_with_its_next_call(
    memory: MemoryStorage, failing: tuple[int, ...]
) -> None:
    # It looks at the end of the first meeting, and at the beginning of each after a failure.
    faults = [FailAt(f"read *0{number}.gone", times=RETRY.retry_attempts) for number in failing]
    blind = wrap(memory, combine(*faults))

    def run(rank: int) -> list[Any]:
        group = opened(blind if rank == 0 else memory, rank, 2, timeout_seconds=600)
        ends = [error_of(lambda number=number: told(group, "save", f"{number}")) for number in range(5)]
        group.close()
        return ends

    leader, other = in_threads(2, run)
    failures = len(failing)
    assert [(type(end), end.committed) for end in leader[:failures]] == [(StorageUnavailable, None)] * failures
    assert [(type(end), end.rank, end.committed) for end in other[:failures]] == [(RankFailed, 0, None)] * failures
    assert leader[failures:] == other[failures:] == [None] * (5 - failures)
    assert list(memory.list("")) == []


def test_an_answer_whose_reply_was_lost_is_no_failure(memory: MemoryStorage) -> None:
    down = wrap(memory, FailAt("create group/start/00000001.00001", effect="after", times=1))
    no_reply = wrap(down, FailAt("read group/start/00000001.00001", times=RETRY.retry_attempts))

    def run(rank: int) -> bytes:
        group = opened(no_reply if rank == 1 else memory, rank, 2, timeout_seconds=600)
        return exchange(group, "save", lambda: b"%d" % rank, joined)

    assert in_threads(2, run) == [b"0, 1"] * 2


def fail() -> bytes:
    raise StorageUnavailable("no", committed=None)


def test_only_the_leader_says_that_nothing_is_committed(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> Any:
        return error_of(lambda: exchange(group, "save", fail if group.rank == 1 else lambda: b"", joined))

    assert [error.committed for error in together(memory, 2, script)] == [False, False]  # join did not run


def test_an_error_of_a_rank_goes_before_a_difference_of_calls(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> list[Any]:
        ends = []
        for failing in (0, 1):
            tag, work = ("fail", fail) if group.rank == failing else ("save", lambda: b"")
            ends.append(error_of(lambda tag=tag, work=work: exchange(group, tag, work, joined)))
        return ends

    for ends in together(memory, 3, script):
        assert [(type(error), error.rank) for error in ends] == [(StorageUnavailable, 0), (StorageUnavailable, 1)]


@pytest.mark.parametrize(("interrupted", "committed"), [(0, None), (1, False)])
def test_an_interrupted_rank_is_in_step_at_its_next_call(
    memory: MemoryStorage, interrupted: int, committed: bool | None
) -> None:
    def interrupt(*_args: Any) -> bytes:
        raise KeyboardInterrupt

    def script(group: BoardGroup) -> list[Any]:
        ends: list[Any] = []
        work = interrupt if group.rank == interrupted == 1 else lambda: b""
        try:
            exchange(group, "save", work, interrupt if interrupted == 0 else joined)
        except (KeyboardInterrupt, CkptstoreError) as error:
            ends.append(error)
        return [*ends, *(told(group, "save", f"{number}") for number in range(2))]

    ends = together(memory, 3, script, timeout_seconds=600)
    assert [end[1:] for end in ends] == [["0", "1"]] * 3
    assert type(ends[interrupted][0]) is KeyboardInterrupt
    others = [ends[rank][0] for rank in range(3) if rank != interrupted]
    assert [(type(error), error.rank, error.committed) for error in others] == [
        (RankFailed, interrupted, committed)
    ] * 2


def test_thousands_of_lanes_leave_nothing(memory: MemoryStorage) -> None:
    most: list[int] = []

    def script(group: BoardGroup) -> int:
        for number in range(400):
            lane = group.lane(f"save-{number}")
            assert exchange(lane, "receipts", lambda: b"x", joined) == b"x, x"
            lane.close()
            told(group, "save", f"{number}")
            if group.rank == 0:
                most.append(sum(1 for _ in memory.list("group/")))
        return len(group._lanes) + len(group._closed)

    assert together(memory, 2, script) == [0, 0]
    assert max(most) < 200  # what is being removed in the background
    assert list(memory.list("group/")) == []


def test_a_lane_stays_until_every_rank_has_closed_it(memory: MemoryStorage) -> None:
    leader_is_done, others_met = threading.Event(), threading.Event()

    def script(group: BoardGroup) -> bytes:
        lane = group.lane("save-1")
        results: list[bytes] = []

        def late() -> None:  # rank 1 reads the result long after the leader has closed the lane
            results.append(exchange(lane, "receipts", lambda: b"x", joined))

        if group.rank == 0:
            late()
            lane.close()
            leader_is_done.set()
        else:
            slow = wrap(memory, lambda call: hold(call))
            group.board._storage = slow  # type: ignore[attr-defined]
            thread = threading.Thread(target=late)
            thread.start()
            leader_is_done.wait(60)
        told(group, "busy", "yes")
        told(group, "busy", "yes")
        others_met.set()
        if group.rank == 1:
            thread.join(60)
            lane.close()
        return results[0]

    def hold(call: Call) -> None:
        if call.key.endswith("save-1.00000001.result") and call.phase == "before":
            others_met.wait(60)

    assert together(memory, 2, script) == [b"x, x"] * 2


def test_a_long_step_without_a_beat_is_not_taken_for_death(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> list[bytes]:
        def slow_join(answers: list[bytes]) -> bytes:
            time.sleep(3.5)  # a listing, a retried request, a slow disk
            return b"done"

        def slow() -> bytes:
            time.sleep(3.5 * group.rank)
            return b""

        return [
            exchange(group, "join", lambda: b"", slow_join),
            exchange(group, "work", slow, lambda answers: b"done"),
        ]

    assert together(memory, 2, script, timeout_seconds=2.5) == [[b"done", b"done"]] * 2


def test_a_leader_that_hangs_is_found_out(memory: MemoryStorage) -> None:
    found = threading.Event()

    def script(group: BoardGroup) -> Any:
        def hang(answers: list[bytes]) -> bytes:
            found.wait(120)
            return b""

        try:
            return error_of(lambda: exchange(group, "save", lambda: b"", hang))
        finally:
            found.set()

    follower = together(memory, 2, script, timeout_seconds=1)[1]
    assert type(follower) is RankTimeout
    assert (follower.ranks, follower.committed) == ((0,), None)


def save(group: BoardGroup, step: int) -> list[str]:
    """One call for a step, as a save makes it."""
    return [told(group, tag, f"{step}", step=step) for tag in STORY]


@pytest.mark.parametrize("steps", [[(5, 6, 7, 8), (6, 7, 8)], [(6, 7, 8), (5, 6, 7, 8)]])
def test_ranks_that_are_one_step_apart_fail_once_and_meet_by_their_steps(
    memory: MemoryStorage, steps: list[tuple[int, ...]]
) -> None:
    # The first difference may be a mistake of the caller. Nobody waits for a timeout.
    def run(rank: int) -> dict[int, CkptstoreError | None]:
        group = opened(memory, rank, 3, timeout_seconds=600)
        return {step: error_of(lambda step=step: save(group, step)) for step in steps[min(rank, 1)]}

    ends = in_threads(3, run)
    for end, mine in zip(ends, (steps[min(rank, 1)] for rank in range(3)), strict=True):
        assert type(end[mine[0]]) is InvalidInput
        assert (end[7], end[8]) == (None, None)
    behind = [end[6] for end, mine in zip(ends, (steps[0], steps[1], steps[1]), strict=True) if mine[0] == 5]
    assert {type(error) for error in behind} == {RankFailed}
    assert all(error is not None and error.committed in (False, None) for error in behind)


def test_a_leader_passes_over_what_was_given_up_in_another_call(memory: MemoryStorage) -> None:
    # The leader fails before it meets anybody, so its next call comes to the number that the others have given up.
    refusing = wrap(memory, FailAt("create group/start/member.00000", times=RETRY.retry_attempts))
    given_up = threading.Event()

    def run(rank: int) -> list[CkptstoreError | None]:
        group = opened(refusing if rank == 0 else memory, rank, 2, timeout_seconds=1 if rank else 600)
        ends = [error_of(lambda: save(group, 5))]
        if rank:
            group.rank_timeout_seconds = 600
            given_up.set()
        given_up.wait(120)
        return [*ends, error_of(lambda: save(group, 6)), error_of(lambda: save(group, 7))]

    leader, other = in_threads(2, run)
    assert (type(leader[0]), type(other[0])) == (StorageUnavailable, RankTimeout)
    assert [*leader[1:], *other[1:]] == [None] * 4


def test_what_refused_answers_leave_is_taken_away(memory: MemoryStorage) -> None:
    def run(rank: int) -> None:
        group = opened(memory, rank, 2, timeout_seconds=600)
        for step in (5, 6, 7, 8) if rank else (6, 7, 8):
            error_of(lambda step=step: save(group, step))
        group.close()

    in_threads(2, run)
    assert [file.key for file in memory.list("group/")] == []
