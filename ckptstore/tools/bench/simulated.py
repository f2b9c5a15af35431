"""Measure the leader's cost of a commit by many ranks: of a directory, and of a fully sharded state.

The leader is real. Every other rank is simulated by its messages and its files, so the seconds are the critical path of
each meeting. They exclude the time to write the files of the simulated ranks.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckptstore.catalogue import job_of
from ckptstore.errors import InvalidInput
from ckptstore.format.digest import Digest
from ckptstore.format.layout import CHECKPOINT_PREFIX, ranked_name
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import Offer
from ckptstore.format.timings import RankTimings
from ckptstore.group.board_group import BoardGroup
from ckptstore.group.meeting import pack
from ckptstore.group.message import Keys, Message
from ckptstore.group.torch_board import TorchBoard
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.loading.index_read import IndexReader
from ckptstore.opening import open_store
from ckptstore.saving.commit import commit
from ckptstore.saving.request import Request
from ckptstore.saving.state_shard import StateShard
from ckptstore.state.index.items import DIGEST_BYTES, Item, Mode
from ckptstore.state.index.outline import INDEX_NAME, part_name
from ckptstore.state.index.part import PartBuilder
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.tensors.boxes import Box, Cut
from ckptstore.state.tensors.layouts import Mesh, MeshLayout
from ckptstore.state.write.agree import FULL_POST_HEAD, Agreement, Negotiator
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.state.write.describe import Described
from ckptstore.testing import Call, CountCalls, Delay, combine, with_faults
from ckptstore.tools.bench.measure import Meter
from ckptstore.transfer import RangeRead

_DATA = b"x" * 100
_FILE = "shard.bin"
_TOKEN = "bench"
_TIMEOUT_SECONDS = 600.0


def _answers() -> dict[int, tuple[str, Any]]:
    """Return a rank's answers in a first save, by the number of the meeting."""
    options: dict[str, Any] = {"metrics": None, "metadata": None, "suffix": "auto", "shared": [], "link": False}
    request = Request.of(step=1, kind="directory", exists="replace", **options).offer()
    offer = Offer("auto", [_FILE], size_bytes=len(_DATA)).to_json()
    return {1: ("probe the root", None), 2: ("read the probe", None), 3: ("save", (request, offer))}


def _receipts(rank: int) -> Any:
    """Return a rank's report after storing its file: its timings, and its receipt."""
    seconds = {"agree": 0.1, "upload": 0.1}
    took = RankTimings(rank, f"node-{rank // 8}", seconds, len(_DATA), 1, 0, stalled_seconds=0.0)
    receipt = Receipt(ranked_name(_FILE, rank), len(_DATA), Digest.of(_DATA), rank, _FILE)
    return {**took.to_json(), "stalls": True}, [receipt.to_json()]


def commit_of(directory: str, world_size: int, latency_seconds: float) -> dict[str, Any]:
    """Measure one save of the leader: seconds, its requests to the storage, memory and processor time.

    Every request to the storage waits for the given latency. The answers of the other ranks to each meeting are in the
    key-value store before the leader looks. The memory includes that for writing their files.

    For a process of its own: the store is not closed, because nobody would answer, and its deletions in the background
    end with the process. The caller removes the directory.
    """
    root, source = Path(directory) / "store", Path(directory) / "source"
    source.mkdir(parents=True)
    (source / _FILE).write_bytes(_DATA)
    server = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=_TIMEOUT_SECONDS)
    )
    board = TorchBoard(
        server, prefix=_TOKEN, world_size=world_size, timeout_seconds=_TIMEOUT_SECONDS, server_ranks=(0,)
    )
    group = BoardGroup(board, rank=0, world_size=world_size, rank_timeout_seconds=_TIMEOUT_SECONDS, start_token=_TOKEN)
    attempt, aside_seconds, aside_cpu_seconds = "", 0.0, 0.0

    def post(lane: str, call: int, rank: int, tag: str, value: Any) -> None:
        message = Message(tag=tag, rank=rank, world_size=world_size, by=f"rank {rank}", payload=pack(value))
        board.post(Keys(lane, world_size).answer(call, rank), message.encode())

    def follow(call: Call) -> None:
        """Write the files and the reports of all other ranks as soon as the leader stores."""
        nonlocal attempt, aside_seconds, aside_cpu_seconds
        if call.phase != "before" or attempt or not call.key.startswith(CHECKPOINT_PREFIX):
            return
        attempt = call.key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0]
        began, used = time.perf_counter(), time.process_time()
        place = root / CHECKPOINT_PREFIX / attempt
        place.mkdir(parents=True, exist_ok=True)
        for rank in range(1, world_size):
            (place / ranked_name(_FILE, rank)).write_bytes(_DATA)
            post(attempt, 1, rank, "receipts", _receipts(rank))
        aside_seconds, aside_cpu_seconds = time.perf_counter() - began, time.process_time() - used

    for number, (tag, value) in _answers().items():
        for rank in range(1, world_size):
            post("", number, rank, tag, value)
    counted = CountCalls()
    store = with_faults(
        open_store(root, group=group, durable=False, rank_timeout_seconds=_TIMEOUT_SECONDS),
        combine(follow, counted, Delay(latency_seconds)),
    )
    used = time.process_time()
    with Meter() as meter:
        checkpoint = store.save_directory(1, source)
    counts = dict(counted.counts)
    assert len(checkpoint.files) == world_size
    return {
        "ranks": world_size,
        "latency_seconds": latency_seconds,
        "seconds": meter.total_seconds - aside_seconds,
        "requests": sum(counts.values()),
        "requests_by_verb": counts,
        "cpu_seconds": time.process_time() - used - aside_cpu_seconds,
        "peak_bytes": meter.peak_bytes,
    }


