"""Ranks that meet in a tree: what reaches the leader by bundles, and what happens where a bundle does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.config import RetryConfig
from ckptstore.errors import AccessDenied, CkptstoreError, RankTimeout
from ckptstore.group import BoardGroup, StorageGroup
from ckptstore.group.keys import Keys
from ckptstore.group.message import Message
from ckptstore.group.tree import pack, unpack
from ckptstore.runtime.beat import Beat
from ckptstore.storage.base import Storage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing import Call, CountCalls, wrap

RETRY = RetryConfig(retry_attempts=3, retry_wait_initial_seconds=0.01)
SIZE, FAN_IN = 9, 3
HEADS = (1, 3, 6)


class Narrow(StorageGroup):
    """Nine ranks in three blocks."""

    _fan_in = FAN_IN


@pytest.fixture
def memory(tmp_path: Path) -> MemoryStorage:
    return MemoryStorage(f"memory://{tmp_path.name}")


def opened(storage: Storage, rank: int, *, size: int = SIZE, timeout_seconds: float = 60) -> BoardGroup:
    group = Narrow(rank, size, "start", f"node{rank}")
    return group.open(storage, rank_timeout_seconds=timeout_seconds, retry=RETRY)


def together(
    storage_of: Callable[[int], Storage], script: Callable[[BoardGroup], Any], *, timeout_seconds: float = 60
) -> list[Any]:
    """What the script returns or raises on each rank; then the groups are closed."""
    ends: list[Any] = [None] * SIZE

    def run(rank: int) -> None:
        group = opened(storage_of(rank), rank, timeout_seconds=timeout_seconds)
        try:
            ends[rank] = script(group)
        except BaseException as error:
            ends[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), f"a rank hangs; so far: {ends}"
    return ends


def joined(answers: list[bytes], beat: Beat) -> bytes:
    return b" ".join(answers)


def number(group: BoardGroup) -> bytes:
    return b"%d" % group.rank


EVERYBODY = b" ".join(b"%d" % rank for rank in range(SIZE))


def test_the_leader_reads_bundles_and_closing_leaves_nothing(memory: MemoryStorage) -> None:
    counted = CountCalls()
    storages = {0: wrap(memory, counted)}

    def script(group: BoardGroup) -> list[bytes]:
        def late(beat: Beat) -> bytes:
            time.sleep(0.3 if group.rank == 5 else 0)  # so the leader looks when nothing is complete
            return number(group)

        with_lane = group.lane("save-1")
        found = [group.exchange(f"call {call}", late, joined) for call in range(3)]
        found.append(with_lane.exchange("receipts", late, joined))
        with_lane.close()
        return found

    assert together(lambda rank: storages.get(rank, memory), script) == [[EVERYBODY] * 4] * SIZE
    read = [call.key for call in counted.calls if call.verb == "read" and call.phase == "before"]
    assert len([key for key in read if ".bundle." in key]) >= 4 * len(HEADS)
    answers = [Keys(lane, SIZE).answer(call, rank) for lane in ("", "save-1") for call in range(5) for rank in range(9)]
    assert not {f"group/start/{key}" for key in answers} & set(read)
    assert list(memory.list("group/")) == []


def test_sixteen_thousand_answers_are_read_in_a_few_hundred_requests(memory: MemoryStorage) -> None:
    counted, size = CountCalls(), 16_384
    keys = Keys("", size, 100)
    for bundle, answers in keys.bundles(1).items():
        held = {
            key: Message(tag="save", rank=int(key[-5:]), world_size=size, by=key, payload=key[-5:].encode()).encode()
            for key in answers
        }
        message = Message(tag="bundle", rank=1, world_size=size, by="a head", payload=pack(held))
        memory.write(f"group/start/{bundle}", [memoryview(message.encode())])
    group = StorageGroup(0, size, "start").open(wrap(memory, counted), rank_timeout_seconds=60, retry=RETRY)
    result = group.exchange("save", lambda beat: b"00000", joined)
    assert result == b" ".join(b"%05d" % rank for rank in range(size))
    assert counted.counts["read"] == 164 + 1  # and whether somebody has given up waiting
    assert counted.counts["list"] == 1


@pytest.mark.parametrize("odd", [b"", b"half a bund", "no pack", "of others"])
def test_a_bundle_that_is_damaged_loses_nothing(memory: MemoryStorage, odd: bytes | str) -> None:
    if isinstance(odd, str):
        payload = b"[[1]]\n" if odd == "no pack" else pack({"00000001.00099": b"?", "00000001.00004": b"?"})
        odd = Message(tag="bundle", rank=3, world_size=SIZE, by="?", payload=payload).encode()
    memory.write("group/start/00000001.bundle.00003", [memoryview(odd)])
    ends = together(lambda rank: memory, lambda group: group.exchange("save", lambda beat: number(group), joined))
    assert ends == [EVERYBODY] * SIZE


@pytest.mark.parametrize("failing", [1, 3, 4])
def test_an_error_of_a_head_or_below_one_reaches_all_with_its_rank(memory: MemoryStorage, failing: int) -> None:
    def script(group: BoardGroup) -> bytes:
        def work(beat: Beat) -> bytes:
            if group.rank == failing:
                raise AccessDenied("no")
            return b""

        return group.exchange("save", work, joined)

    for end in together(lambda rank: memory, script):
        assert type(end) is AccessDenied
        assert end.ranks == (failing,)


def without_leave(play: Callable[[int], None], ranks: set[int]) -> None:
    """Ranks in threads, which end without a last sign."""
    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.parametrize("dead", [3, 8])
def test_a_dead_head_and_a_dead_leaf_are_named_and_nobody_else(memory: MemoryStorage, dead: int) -> None:
    ends: dict[int, CkptstoreError] = {}

    def play(rank: int) -> None:
        try:
            opened(memory, rank, timeout_seconds=2).exchange("save", lambda beat: b"", joined)
        except CkptstoreError as error:
            ends[rank] = error

    without_leave(play, set(range(SIZE)) - {dead})
    assert len(ends) == SIZE - 1
    for end in ends.values():
        assert type(end) is RankTimeout
        assert end.ranks == (dead,)
        assert "'save'" in end.message


def test_a_head_that_dies_when_it_has_answered_is_not_needed(memory: MemoryStorage) -> None:
    """Its answer is there, so the exchange completes; the next one names it."""
    message = Message(tag="save", rank=3, world_size=SIZE, by="a dead head", payload=b"3")
    memory.write(f"group/start/{Keys('', SIZE).answer(1, 3)}", [memoryview(message.encode())])
    ends: dict[int, tuple[bytes, CkptstoreError]] = {}

    def play(rank: int) -> None:
        group = opened(memory, rank, timeout_seconds=3)
        result = group.exchange("save", lambda beat: number(group), joined)
        try:
            group.exchange("next", lambda beat: b"", joined)
        except CkptstoreError as error:
            ends[rank] = result, error

    without_leave(play, set(range(SIZE)) - {3})
    assert len(ends) == SIZE - 1
    for result, error in ends.values():
        assert result == EVERYBODY
        assert type(error) is RankTimeout
        assert error.ranks == (3,)


@pytest.mark.parametrize("verb", ["list", "create"])
def test_a_head_that_the_storage_refuses_a_bundle_fails_nothing(memory: MemoryStorage, verb: str) -> None:
    refused: list[str] = []

    def refuse(call: Call) -> None:
        is_answers = call.verb == "list" and call.key.startswith("group/start/0000000")
        is_bundle = call.verb == "create" and ".bundle." in call.key
        if call.phase == "before" and call.verb == verb and (is_answers or is_bundle):
            refused.append(call.key)
            raise AccessDenied(f"{verb} of {call.key}")

    storage = wrap(memory, refuse)
    ends = together(
        lambda rank: storage if rank in HEADS else memory,
        lambda group: [group.exchange(f"call {call}", lambda beat: number(group), joined) for call in range(2)],
    )
    assert ends == [[EVERYBODY] * 2] * SIZE
    assert refused


def test_ranks_that_call_different_things_are_told_so_through_a_bundle(memory: MemoryStorage) -> None:
    ends = together(
        lambda rank: memory,
        lambda group: group.exchange("load" if group.rank == 7 else "save", lambda beat: b"", joined),
    )
    assert all(isinstance(end, CkptstoreError) and 7 in end.ranks for end in ends), ends


def test_a_rank_that_is_behind_meets_the_others_again(memory: MemoryStorage) -> None:
    """After a failure the answer of a lower step is refused, though a bundle has brought it."""

    def script(group: BoardGroup) -> list[Any]:
        found: list[Any] = []
        for step in (1, 2, 3) if group.rank == 4 else (2, 3):
            try:
                found.append(group.exchange(f"save {step}", lambda beat: number(group), joined, step=step))
            except CkptstoreError as error:
                found.append(error)
        return found

    ends = together(lambda rank: memory, script)
    assert [end[-1] for end in ends] == [EVERYBODY] * SIZE
    assert any(isinstance(end, CkptstoreError) for end in ends[4])


def test_blocks_cover_every_rank_but_the_leader_once() -> None:
    for size in range(1, 30):
        for fan_in in (1, 2, 3, 7):
            keys = Keys("lane", size, fan_in)
            held = [key for block in keys.bundles(5).values() for key in block]
            heads = dict(filter(None, (keys.bundle_of_head(5, rank) for rank in range(1, size))))
            if size > fan_in:
                assert sorted(held) == [keys.answer(5, rank) for rank in range(1, size)]
                assert heads == {bundle: block for bundle, block in keys.bundles(5).items() if block}
            else:
                assert not held
                assert not heads


def test_a_pack_is_unpacked_and_anything_else_is_refused() -> None:
    answers = {"a": b"", "b": b"1\n2", "c": b"\x00" * 100}
    assert unpack(pack(answers)) == answers
    for odd in (
        b"",
        b"{}",
        b"[]",
        b"1\n",
        b"[[1]]\n",
        b'[["a", 2]]\n1',
        b'[["a", "b"]]\n',
        b'[["a", -1]]\n1',
        b"[[[]]]\n",
    ):
        with pytest.raises(ValueError, match=r".*"):
            unpack(odd)
