"""What a commit costs the leader as ranks grow, when they talk through the storage and nothing else.

The leader is real. Every other rank is simulated by what it would leave in the storage: its file in the attempt's
directory, and its answer to each exchange, all there before the leader looks. So this is the leader's own cost.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from versus import FULL, ROUNDS

from ckptstore import StorageGroup, open_store
from ckptstore.digest import crc32c
from ckptstore.group.message import Message
from ckptstore.job import attempt_of
from ckptstore.layout import ranked_name
from ckptstore.manifest import Receipt
from ckptstore.naming import Offer
from ckptstore.testing import CountCalls
from ckptstore.testing.stores import with_faults

NUM_RANKS = [64, 256, 1024] if FULL else [8, 16]
DATA = b"x" * 100


def answers(rank: int) -> dict[int, tuple[str, bytes]]:
    """What a rank says in each exchange of a first save, by the number of the exchange."""
    asked = {"kind": "directory", "exists": "replace", "suffix": "auto", "shared": [], "link": False}
    offer = json.dumps(Offer("auto", ["shard.bin"], size_bytes=len(DATA)).to_json()).encode()
    name = ranked_name("shard.bin", rank)
    receipt = Receipt(name, len(DATA), crc32c(DATA), rank, "shard.bin")
    return {
        1: ("probe the root", b""),
        2: ("read the probe", b""),
        3: ("save", json.dumps({"step": 1, "options": asked}).encode() + b"\n" + offer),
        4: ("receipts", json.dumps([receipt.to_json()]).encode()),
    }


def leave_followers(root: Path, token: str, world_size: int) -> None:
    """All that ranks 1 and above would have left."""
    group = root / "group" / token
    attempt = root / attempt_of(token, num_saves=1, step=1, epoch=1).prefix
    group.mkdir(parents=True)
    attempt.mkdir(parents=True)
    for rank in range(1, world_size):
        (attempt / ranked_name("shard.bin", rank)).write_bytes(DATA)
        for call, (tag, payload) in answers(rank).items():
            message = Message(tag=tag, rank=rank, world_size=world_size, by=f"rank {rank}", payload=payload)
            (group / f"{call:08d}.{rank:05d}").write_bytes(message.encode())


@pytest.mark.parametrize("world_size", NUM_RANKS)
def test_commit(benchmark: Any, tmp_path: Path, world_size: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "shard.bin").write_bytes(DATA)
    root, counted, peaks = tmp_path / "store", CountCalls(), []

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        leave_followers(root, "bench", world_size)
        counted.clear()

    def save() -> None:
        group = StorageGroup(0, world_size, "bench")
        store = with_faults(open_store(root, group=group, durable=False, rank_timeout_seconds=60), counted)
        checkpoint = store.save_directory(1, source)
        assert len(checkpoint.files) == world_size
        counted.stopped = dict(counted.counts)  # type: ignore[attr-defined] - what close() does is another matter

    benchmark.pedantic(save, setup=prepare, rounds=ROUNDS)
    prepare()
    tracemalloc.start()
    save()
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    counts = counted.stopped  # type: ignore[attr-defined]
    benchmark.extra_info.update(ranks=world_size, requests=counts, total=sum(counts.values()), peak_bytes=peaks[0])
