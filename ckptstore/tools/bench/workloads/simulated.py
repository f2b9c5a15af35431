"""Measure the leader's cost of a commit by many ranks, which torch.distributed connects.

The leader is real. Every other rank is simulated by its traces: its file in the directory of the attempt, and its
answer to each meeting in the key-value store, all written before the leader looks. Every request to the storage waits
for the given latency.

So the seconds are the critical path of each meeting. They exclude the time to write the files of the simulated ranks.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckptstore.format.digest import Digest
from ckptstore.format.layout import CHECKPOINT_PREFIX, ranked_name
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import Offer
from ckptstore.format.timings import RankTimings
from ckptstore.group.board import Seat
from ckptstore.group.board_group import BoardGroup
from ckptstore.group.meeting import pack
from ckptstore.group.message import Keys, Message
from ckptstore.group.torch_board import TorchBoard
from ckptstore.opening import open_store
from ckptstore.saving.request import Request
from ckptstore.testing import Call, Delay, combine, with_faults
from ckptstore.tools.bench.measure import Meter

_DATA = b"x" * 100
_FILE = "shard.bin"
_TOKEN = "bench"
_TIMEOUT_SECONDS = 600.0


def answers() -> dict[int, tuple[str, Any]]:
    """Return a rank's answers in a first save, by the number of the meeting."""
    options: dict[str, Any] = {"metrics": None, "metadata": None, "suffix": "auto", "shared": [], "link": False}
    request = Request.of(step=1, kind="directory", exists="replace", **options).offer()
    offer = Offer("auto", [_FILE], size_bytes=len(_DATA)).to_json()
    return {
        1: ("probe the root", None),
        2: ("read the probe", None),
        3: ("save", (request, offer)),
    }


def receipts(rank: int) -> Any:
    """Return a rank's report after storing its file: its timings, and its receipt."""
    seconds = {"agree": 0.1, "upload": 0.1}
    took = RankTimings(rank, f"node-{rank // 8}", seconds, len(_DATA), 1, 0, stalled_seconds=0.0)
    receipt = Receipt(ranked_name(_FILE, rank), len(_DATA), Digest.of(_DATA), rank, _FILE)
    return {**took.to_json(), "stalls": True}, [receipt.to_json()]


class Followers:
    """A hook for the leader's storage that writes the files and answers of ranks 1 and above."""

    def __init__(self, root: Path, world_size: int, board: TorchBoard) -> None:
        self._root, self._world_size, self._board = root, world_size, board
        self._attempt = ""
        self.aside_seconds = 0.0
        """Seconds spent writing files and answers while the leader waited."""
        self.aside_cpu_seconds = 0.0

    def leave_first(self) -> None:
        """Post all answers that do not depend on the name of the attempt."""
        for rank in range(1, self._world_size):
            for call, (tag, value) in answers().items():
                self._post("", call, rank, tag, value)

    def __call__(self, call: Call) -> None:
        """Store when the leader does."""
        if call.phase != "before" or self._attempt or not call.key.startswith(CHECKPOINT_PREFIX):
            return
        self._attempt = call.key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0]
        with self._aside():
            attempt = self._root / CHECKPOINT_PREFIX / self._attempt
            attempt.mkdir(parents=True, exist_ok=True)
            for rank in range(1, self._world_size):
                (attempt / ranked_name(_FILE, rank)).write_bytes(_DATA)
                self._post(self._attempt, 1, rank, "receipts", receipts(rank))

    def _post(self, lane: str, call: int, rank: int, tag: str, value: Any) -> None:
        message = Message(tag=tag, rank=rank, world_size=self._world_size, by=f"rank {rank}", payload=pack(value))
        self._board.post(Keys(lane, self._world_size).answer(call, rank), message.encode())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        began_at, used = time.perf_counter(), _used()
        yield
        self.aside_seconds += time.perf_counter() - began_at
        self.aside_cpu_seconds += _used() - used


def commit_of(directory: str, world_size: int, latency_seconds: float) -> dict[str, Any]:
    """Measure one save of the leader: seconds, its requests to the storage, memory and processor time.

    The memory includes that for writing the files of simulated ranks.

    For a process of its own: the store is not closed, because nobody would answer, and its deletions in the background
    end with the process. The caller removes the directory.
    """
    root, source = Path(directory) / "store", Path(directory) / "source"
    shutil.rmtree(root, ignore_errors=True)
    source.mkdir(parents=True, exist_ok=True)
    (source / _FILE).write_bytes(_DATA)
    server = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=_TIMEOUT_SECONDS)
    )
    board = TorchBoard(
        server, prefix=_TOKEN, world_size=world_size, timeout_seconds=_TIMEOUT_SECONDS, server_ranks=(0,)
    )
    group = BoardGroup(
        Seat(board, rank=0, world_size=world_size, rank_timeout_seconds=_TIMEOUT_SECONDS, start_token=_TOKEN)
    )
    followers = Followers(root, world_size, board)
    followers.leave_first()
    counted = Counter[str]()

    def count(call: Call) -> None:
        if call.phase == "before":
            counted[call.verb] += 1

    store = with_faults(
        open_store(root, group=group, durable=False, rank_timeout_seconds=_TIMEOUT_SECONDS),
        combine(followers, count, Delay(latency_seconds)),
    )
    used = _used()
    with Meter() as meter:
        checkpoint = store.save_directory(1, source)
    counts, seconds = dict(counted), meter.total_seconds - followers.aside_seconds
    assert len(checkpoint.files) == world_size
    return {
        "ranks": world_size,
        "latency_seconds": latency_seconds,
        "seconds": seconds,
        "requests": sum(counts.values()),
        "requests_by_verb": counts,
        "cpu_seconds": _used() - used - followers.aside_cpu_seconds,
        "peak_bytes": meter.peak_bytes,
    }


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
