"""What a commit costs the leader of many ranks that talk through the storage and nothing else.

The leader is real. Every other rank is simulated by what it would have left in the storage: its file in the directory
of the attempt, and its answer to each exchange, all there before the leader looks. Every request waits for the given
latency.

Where the ranks meet in a tree, no bundle is there when the leader looks. It waits while the last answer is posted and a
real head gathers a whole block; then the bundles of the other heads appear, which would have worked at the same time.
So the seconds are the critical path of each exchange. What it takes to write the files of the simulated ranks is
not in them.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.config import RetryConfig
from ckptstore.format.digest import crc32c
from ckptstore.format.layout import CHECKPOINT_PREFIX, ranked_name
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import Offer
from ckptstore.format.timings import RankTimings
from ckptstore.group import StorageGroup
from ckptstore.group.keys import Keys
from ckptstore.group.message import Message
from ckptstore.group.storage_board import StorageBoard
from ckptstore.group.tree import Head, pack
from ckptstore.opening import open_store
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing import Call, Delay, combine, with_faults, wrap
from ckptstore.tools.bench.measure import Meter

_DATA = b"x" * 100
_FILE = "shard.bin"
_TOKEN = "bench"


def answers(rank: int) -> dict[int, tuple[str, bytes]]:
    """What a rank says in each exchange of a first save, by the number of the exchange."""
    asked = {"kind": "directory", "exists": "replace", "suffix": "auto", "shared": [], "link": False}
    offer = json.dumps(Offer("auto", [_FILE], size_bytes=len(_DATA)).to_json()).encode()
    return {
        1: ("probe the root", b""),
        2: ("read the probe", b""),
        3: ("save", json.dumps({"step": 1, "options": asked}).encode() + b"\n" + offer),
    }


def receipts(rank: int) -> bytes:
    """What a rank says when it has stored its file: what that took, and what the leader needs to know."""
    seconds = {"agree": 0.1, "upload": 0.1}
    took = RankTimings(rank, f"node-{rank // 8}", seconds, len(_DATA), 1, 0, stalled_seconds=0.0)
    receipt = Receipt(ranked_name(_FILE, rank), len(_DATA), crc32c(_DATA), rank, _FILE)
    head = json.dumps({**took.to_json(), "stalls": True}).encode()
    return head + b"\n" + json.dumps([receipt]).encode()


@dataclass
class Followers:
    """A hook for the leader's storage: what ranks 1 and above leave, and what the head of a block does."""

    root: Path
    world_size: int
    latency_seconds: float
    aside_seconds: float = 0.0
    """What it took to write the files of simulated ranks while the leader waited."""
    aside_cpu_seconds: float = 0.0
    head_counts: Counter[str] = field(default_factory=Counter)
    """The requests of one head."""
    _attempt: str = ""
    _bundled: set[str] = field(default_factory=set)

    def leave_first(self) -> None:
        """All that they would have left before they are told the name of the attempt."""
        self._group.mkdir(parents=True)
        for rank in range(1, self.world_size):
            for call, (tag, payload) in answers(rank).items():
                self._leave(Keys("", self.world_size).answer(call, rank), self._message(rank, tag, payload))

    def __call__(self, call: Call) -> None:
        """Store when the leader does, and gather when it looks for bundles."""
        if call.phase != "before":
            return
        if not self._attempt and call.key.startswith(CHECKPOINT_PREFIX):
            self._attempt = call.key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0]
            with self._aside():
                self._store()
        exchange, dot, _ = call.key.removeprefix(f"group/{_TOKEN}/").partition(".bundle.")
        if dot and exchange not in self._bundled:
            self._bundled.add(exchange)
            self._gather(exchange)

    def _store(self) -> None:
        attempt = self.root / CHECKPOINT_PREFIX / self._attempt
        attempt.mkdir(parents=True, exist_ok=True)
        for rank in range(1, self.world_size):
            (attempt / ranked_name(_FILE, rank)).write_bytes(_DATA)
            key = Keys(self._attempt, self.world_size).answer(1, rank)
            self._leave(key, self._message(rank, "receipts", receipts(rank)))

    def _gather(self, exchange: str) -> None:
        lane, _, number = exchange.rpartition(".")
        counts, latency = Counter[str](), Delay(self.latency_seconds)

        def count(call: Call) -> None:
            if call.phase == "before":
                counts[call.verb] += 1

        storage = wrap(LocalStorage(self.root, durable=False), combine(count, latency))
        board = StorageBoard(storage, start_token=_TOKEN, world_size=self.world_size, retry=RetryConfig())
        keys, call = Keys(lane, self.world_size, board.fan_in), int(number)
        bundles = keys.bundles(call)
        by_head = max(bundles, key=lambda bundle: len(bundles[bundle]))
        time.sleep(self.latency_seconds)  # the last rank posts its answer
        head = Head(board, bundles[by_head], by_head, message=lambda payload: self._message(1, "bundle", payload))
        head.fetch([keys.result(call)])
        board.close(emptied=False)
        self.head_counts += counts
        with self._aside():
            for bundle, answered in bundles.items():
                if bundle != by_head:
                    payload = pack({key: (self._group / key).read_bytes() for key in answered})
                    self._leave(bundle, self._message(1, "bundle", payload))

    @property
    def _group(self) -> Path:
        return self.root / "group" / _TOKEN

    def _message(self, rank: int, tag: str, payload: bytes) -> Message:
        return Message(tag=tag, rank=rank, world_size=self.world_size, by=f"rank {rank}", payload=payload)

    def _leave(self, key: str, message: Message) -> None:
        (self._group / key).write_bytes(message.encode())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        began_at, used = time.perf_counter(), _used()
        yield
        self.aside_seconds += time.perf_counter() - began_at
        self.aside_cpu_seconds += _used() - used


def commit_of(directory: str, world_size: int, latency_seconds: float) -> dict[str, Any]:
    """One save of the leader: seconds, its requests, memory and processor time; and the requests of one head.

    The processor time has that of one head in it, and the memory also what writing the files of simulated ranks takes.

    For a process of its own: the store is not closed, because nobody would answer, and what it still deletes in the
    background ends with the process. The caller removes the directory.
    """
    root, source = Path(directory) / "store", Path(directory) / "source"
    shutil.rmtree(root, ignore_errors=True)
    source.mkdir(parents=True, exist_ok=True)
    (source / _FILE).write_bytes(_DATA)
    followers = Followers(root, world_size, latency_seconds)
    followers.leave_first()
    counted = Counter[str]()

    def count(call: Call) -> None:
        if call.phase == "before":
            counted[call.verb] += 1

    group = StorageGroup(0, world_size, _TOKEN)
    store = with_faults(
        open_store(root, group=group, durable=False, rank_timeout_seconds=600),
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
        "head_requests": sum(followers.head_counts.values()),
        "cpu_seconds": _used() - used - followers.aside_cpu_seconds,
        "peak_bytes": meter.peak_bytes,
    }


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
