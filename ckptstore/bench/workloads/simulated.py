"""What a commit costs the leader of many ranks that talk through the storage and nothing else.

The leader is real. Every other rank is simulated by what it would have left in the storage: its file in the directory
of the attempt, and its answer to each exchange, all there before the leader looks. So this is the leader's own cost.
Every request waits for the given latency.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.bench.measure import Meter
from ckptstore.format.digest import crc32c
from ckptstore.format.layout import CHECKPOINT_PREFIX, ranked_name
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import Offer
from ckptstore.format.timings import RankTimings
from ckptstore.group import StorageGroup
from ckptstore.group.message import Message
from ckptstore.opening import open_store
from ckptstore.testing import Call, Delay, combine, with_faults

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
    return head + b"\n" + json.dumps([receipt.to_json()]).encode()


def leave_followers(root: Path, world_size: int) -> None:
    """All that ranks 1 and above would have left before they are told the name of the attempt."""
    group = root / "group" / _TOKEN
    group.mkdir(parents=True)
    for rank in range(1, world_size):
        for call, (tag, payload) in answers(rank).items():
            message = Message(tag=tag, rank=rank, world_size=world_size, by=f"rank {rank}", payload=payload)
            (group / f"{call:08d}.{rank:05d}").write_bytes(message.encode())


@dataclass
class Followers:
    """A hook for the leader's storage: what ranks 1 and above leave once they know the name of the attempt."""

    root: Path
    world_size: int
    have_stored: bool = False

    def __call__(self, call: Call) -> None:
        """Store when the leader does."""
        if self.have_stored or not call.key.startswith(CHECKPOINT_PREFIX):
            return
        self.have_stored = True
        name = call.key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0]
        attempt = self.root / CHECKPOINT_PREFIX / name
        attempt.mkdir(parents=True, exist_ok=True)
        for rank in range(1, self.world_size):
            (attempt / ranked_name(_FILE, rank)).write_bytes(_DATA)
            message = Message(
                tag="receipts", rank=rank, world_size=self.world_size, by=f"rank {rank}", payload=receipts(rank)
            )
            (self.root / "group" / _TOKEN / f"{name}.00000001.{rank:05d}").write_bytes(message.encode())


def commit_of(directory: str, world_size: int, latency_seconds: float) -> dict[str, Any]:
    """One save of the leader: seconds, requests, its memory and processor time.

    For a process of its own: the store is not closed, because nobody would answer, and what it still deletes in the
    background ends with the process. The caller removes the directory.
    """
    root, source = Path(directory) / "store", Path(directory) / "source"
    shutil.rmtree(root, ignore_errors=True)
    source.mkdir(parents=True, exist_ok=True)
    (source / _FILE).write_bytes(_DATA)
    leave_followers(root, world_size)
    counted = Counter[str]()

    def count(call: Call) -> None:
        if call.phase == "before":
            counted[call.verb] += 1

    group = StorageGroup(0, world_size, _TOKEN)
    store = with_faults(
        open_store(root, group=group, durable=False, rank_timeout_seconds=600),
        combine(Followers(root, world_size), count, Delay(latency_seconds)),
    )
    used = _used()
    with Meter() as meter:
        checkpoint = store.save_directory(1, source)
    counts, seconds = dict(counted), meter.total_seconds
    assert len(checkpoint.files) == world_size
    return {
        "ranks": world_size,
        "latency_seconds": latency_seconds,
        "seconds": seconds,
        "requests": sum(counts.values()),
        "requests_by_verb": counts,
        "cpu_seconds": _used() - used,
        "peak_bytes": meter.peak_bytes,
    }


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