NUM_TENSORS = 4548
"""As in a Llama 3 405B with its optimizer."""
_ROWS, _COLUMNS = 64, 1024
_CHUNK_BYTES = _ROWS * _COLUMNS * 4
_FRAME_BYTES = _CHUNK_BYTES + 1408
_BLOCK_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class _Case:
    """Gives each rank the n-th rows of every tensor."""

    def __init__(self, num_ranks: int, num_tensors: int) -> None:
        self.num_ranks, self.num_tensors = num_ranks, num_tensors
        self.layout = MeshLayout(Mesh((num_ranks,), tuple(range(num_ranks))), (Cut(0),))
        self.shape = (num_ranks * _ROWS, _COLUMNS)
        self.keys = sorted(f"model.layers.{number}.weight" for number in range(num_tensors))
        self.file_bytes = num_tensors * _FRAME_BYTES

    def box(self, rank: int, num_ranks: int = 1) -> Box:
        """Return the rows of some ranks."""
        return Box((rank * _ROWS, 0), (num_ranks * _ROWS, _COLUMNS))

    def agree(self, leader: Negotiator) -> tuple[Agreement, int]:
        """Return the leader's agreement in a first save, and the bytes that it receives from all ranks."""
        boxes = (self.box(0),)
        items = [Item(key, Mode.SHARD, "float32", self.shape, boxes, layout=self.layout, member=0) for key in self.keys]
        leader.begin(Described(items), 0)
        roughly = [leader.describe()] * self.num_ranks
        leader.hear(leader.join(roughly, may_spread=True))
        identity = roughly[0][:DIGEST_BYTES]
        full = [leader.describe(), *(identity + FULL_POST_HEAD.pack(rank, 0, 0) for rank in range(1, self.num_ranks))]
        agreement = leader.hear(leader.join(full, may_spread=True))
        if agreement is None or agreement.is_packed:
            raise InvalidInput(f"{self.num_ranks} ranks with {self.num_tensors} tensors have an index that is packed")
        return agreement, sum(map(len, [*roughly, *full]))

    def part(self, rank: int) -> bytes:
        """Return a rank's part of the index."""
        builder = PartBuilder(rank)
        builder.add_file(_file_name(rank), [os.urandom(4 * -(-self.file_bytes // _BLOCK_BYTES))])
        builder.add_slab(0, self.file_bytes)
        for number, key in enumerate(self.keys):
            row = builder.add_tensor(key, "float32", self.shape)
            builder.add_chunk(row, number * _FRAME_BYTES + 1024, self.box(rank))
        return builder.encode()

    def report(self, rank: int, part_bytes: int, part_digest: Digest) -> bytes:
        """Return a rank's report to the leader after storing."""
        receipts = [
            Receipt(_file_name(rank), self.file_bytes, Digest.of(b""), rank),
            Receipt(part_name(rank, 1), part_bytes, part_digest, rank),
        ]
        head = {
            "told": [self.num_tensors * _CHUNK_BYTES, 0, 0, [], [part_bytes, str(part_digest)]],
            "receipts": [receipt.to_json() for receipt in receipts],
        }
        packed = zlib.compress(json.dumps(head).encode(), 1)
        return _LENGTH.pack(len(packed)) + packed


def _file_name(rank: int) -> str:
    return f"state-rank={rank:05d}-00.distcp"


def commit_of_sharded(directory: str, num_ranks: int, num_tensors: int) -> dict[str, Any]:
    """Commit as the leader, and open the checkpoint as a rank. For a process of its own; removes the directory.

    The ranks are connected by torch.distributed, so the cost of receiving the messages is not measured.
    """
    case, leader = _Case(num_ranks, num_tensors), Negotiator()
    began = time.perf_counter()
    agreement, agreed_bytes = case.agree(leader)
    agree_seconds = time.perf_counter() - began
    parts = {rank: case.part(rank) for rank in range(num_ranks - 4, num_ranks)}  # those that are read below
    part_bytes = len(parts[num_ranks - 1])
    reports = [
        case.report(rank, part_bytes, Digest.of(parts[rank] if rank in parts else os.urandom(4)))
        for rank in range(num_ranks)
    ]
    received_bytes = sum(map(len, reports))
    try:
        with open_store(directory) as store:
            job = job_of(store)
            job.claim(None)
            attempt = job.new_attempt(1)
            place = Path(directory) / attempt.prefix
            place.mkdir(parents=True)
            for rank in range(num_ranks):  # those files that nobody reads take no room
                with open(place / _file_name(rank), "wb") as data, open(place / part_name(rank, 1), "wb") as index:
                    data.truncate(case.file_bytes)
                    index.write(parts[rank]) if rank in parts else index.truncate(part_bytes)
            shard = StateShard(
                FlatState,
                rank=0,
                world_size=num_ranks,
                memo=SaveMemo(negotiator=leader),
                storage=job.storage,
                upload=job.transfer.upload,
            )
            shard.hear(agreement.encode())
            request = Request.of(step=1, kind="state", metrics=None, metadata=None, exists="replace")
            used = time.process_time()
            with Meter() as meter:  # from the last report on
                contents = shard.plan().join(attempt, reports)
                meter.returned()
                record = commit(job, request, attempt, contents, world_size=num_ranks)
            cpu_seconds = time.process_time() - used
            opened = _opened(files_of(job, record), case)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "ranks": num_ranks,
        "tensors": num_tensors,
        "agree_seconds": agree_seconds,
        "agree_bytes": agreed_bytes,
        "told_bytes": received_bytes,
        "cpu_seconds": cpu_seconds,
        "seconds": meter.total_seconds,
        "join_seconds": meter.blocked_seconds,
        "peak_bytes": (meter.peak_bytes or 0) + received_bytes,
        **opened,
    }


def _opened(files: CheckpointFiles, case: _Case) -> dict[str, Any]:
    """Measure the opening for a rank with the rows of its save, and for one of a quarter of the ranks."""
    gc.collect()  # the leader's garbage, which a loading rank lacks
    read_bytes, last = 0, case.num_ranks - 1

    def read(ranges: Sequence[RangeRead]) -> None:
        nonlocal read_bytes
        read_bytes += sum(len(view) for item in ranges for view in item.views)
        files.read(ranges)

    def lacking(index: Any, rank: int, box: Box) -> set[int]:
        return {lacked for key in case.keys for lacked in index.lacking(key, rank, box)}

    times = [time.perf_counter()]
    manifest = files.read_manifest()[0]
    times.append(time.perf_counter())
    reader = IndexReader.of(manifest, read, files.prefix)
    index = reader.opened(rank=last)
    assert not lacking(index, last, case.box(last))
    times.append(time.perf_counter())
    own_bytes = read_bytes
    others = lacking(index, 0, case.box(last - 3, 4))
    index = reader.with_parts(others)
    times.append(time.perf_counter())
    assert others == {last - 3, last - 2, last - 1}
    assert index.num_chunks == 4 * case.num_tensors
    return {
        "manifest_bytes": len(manifest.encode()),
        "open_manifest_seconds": times[1] - times[0],
        "outline_bytes": manifest.by_name[INDEX_NAME].size_bytes,
        "open_own_seconds": times[2] - times[1],
        "open_own_bytes": own_bytes,
        "open_quarter_seconds": times[3] - times[1],
    }
