"""What every board must do, on each of them; and what becomes of a key-value store that is gone."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from exchanging import exchange
from test_group import wait_for
from thread_ranks import in_threads

from ckptstore.errors import CkptstoreError, GroupMissing, RankTimeout
from ckptstore.group.board_group import Board, BoardGroup
from ckptstore.group.caller import Caller
from ckptstore.group.life import LEFT
from ckptstore.group.storage_board import StorageBoard
from ckptstore.group.torch_board import TorchBoard, TorchGroup, open_served_group
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage

MANY = [f"00000001.{rank:05d}" for rank in range(300)]


def tcp_store(timeout_seconds: float = 60) -> Any:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
    )


def torch_board(store: Any, timeout_seconds: float = 60, server_ranks: tuple[int, ...] = (0,)) -> TorchBoard:
    return TorchBoard(
        store, prefix="ckptstore/0/1", world_size=4, timeout_seconds=timeout_seconds, server_ranks=server_ranks
    )


@pytest.fixture(params=["directory", "memory", "hash store", "file store", "tcp store"])
def open_board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Board]]:
    """Opens boards of several ranks that show the same."""
    boards: list[Board] = []
    storage = LocalStorage(tmp_path) if request.param == "directory" else MemoryStorage(f"memory://{tmp_path.name}")
    stores = {
        "hash store": dist.HashStore,
        "file store": lambda: dist.FileStore(str(tmp_path / "file"), -1),
        "tcp store": tcp_store,
    }
    store = stores[request.param]() if request.param in stores else None

    def opened() -> Board:
        if store is not None:
            boards.append(torch_board(store))
        else:
            boards.append(StorageBoard(storage, start_token="t", world_size=4))
        return boards[-1]

    yield opened
    for board in boards:
        board.close(emptied=False)


def test_a_post_is_seen_by_others_and_never_changed(open_board: Callable[[], Board]) -> None:
    mine, theirs = open_board(), open_board()
    assert theirs.fetch(["00000001.00001"]) == {}
    assert mine.post("00000001.00001", b"first") is None
    assert mine.post("00000001.00001", b"first") is None  # a lost reply
    assert theirs.post("00000001.00001", b"second") == b"first"
    assert theirs.fetch(["00000001.00001"]) == {"00000001.00001": b"first"}


@pytest.mark.parametrize("size_bytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 4 << 20, 8 << 20, (20 << 20) + 7])
def test_posts_of_any_size(open_board: Callable[[], Board], size_bytes: int) -> None:
    data = (bytes(range(256)) * (size_bytes // 256 + 1))[:size_bytes]
    mine, theirs = open_board(), open_board()
    assert mine.post("00000001.result", data) is None
    assert theirs.fetch(["00000001.result"])["00000001.result"] == data
    assert theirs.post("00000001.result", data + b"x") == data
    theirs.remove(["00000001.result"])
    wait_for(lambda: theirs.fetch(["00000001.result"]) == {})


def test_of_many_keys_those_that_are_there_are_fetched(open_board: Callable[[], Board]) -> None:
    mine, theirs = open_board(), open_board()
    assert mine.fetch(MANY) == {}
    for key in MANY[::3]:
        theirs.post(key, key.encode())
    theirs.post("00000010.00001", b"of another exchange")
    theirs.post("lane.00000001.00001", b"of another lane")
    assert mine.fetch(MANY) == {key: key.encode() for key in MANY[::3]}
    left = [key for key in MANY if key not in MANY[::3]]
    assert mine.fetch(left) == {}
    assert mine.fetch(left) == {}
    theirs.post(left[7], b"late")
    assert mine.fetch(left) == {left[7]: b"late"}
    for key in left:
        theirs.post(key, b"late")
    assert set(mine.fetch(MANY)) == set(MANY)


def test_signs_change_until_the_last_one(open_board: Callable[[], Board]) -> None:
    mine, theirs = open_board(), open_board()
    keys = [f"life.{rank:05d}" for rank in range(3)]
    assert mine.signs(keys) == {}
    seen: list[Any] = []
    for _ in range(70):
        theirs.give_sign(keys[1])
        signs = mine.signs(keys)
        assert set(signs) == {keys[1]}
        assert signs[keys[1]] != (seen or [None])[-1]
        assert mine.signs(keys) == signs
        seen.append(signs[keys[1]])
    assert LEFT not in seen
    theirs.give_sign(keys[1], last=True)
    theirs.give_sign(keys[2])
    assert mine.signs(keys)[keys[1]] is LEFT
    assert mine.signs(keys)[keys[2]] is not LEFT
    assert mine.signs(keys[1:2]) == {keys[1]: LEFT}
    mine.remove(keys)
    wait_for(lambda: mine.signs(keys) == {})


def test_removing_what_is_not_there_is_no_error(open_board: Callable[[], Board]) -> None:
    board = open_board()
    board.remove([])
    board.remove(MANY)
    board.post(MANY[1], b"x")
    assert board.fetch(MANY[:2]) == {MANY[1]: b"x"}


def test_a_store_whose_server_is_gone_is_a_rank_timeout_at_once() -> None:
    server = tcp_store()
    board = torch_board(dist.TCPStore("127.0.0.1", server.port, is_master=False))
    board.post("00000001.00001", b"x")
    del server
    with pytest.raises(RankTimeout, match="key-value store of torch") as caught:
        wait_for(lambda: board.fetch(["00000001.result"]) != {})
    assert caught.value.ranks == (0,)
    assert caught.value.committed is None
    with pytest.raises(RankTimeout):
        board.post("00000002.00001", b"x")
    board.close(emptied=False)


class HangingStore:
    """A store on a machine that went away: nothing is answered any more once `hangs` is set."""

    def __init__(self, store: Any) -> None:
        self.store, self.hangs, self.ended = store, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.hangs.is_set():
            self.ended.wait(60)
        return getattr(self.store, name)


def test_a_store_that_answers_nothing_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HangingStore(dist.HashStore())
    board = torch_board(dist.HashStore(), timeout_seconds=0.5)
    board._store = store
    group = BoardGroup(board, rank=1, world_size=2, rank_timeout_seconds=0.5)

    def work() -> bytes:
        store.hangs.set()
        return b""

    with pytest.raises(RankTimeout, match=r"gave no (answer|sign of life) for 0\.5 s") as caught:
        exchange(group, "save", work, lambda answers: b"")
    assert caught.value.ranks == (0,)
    group.close()  # at once: the board has been given up
    store.ended.set()


def test_a_caller_passes_on_what_a_call_returns_or_raises() -> None:
    caller = Caller(timeout_seconds=60)
    assert caller.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="of its own"):
        caller.call(lambda: (_ for _ in ()).throw(TimeoutError("of its own")))
    done = threading.Event()
    caller.later(lambda: 1 // 0)
    caller.later(done.set)
    caller.close()
    assert done.is_set()
    with pytest.raises(TimeoutError, match="closed"):
        caller.call(lambda: 3)


class OneNotice:
    """The address of a leader, for threads."""

    host, hint = "127.0.0.1", "Look for its window"

    def __init__(self, address: str | None = None) -> None:
        self.address = address

    def announce(self, address: str) -> None:
        self.address = address

    def look(self) -> str | None:
        return self.address

    def withdraw(self) -> None:
        self.address = None


def served(notice: OneNotice, rank: int, *, timeout_seconds: float = 60) -> TorchGroup:
    return open_served_group(
        notice, rank=rank, world_size=2, start_token="start", rank_timeout_seconds=timeout_seconds, node=f"node{rank}"
    )


def test_ranks_meet_at_a_store_that_the_leader_serves_and_it_ends_with_the_group() -> None:
    notice, addresses = OneNotice(), set()

    def run(rank: int) -> Any:
        group = served(notice, rank)
        result = exchange(group, "save", lambda: rank, lambda answers: answers)
        addresses.add(notice.address)
        group.close()
        return result, group.board.hint, group.start_token, group.node

    gc.disable()  # as some training loops do
    try:
        assert in_threads(2, run) == [([0, 1], OneNotice.hint, "start", f"node{rank}") for rank in range(2)]
    finally:
        gc.enable()
    assert notice.address is None
    (address,) = addresses
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((OneNotice.host, int(str(address).split()[1])))


def test_a_leader_that_announces_no_address_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(RankTimeout, match=r"Rank 0 gave no sign of life for 0\.2 s in 'open the group'") as caught:
        served(OneNotice(), 1, timeout_seconds=0.2)
    assert caught.value.ranks == (0,)
    assert caught.value.hint == OneNotice.hint


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_cannot_be_served_or_reached_is_a_missing_group(rank: int) -> None:
    notice = OneNotice("127.0.0.1 1")
    notice.host = "127.0.0.1" if rank else "no-such-host.invalid"
    with pytest.raises(GroupMissing, match=f"Rank {rank} cannot meet the others at {notice.host}"):
        served(notice, rank, timeout_seconds=1)


def test_rank_timeouts_from_a_board_are_errors_of_the_tree() -> None:
    board = torch_board(dist.HashStore(), server_ranks=())
    board.close(emptied=True)
    with pytest.raises(CkptstoreError) as caught:
        board.give_sign("life.00001")
    assert caught.value.ranks == ()
