"""Measure the leader's work in a fully sharded state of many ranks: agree, join their reports, commit.

The leader is real. Every other rank is simulated by its messages and its files. The ranks are connected by
torch.distributed, so the cost of receiving the messages is not measured.
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
from pathlib import Path
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.errors import InvalidInput
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.job import Job
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
from ckptstore.tools.bench.measure import Meter
from ckptstore.transfer import RangeRead

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
    """Commit as the leader, and open the checkpoint as a rank. For a process of its own; removes the directory."""
    case, leader = _Case(num_ranks, num_tensors), Negotiator()
    began = time.perf_counter()
    agreement, agreed_bytes = case.agree(leader)
    agree_seconds = time.perf_counter() - began
    parts = {rank: case.part(rank) for rank in range(num_ranks - 4, num_ranks)}  # those that are read below
    digests = {rank: Digest.of(part) for rank, part in parts.items()}
    some_bytes = len(parts[num_ranks - 1])
    reports = [
        case.report(rank, some_bytes, digests.get(rank) or Digest.of(os.urandom(4))) for rank in range(num_ranks)
    ]
    try:
        with open_store(directory) as store:
            job = job_of(store)
            job.claim(None)
            attempt = job.new_attempt(1)
            _leave_files(Path(directory) / attempt.prefix, case, parts, some_bytes)
            shard = StateShard(
                FlatState,
                rank=0,
                world_size=num_ranks,
                memo=SaveMemo(negotiator=leader),
                storage=job.storage,
                upload=job.transfer.upload,
            )
            shard.hear(agreement.encode())
            used, found = time.process_time(), _committed(job, shard, attempt, reports, num_ranks)
            cpu_seconds = time.process_time() - used
            opened = _opened(files_of(job, found.pop("record")), case)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "ranks": num_ranks,
        "tensors": num_tensors,
        "agree_seconds": agree_seconds,
        "agree_bytes": agreed_bytes,
        "told_bytes": sum(map(len, reports)),
        "cpu_seconds": cpu_seconds,
        **found,
        **opened,
    }


def _leave_files(place: Path, case: _Case, parts: dict[int, bytes], part_bytes: int) -> None:
    """Store the files of all ranks; those that nobody reads take no room."""
    place.mkdir(parents=True)
    for rank in range(case.num_ranks):
        with open(place / _file_name(rank), "wb") as file:
            file.truncate(case.file_bytes)
        with open(place / part_name(rank, 1), "wb") as file:
            file.write(parts[rank]) if rank in parts else file.truncate(part_bytes)


def _committed(
    job: Job, shard: StateShard, attempt: Attempt, reports: Sequence[bytes], num_ranks: int
) -> dict[str, Any]:
    """Commit, from the last report on."""
    request = Request.of(step=1, kind="state", metrics=None, metadata=None, exists="replace")
    gc.collect()
    with Meter() as meter:
        contents = shard.plan().join(attempt, reports)
        meter.returned()
        record = commit(job, request, attempt, contents, world_size=num_ranks)
    return {
        "seconds": meter.total_seconds,
        "join_seconds": meter.blocked_seconds,
        "peak_bytes": (meter.peak_bytes or 0) + sum(map(len, reports)),
        "record": record,
    }


def _opened(files: CheckpointFiles, case: _Case) -> dict[str, Any]:
    """Measure the opening for a rank with the rows of its save, and for one of a quarter of the ranks."""
    gc.collect()  # the leader's garbage, which a loading rank lacks
    read_bytes, last = 0, case.num_ranks - 1

    def read(ranges: Sequence[RangeRead]) -> None:
        nonlocal read_bytes
        read_bytes += sum(len(view) for item in ranges for view in item.views)
        files.read(ranges)

    began = time.perf_counter()
    manifest = files.read_manifest()[0]
    manifest_seconds = time.perf_counter() - began
    began = time.perf_counter()
    reader = IndexReader.of(manifest, read, files.prefix)
    index = reader.opened(rank=last)
    lacking = {rank for key in case.keys for rank in index.lacking(key, last, case.box(last))}
    own_seconds, own_bytes = time.perf_counter() - began, read_bytes
    assert not lacking
    began = time.perf_counter()
    wide = case.box(last - 3, 4)
    lacking = {rank for key in case.keys for rank in index.lacking(key, 0, wide)}
    index = reader.with_parts(lacking)
    quarter_seconds = own_seconds + time.perf_counter() - began
    assert lacking == {last - 3, last - 2, last - 1}
    assert index.num_chunks == 4 * case.num_tensors
    return {
        "manifest_bytes": len(manifest.encode()),
        "open_manifest_seconds": manifest_seconds,
        "outline_bytes": manifest.by_name[INDEX_NAME].size_bytes,
        "open_own_seconds": own_seconds,
        "open_own_bytes": own_bytes,
        "open_quarter_seconds": quarter_seconds,
    }
