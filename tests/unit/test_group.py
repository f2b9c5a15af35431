"""The exchange, its messages, signs of life and the choice of a group, with threads as ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from bare_storage import BareStorage
from exchanging import exchange
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import in_threads

from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.errors import (
    AccessDenied,
    CkptstoreError,
    GroupMissing,
    InvalidInput,
    RankFailed,
    RankTimeout,
    StorageFull,
    StorageUnavailable,
    StoreNotShared,
)
from ckptstore.group import SoloGroup, StorageGroup, check_shared, find_group, storage_group
from ckptstore.group.base import this_node
from ckptstore.group.board_group import BoardGroup
from ckptstore.group.meeting import pack, unpack
from ckptstore.group.message import DRAIN_LANE, Message
from ckptstore.runtime.beat import beat
from ckptstore.runtime.shown import show_ranks
from ckptstore.storage.base import CreatesExclusively, Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.storage.retry import with_retries
from ckptstore.testing import CountCalls, FailAt, wrap

RETRY = RetryConfig(retry_attempts=3, retry_wait_initial_seconds=0.01)


def opened(storage: Storage, rank: int, size: int, *, timeout_seconds: float = 60) -> BoardGroup:
    group = StorageGroup(rank, size, "start", node=f"node{rank}")
    return group.open(with_retries(storage, RETRY), rank_timeout_seconds=timeout_seconds)


def together(
    storage: Storage, size: int, script: Callable[[BoardGroup], Any], *, timeout_seconds: float = 60
) -> list[Any]:
    """Run the script as every rank of a group, and close it."""

    def run(rank: int) -> Any:
        group = opened(storage, rank, size, timeout_seconds=timeout_seconds)
        try:
            return script(group)
        finally:
            group.close()

    return in_threads(size, run)


def named(group: BoardGroup) -> Callable[[], bytes]:
    return lambda: b"rank %d" % group.rank


def joined(answers: list[bytes]) -> bytes:
    return b", ".join(answers)


@pytest.fixture(params=["local", "memory", "plain"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path / "store")
    memory = MemoryStorage(f"memory://{tmp_path.name}")
    if request.param == "memory":
        return memory
    plain = BareStorage(memory)
    assert not isinstance(plain, CreatesExclusively)
    return plain


@pytest.fixture
def memory(tmp_path: Path) -> MemoryStorage:
    return MemoryStorage(f"memory://{tmp_path.name}")


def test_every_rank_gets_what_the_leader_joined_in_rank_order(storage: Storage) -> None:
    def script(group: BoardGroup) -> list[bytes]:
        results = [exchange(group, "first", named(group), joined)]
        results += [exchange(group, f"call {n}", lambda n=n: bytes([n]) * group.rank, joined) for n in range(5)]
        return results

    ends = together(storage, 4, script)
    assert ends[0] == [
        b"rank 0, rank 1, rank 2, rank 3",
        *(b", ".join(bytes([n]) * r for r in range(4)) for n in range(5)),
    ]
    assert ends == [ends[0]] * 4


def test_a_closed_group_leaves_nothing_in_the_storage(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    counted = CountCalls()

    def script(group: BoardGroup) -> int:
        for n in range(6):
            exchange(group, f"call {n}", named(group), joined)
        exchange(group.lane("background"), "save", named(group), joined)
        return len(list(storage.list("group/start/")))

    ends = together(wrap(storage, counted), 3, script)
    assert max(ends) > 0  # the messages did lie there
    assert max(ends) < 3 + 3 * 4 + 4, "messages of finished exchanges pile up"
    assert list(storage.list("")) == []
    assert not (tmp_path / "store" / "group" / "start").exists()
    assert counted.counts["create"] == 3 + 7 * 3  # a claim for each rank, one message for each rank and exchange


def test_a_closed_group_is_not_used_again(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> BoardGroup:
        exchange(group, "save", named(group), joined)
        return group

    for group in together(memory, 2, script):
        group.close()
        with pytest.raises(InvalidInput, match="closed"):
            exchange(group, "save", named(group), joined)
        with pytest.raises(InvalidInput, match="closed"):
            exchange(group.lane("background"), "save", named(group), joined)
    assert list(memory.list("")) == []


@pytest.mark.parametrize("failing", [{0}, {2}, {1, 3}, {0, 1, 2, 3}])
def test_a_failure_of_work_is_the_same_error_on_every_rank(memory: MemoryStorage, failing: set[int]) -> None:
    own: dict[int, StorageFull] = {}

    def work(rank: int) -> bytes:
        if rank in failing:
            own[rank] = StorageFull(f"no space on {rank}", step=12, file=f"shard-{rank}", hint="Free some")
            raise own[rank]
        return b""

    def never(answers: list[bytes]) -> bytes:
        raise AssertionError("join runs although a rank failed")

    ends = together(memory, 4, lambda group: exchange(group, "save", lambda: work(group.rank), never))
    first = min(failing)
    for rank, error in enumerate(ends):
        assert type(error) is StorageFull
        assert (error.rank, error.step, error.file, error.hint) == (first, 12, f"shard-{first}", "Free some")
        assert error.ranks == tuple(sorted(failing))
        assert error.committed is False
        assert error.__cause__ is own.get(rank)
    others = sorted(failing - {first})
    assert str(ends[0]) == str(ends[3])
    assert (show_ranks(others) in str(ends[0])) if others else ("failed too" not in str(ends[0]))


def test_a_foreign_error_is_a_rank_failed_with_its_cause_where_it_happened(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> bytes:
        return exchange(group, "save", lambda: bytes([1 // (2 - group.rank)]), joined)

    ends = together(memory, 3, script)
    assert [type(error) for error in ends] == [RankFailed] * 3
    assert all("ZeroDivisionError" in str(error) and error.rank == 2 for error in ends)
    assert [type(error.__cause__) for error in ends] == [type(None), type(None), ZeroDivisionError]


def test_a_failure_of_join_reaches_every_rank(memory: MemoryStorage) -> None:
    def join(answers: list[bytes]) -> bytes:
        raise StorageUnavailable("the record", committed=None)

    ends = together(memory, 3, lambda group: exchange(group, "commit", named(group), join))
    assert [type(error) for error in ends] == [StorageUnavailable] * 3
    assert [(error.committed, error.rank) for error in ends] == [(None, 0)] * 3

    def broken(answers: list[bytes]) -> bytes:
        raise KeyError("bug")

    ends = together(memory, 3, lambda group: exchange(group, "commit", named(group), broken))
    assert [(type(error), error.committed) for error in ends] == [(RankFailed, None)] * 3  # it may have committed


def test_a_rank_in_a_thread_that_fails_its_test_fails_it() -> None:
    with pytest.raises(pytest.fail.Exception, match="not so"):
        in_threads(2, lambda rank: pytest.fail("not so") if rank == 1 else None)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_rank_tells_the_others_and_goes(memory: MemoryStorage, interrupted: int) -> None:
    def work(rank: int) -> bytes:
        if rank == interrupted:
            raise KeyboardInterrupt
        return b""

    def script(group: BoardGroup) -> Any:
        try:
            return exchange(group, "save", lambda: work(group.rank), joined)
        except KeyboardInterrupt as error:
            return error

    ends = together(memory, 3, script)
    assert type(ends[interrupted]) is KeyboardInterrupt
    others = [error for rank, error in enumerate(ends) if rank != interrupted]
    assert [(type(error), error.rank) for error in others] == [(RankFailed, interrupted)] * 2
    assert "KeyboardInterrupt" in str(others[0])


def test_ranks_that_call_different_things_are_told_so(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> bytes:
        return exchange(group, "save 12" if group.rank != 2 else "load", named(group), joined)

    for error in together(memory, 3, script):
        assert type(error) is InvalidInput
        assert error.ranks == (0, 2)
        assert "rank 0 calls 'save 12'" in str(error)
        assert "rank 2 'load'" in str(error)


def test_ranks_with_different_world_sizes_are_told_so(memory: MemoryStorage) -> None:
    def run(rank: int) -> bytes:
        return exchange(opened(memory, rank, 4 if rank == 0 else 2), "save", lambda: b"", joined)

    for error in in_threads(2, run):
        assert type(error) is InvalidInput
        assert "world size 4" in str(error)
        assert "world size 2" in str(error)


def test_two_processes_that_hold_one_rank_are_both_named(storage: Storage) -> None:
    first, second = (opened(storage, 1, 2) for _ in range(2))
    leader = threading.Thread(target=lambda: exchange(opened(storage, 0, 2), "save", lambda: b"", joined))
    leader.start()
    assert exchange(first, "save", lambda: b"mine", joined) == b", mine"
    leader.join()
    storage_group._met.clear()  # as in another process
    with pytest.raises(InvalidInput, match="rank 1 of the job start 'start'") as caught:
        exchange(second, "save", lambda: b"mine", joined)
    assert str(caught.value).count("process ") == 2
    assert "start_token" in (caught.value.hint or "")


def test_a_start_token_used_by_a_dead_job_is_refused_on_every_rank(storage: Storage) -> None:
    def first_start(rank: int) -> bytes:
        return exchange(opened(storage, rank, 2), "save", lambda: b"", joined)

    assert in_threads(2, first_start) == [b", "] * 2  # never closed
    storage_group._met.clear()  # as in other processes
    for error in in_threads(2, first_start):
        assert type(error) is InvalidInput
        assert "Two processes take part" in str(error)


def test_a_silent_rank_is_named_to_all_others(memory: MemoryStorage) -> None:
    def run(rank: int) -> Any:
        if rank in (1, 3):
            return None
        return exchange(opened(memory, rank, 4, timeout_seconds=1), "save 12", lambda: b"", joined)

    ends = in_threads(4, run)
    for error in (ends[0], ends[2]):
        assert type(error) is RankTimeout
        assert error.ranks == (1, 3)
        assert "Ranks 1 and 3" in str(error)
        assert "'save 12'" in str(error)
        assert memory.uri in str(error)


def test_a_silent_leader_is_named_and_leaves_the_outcome_unknown(memory: MemoryStorage) -> None:
    with pytest.raises(RankTimeout) as caught:
        exchange(opened(memory, 1, 2, timeout_seconds=0.5), "save", lambda: b"", joined)
    assert caught.value.ranks == (0,)
    assert caught.value.committed is None
    assert "every rank must call save" in str(caught.value)


def test_an_error_is_worth_more_than_a_silence(memory: MemoryStorage) -> None:
    def fail() -> bytes:
        raise StorageFull("no space")

    def run(rank: int) -> Any:
        return None if rank == 1 else exchange(opened(memory, rank, 3, timeout_seconds=1), "save", fail, joined)

    ends = in_threads(3, run)
    assert [type(ends[0]), type(ends[2])] == [StorageFull] * 2
    assert ends[2].ranks == (0, 1, 2)
    assert "Rank 1 gave no sign of life" in str(ends[2])


def test_only_in_the_first_meeting_is_a_rank_suspected_of_not_calling_at_all(memory: MemoryStorage) -> None:
    def run(rank: int) -> str:
        group = opened(memory, rank, 2, timeout_seconds=1)
        exchange(group, "first", lambda: b"", joined)
        if rank == 1:
            return ""
        with pytest.raises(RankTimeout) as caught:
            exchange(group, "second", lambda: b"", joined)
        return str(caught.value)

    text, _ = in_threads(2, run)
    assert "Rank 1 gave no sign of life" in text
    assert "must call save" not in text


def test_a_slow_rank_that_gives_signs_is_waited_for(memory: MemoryStorage) -> None:
    def slow() -> bytes:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            beat()
            time.sleep(0.02)
        return b"done"

    def script(group: BoardGroup) -> list[bytes]:
        follower = exchange(group, "slow follower", slow if group.rank == 1 else lambda: b"", joined)
        return [follower, exchange(group, "slow join", lambda: b"", lambda answers: slow())]

    assert together(memory, 3, script, timeout_seconds=2) == [[b", done, ", b"done"]] * 3


def test_a_rank_that_has_left_is_not_waited_for(memory: MemoryStorage) -> None:
    def run(rank: int) -> Any:
        group = opened(memory, rank, 2, timeout_seconds=8)
        exchange(group, "first", lambda: b"", joined)
        if rank == 1:
            group.close()
            return None
        return exchange(group, "second", lambda: b"", joined)

    error = in_threads(2, run)[0]
    assert type(error) is RankFailed  # at once: not a RankTimeout
    assert error.ranks == (1,)
    assert "Rank 1 left the group" in str(error)


def test_lanes_keep_orders_of_their_own(memory: MemoryStorage) -> None:
    inside = threading.Barrier(4)

    def script(group: BoardGroup) -> list[bytes]:
        results: list[bytes] = [b"", b""]

        def upload() -> bytes:
            inside.wait(60)  # both ranks are in the background save while the main lane goes on
            inside.wait(60)
            return b"uploaded"

        def in_background() -> None:
            results[1] = exchange(group.lane("background"), "save", upload, joined)

        thread = threading.Thread(target=in_background)
        thread.start()
        inside.wait(60)
        results[0] = b"; ".join(exchange(group, f"load {n}", named(group), joined) for n in range(3))
        inside.wait(60)
        thread.join(60)
        return results

    assert together(memory, 2, script) == [[b"; ".join([b"rank 0, rank 1"] * 3), b"uploaded, uploaded"]] * 2


def test_a_rank_that_hangs_in_a_save_is_found_though_it_drains(memory: MemoryStorage) -> None:
    over = threading.Event()

    def drain() -> bytes:
        while not over.wait(0.02):
            beat()
        return b""

    def script(group: BoardGroup) -> Any:
        drains = threading.Thread(target=lambda: exchange(group.lane(DRAIN_LANE), "drain", drain, joined))
        drains.start()
        try:
            work = (lambda: b"") if group.rank == 0 else (lambda: b"late" if over.wait(60) else b"")
            return exchange(group.lane("save"), "receipts", work, joined)
        except RankTimeout as error:
            return error
        finally:
            over.set()
            drains.join(60)

    ends = together(memory, 2, script, timeout_seconds=1)
    assert [(type(end), end.ranks) for end in ends] == [(RankTimeout, (1,))] * 2
    assert [*memory.list("")] == []


def test_a_meeting_inside_a_meeting_is_an_error_and_no_hang(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> bytes:
        return exchange(group, "outer", lambda: exchange(group, "inner", lambda: b"", joined), joined)

    for error in together(memory, 2, script):
        assert type(error) is RankFailed
        assert "begun inside another one of the same lane" in str(error)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_value_that_no_message_holds_is_refused_on_all_ranks(memory: MemoryStorage, failing: int) -> None:
    def script(group: BoardGroup) -> bytes:
        refused = pytest.raises(RankFailed, match="set cannot be brought to a meeting")
        with refused as caught, group.meeting("refused") as meeting:
            meeting.gather({1, 2} if group.rank == failing else None)
        assert caught.value.rank == failing
        return exchange(group, "save", named(group), joined)

    assert together(memory, 3, script, timeout_seconds=600) == [b"rank 0, rank 1, rank 2"] * 3


def test_requests_are_tried_again_and_a_lost_reply_is_settled(memory: MemoryStorage) -> None:
    faults = [
        FailAt("create *.00001", effect="after"),  # rank 1's answer is there, its reply is lost
        FailAt("create *.result"),
        FailAt("list *"),
    ]
    storage: Storage = memory
    for fault in faults:
        storage = wrap(storage, fault)
    ends = together(storage, 3, lambda group: exchange(group, "save", named(group), joined))
    assert ends == [b"rank 0, rank 1, rank 2"] * 3
    assert [fault.struck for fault in faults] == [1, 1, 1]


def test_a_message_that_is_seen_half_written_is_read_again(tmp_path: Path) -> None:
    plain = BareStorage(MemoryStorage(f"memory://{tmp_path.name}"))
    half = Message(tag="save", rank=1, world_size=2, by="rank 1's process", payload=pack(b"rank 1")).encode()
    plain.write("group/start/00000001.00001", [memoryview(half[: len(half) // 2])])
    leader: list[Any] = []
    thread = threading.Thread(
        target=lambda: leader.append(exchange(opened(plain, 0, 2), "save", lambda: b"rank 0", joined))
    )
    thread.start()
    time.sleep(0.2)
    assert not leader
    plain.write("group/start/00000001.00001", [memoryview(half)])
    thread.join(60)
    assert leader == [b"rank 0, rank 1"]


def test_a_storage_that_refuses_is_told_on_the_rank_and_the_others_do_not_hang(memory: MemoryStorage) -> None:
    refusing = wrap(memory, FailAt("create *.00001", error=AccessDenied("no"), skip=1, times=None))

    def run(rank: int) -> Any:
        return exchange(opened(refusing, rank, 2, timeout_seconds=1), "save", lambda: b"", joined)

    ends = in_threads(2, run)
    assert type(ends[1]) is AccessDenied
    assert type(ends[0]) is RankTimeout
    assert ends[0].ranks == (1,)


def test_a_wait_costs_few_requests(memory: MemoryStorage) -> None:
    counted = CountCalls()

    def script(group: BoardGroup) -> bytes:
        return exchange(group, "save", lambda: time.sleep(2 * group.rank) or b"", joined)

    together(wrap(memory, counted), 2, script)
    assert counted.counts["list"] + counted.counts["read"] < 100


@pytest.mark.parametrize("size", [64, 100])
def test_the_leader_reads_each_answer_once(memory: MemoryStorage, size: int) -> None:
    counted = CountCalls()
    storage = wrap(memory, counted)
    for rank in range(1, size):
        message = Message(tag="save", rank=rank, world_size=size, by=f"process of {rank}", payload=pack(b"%d" % rank))
        memory.write(f"group/start/00000001.{rank:05d}", [memoryview(message.encode())])
    leader = opened(storage, 0, size)
    assert exchange(leader, "save", lambda: b"0", joined) == b", ".join(b"%d" % rank for rank in range(size))
    assert counted.counts["read"] == size - 1 + 1  # and whether somebody has given up waiting
    assert counted.counts["list"] == 1


def test_the_leader_names_the_ranks_that_do_not_come(
    memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptstore.group.board_group._COME_SECONDS", 0.05)

    def script(group: BoardGroup) -> bytes:
        if group.rank == 2:  # it waits elsewhere until the line is there
            wait_for(lambda: "waited 0.05 s for rank 2 in 'save'; ranks 0-1 came" in caplog.text)
        return exchange(group, "save", lambda: b"", joined)

    together(memory, 3, script)
    assert caplog.text.count("Every rank must make the call") == 1


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_followers_that_wait_write_nothing(memory: MemoryStorage) -> None:
    counted = CountCalls()

    def script(group: BoardGroup) -> bytes:
        return exchange(group, "save", lambda: time.sleep(1.0 if group.rank == 2 else 0) or b"", joined)

    together(wrap(memory, counted), 4, script, timeout_seconds=3)
    signs = Counter(call.key for call in counted.calls if call.verb == "write")
    assert signs["group/start/life.00000"] > 1  # the leader's signs, for those that wait for it, and its farewell
    assert [signs[f"group/start/life.{rank:05d}"] for rank in (1, 3)] == [1, 1]
    assert signs["group/start/life.00002"] > 1  # it works, and says so


def test_a_root_that_is_not_shared_names_the_nodes(memory: MemoryStorage, tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]

    def run(rank: int) -> None:
        check_shared(opened(memory, rank, 4), LocalStorage(roots[rank]), config=StoreConfig(rank_timeout_seconds=8))

    for error in in_threads(4, run):
        assert type(error) is StoreNotShared
        assert error.ranks == (2, 3)
        assert "node2, node3" in str(error)
        assert "node0 (rank 0)" in str(error)
    assert [file.key for root in roots for file in LocalStorage(root).list("")] == []


def test_a_shared_root_passes_and_keeps_nothing_of_the_probe(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    assert together(storage, 3, lambda group: check_shared(group, storage)) == [None] * 3
    assert list(storage.list("")) == []


def test_alone_the_root_is_not_probed(memory: MemoryStorage) -> None:
    counted = CountCalls()
    check_shared(SoloGroup(), wrap(memory, counted))
    assert counted.total == 0


def test_a_process_alone_joins_its_own_answer() -> None:
    group = SoloGroup()
    assert (group.rank, group.world_size) == (0, 1)
    assert exchange(group, "save", lambda: b"x", lambda answers: answers[0] + b"y") == b"xy"
    assert group.lane("background") is group
    with pytest.raises(ZeroDivisionError):
        exchange(group, "save", lambda: bytes([1 // 0]), joined)
    assert SoloGroup().start_token != group.start_token
    assert group.node == this_node()


class TestFindGroup:
    def find(self, given: object, storage: Storage) -> Any:
        return find_group(given, storage=storage, config=StoreConfig(rank_timeout_seconds=7))

    def test_alone(self, memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(self.find(None, memory), SoloGroup)
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert isinstance(self.find(None, memory), SoloGroup)

    def test_several_processes_without_a_way_between_them(
        self, memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(GroupMissing, match="WORLD_SIZE is 4") as caught:
            self.find(None, memory)
        assert "init_process_group" in str(caught.value)
        assert "group=" in str(caught.value)

    def test_a_storage_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        group = self.find(StorageGroup(1, 4, "job-7.2", node="rack1"), LocalStorage(tmp_path))
        assert (group.rank, group.world_size, group.start_token, group.node) == (1, 4, "job-7.2", "rack1")
        assert group.rank_timeout_seconds == 7
        assert list(tmp_path.iterdir()) == []
        alone = self.find(StorageGroup(0, 1, "job-7.2", node="rack1"), LocalStorage(tmp_path))
        assert isinstance(alone, SoloGroup)
        assert (alone.start_token, alone.node) == ("job-7.2", "rack1")

    def test_solo_is_this_process_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert isinstance(self.find("solo", LocalStorage(tmp_path)), SoloGroup)
        with pytest.raises(GroupMissing, match="group='solo'"):
            self.find(None, LocalStorage(tmp_path))

    def test_a_group_at_work_is_taken_as_it_is(self, memory: MemoryStorage) -> None:
        group = opened(memory, 1, 2)
        assert self.find(group, memory) is group

    def test_memory_is_refused_for_several_processes(self, memory: MemoryStorage) -> None:
        with pytest.raises(InvalidInput, match="memory of one process, and this job has 2"):
            self.find(StorageGroup(0, 2, "t"), memory)

    @pytest.mark.parametrize("given", ["gloo", 3, object(), -100])
    def test_anything_else_is_refused(self, memory: MemoryStorage, given: object) -> None:
        with pytest.raises(InvalidInput, match="a StorageGroup, a ProcessGroup of torch or 'solo'"):
            self.find(given, memory)


@pytest.mark.parametrize(
    ("rank", "size", "token"),
    [(rank, size, "t") for rank, size in ((2, 2), (-1, 2), (True, 2), (0.0, 2), (0, 0), (0, "2"))]
    + [(0, 2, token) for token in ("", "a/b", "a b", "t" * 65, "t\n", None, ".", "..")],
)
def test_a_storage_group_that_makes_no_sense_is_refused(rank: Any, size: Any, token: Any) -> None:
    with pytest.raises(InvalidInput):
        StorageGroup(rank, size, token)


def test_importing_and_finding_a_group_loads_no_torch() -> None:
    code = """
import sys
from ckptstore.group import find_group, StorageGroup
from ckptstore.config import StoreConfig
from ckptstore.storage.disk.local import LocalStorage
find_group(None, storage=LocalStorage("/nowhere"), config=StoreConfig())
find_group(StorageGroup(0, 2, "t"), storage=LocalStorage("/nowhere"), config=StoreConfig())
loaded = {"torch", "numpy", "tenacity", "fsspec"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


texts = st.text(max_size=20)
messages = st.builds(
    Message,
    tag=texts,
    rank=st.integers(0, 10**5),
    world_size=st.integers(1, 10**5),
    by=texts,
    payload=st.binary(max_size=200),
    error=st.none() | st.just(StorageFull("no space", step=3).to_wire()),
)


@given(messages, st.data())
def test_a_message_survives_the_wire_and_a_torn_or_damaged_one_is_none(message: Message, data: st.DataObject) -> None:
    wire = message.encode()
    assert Message.decode(wire) == message
    length = data.draw(st.integers(0, len(wire) - 1))
    assert Message.decode(wire[:length]) is None
    if message.payload:
        position = len(wire) - len(message.payload) + data.draw(st.integers(0, len(message.payload) - 1))
        damaged = bytearray(wire)
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        assert Message.decode(bytes(damaged)) is None


def test_a_message_of_a_newer_version_is_refused() -> None:
    wire = Message(tag="t", rank=0, world_size=1, by="me").encode().replace(b'"version": 1', b'"version": 2')
    with pytest.raises(CkptstoreError, match="one version of ckptstore"):
        Message.decode(wire)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        *(([3], "rank 3"), ([3, 3], "rank 3"), ([5, 3], "ranks 3 and 5"), ([0, 1, 2], "ranks 0-2")),
        *(([12, 0, 1, 9, 13], "ranks 0-1, 9 and 12-13"), (range(1024), "ranks 0-1023")),
        (range(0, 60, 2), "ranks " + ", ".join(str(n) for n in range(0, 40, 2)) + " and 10 more"),
    ],
)
def test_ranks_are_spoken(ranks: list[int], text: str) -> None:
    assert show_ranks(list(ranks)) == text


@pytest.mark.parametrize(
    "value", [None, 3, "x", b"", b"\n{", [1, b"ab", {"x": [b"c", b""]}], {"a": {"b": b"\0" * 5}, "c": [[b"1"], b"2"]}]
)
def test_a_value_comes_back_as_it_was_with_bytes_anywhere(value: Any) -> None:
    assert unpack(pack(value)) == value


def test_a_block_after_the_leader_was_heard_fails_alone(memory: MemoryStorage) -> None:
    def script(group: BoardGroup) -> Any:
        with pytest.raises(ValueError, match="mine") if group.rank else nullcontext(), group.meeting("save") as meeting:
            meeting.tell(lambda: 1)
            if group.rank == 1:
                raise ValueError("mine")
        return exchange(group, "next", named(group), joined)

    assert together(memory, 2, script) == [b"rank 0, rank 1"] * 2


def test_ranks_that_neither_bring_nor_hear_anything_wait_for_each_other(memory: MemoryStorage) -> None:
    began = threading.Event()

    def script(group: BoardGroup) -> bool:
        with group.meeting("wait"):
            if group.rank == 2:
                time.sleep(0.3)
                began.set()
        return began.is_set()

    assert together(memory, 3, script) == [True] * 3


def test_more_ranks_than_the_store_alone_can_carry_are_refused() -> None:
    assert StorageGroup(127, 128, "start").world_size == 128
    with pytest.raises(InvalidInput, match="at most 128 ranks meet through the store alone") as caught:
        StorageGroup(0, 129, "start")
    assert "init_process_group" in str(caught.value.hint)
