"""What the leader of many ranks does after all have stored: joining the index, the manifest and the record.

The ranks are simulated by what they would have sent and stored; the leader is real, in a process of its own so that its
memory can be measured.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sizes import FULL, ROUNDS

from ckptstore import open_store
from ckptstore.bench.figures.report import OURS, Sample, Workload, WorkloadOutcome
from ckptstore.bench.measure import Meter
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.loading.index_read import read_own_parts
from ckptstore.saving.commit import commit
from ckptstore.saving.request import Request
from ckptstore.saving.state_shard import StateOptions, StateShard
from ckptstore.state.index.index_file import INDEX_NAME
from ckptstore.state.index.items import Mode, Row, Structure
from ckptstore.state.index.part import PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.write.agree import Negotiator
from ckptstore.state.write.coverage import Expected
from ckptstore.testing import run_ranks

NUM_TENSORS = 1000 if FULL else 100
_ROWS, _COLUMNS = 64, 1024
_CHUNK_BYTES = _ROWS * _COLUMNS * 4
_FRAME_BYTES = _CHUNK_BYTES + 1408
_BLOCK_BYTES = 1 << 20


def _tensors(num_ranks: int, num_tensors: int) -> list[tuple[str, tuple[int, int]]]:
    """Keys and shapes."""
    return [(f"model.layers.{number}.weight", (num_ranks * _ROWS, _COLUMNS)) for number in range(num_tensors)]


def _answer(rank: int, num_ranks: int, num_tensors: int) -> bytes:
    """What a rank of a fully sharded state gives the leader: it has the n-th rows of every tensor."""
    builder = PartBuilder(rank)
    name, size_bytes = f"state-rank={rank:05d}-00.distcp", num_tensors * _FRAME_BYTES
    builder.add_file(name, [os.urandom(4 * -(-size_bytes // _BLOCK_BYTES))])
    builder.add_slab(0, size_bytes)
    box = Box((rank * _ROWS, 0), (_ROWS, _COLUMNS))
    for number, (key, shape) in enumerate(_tensors(num_ranks, num_tensors)):
        row = builder.add_tensor(key, "float32", shape)
        builder.add_chunk(row, number * _FRAME_BYTES + 1024, box)
    receipt = Receipt(name, size_bytes, rank, rank)
    head = zlib.compress(json.dumps({"receipts": [receipt.to_json()], "stock": {}, "paths": {}}).encode(), 1)
    return b"".join([struct.pack("<I", len(head)), head, builder.encode(is_shared=rank == 0)])


def join_and_commit(directory: str, num_ranks: int, num_tensors: int) -> tuple[Sample, dict[str, Any]]:
    """The leader's work after all ranks have stored; and what a rank does to open the checkpoint."""
    answers = [_answer(rank, num_ranks, num_tensors) for rank in range(num_ranks)]
    with open_store(directory) as store:
        job = store._job
        request = Request.of(step=1, kind="state", metrics=None, metadata=None, exists="replace")
        job.claim(None)
        attempt: Attempt = job.new_attempt(1)
        (Path(directory) / attempt.prefix).mkdir(parents=True)
        for rank in range(num_ranks):  # files that take no room
            with open(Path(directory) / attempt.prefix / f"state-rank={rank:05d}-00.distcp", "wb") as file:
                file.truncate(num_tensors * _FRAME_BYTES)
        shard = StateShard(
            FlatState,
            rank=0,
            world_size=num_ranks,
            negotiator=Negotiator(),
            storage=job.storage,
            upload=job.transfer.upload,
            options=StateOptions(stock_readable=False),
        )
        rows = [Row(name, Mode.SHARD, "float32", shape, "", "", 0) for name, shape in _tensors(num_ranks, num_tensors)]
        shard._expected = Expected.of([Structure(tuple(rows))], [0] * num_ranks)
        with Meter() as meter:
            contents = shard.join(attempt, answers, lambda: None)
            meter.returned()
            commit(job, request, attempt, contents, lambda: None)
        data = (Path(directory) / attempt.prefix / INDEX_NAME).read_bytes()
        started = time.perf_counter()
        index = TensorIndex.decode(data)
        opened_seconds = time.perf_counter() - started
        assert index.num_chunks == num_ranks * num_tensors
        files = store[1]._files
        receipt = files.read_manifest()[0].by_name[INDEX_NAME]
        gc.collect()  # what the leader has left, and a rank that loads has not
        started = time.perf_counter()
        own = read_own_parts(files, receipt, rank=num_ranks - 1, world_size=num_ranks)
        own_seconds = time.perf_counter() - started
        assert own is None or own.num_chunks == 2 * num_tensors
    received_bytes = sum(map(len, answers))
    sample = replace(meter.sample(), peak_bytes=(meter.peak_bytes or 0) + received_bytes)
    return sample, {
        "join_seconds": round(meter.blocked_seconds, 3),
        "open_seconds": round(opened_seconds, 3),
        "open_own_parts_seconds": round(own_seconds, 3) if own is not None else None,
        "received_bytes": received_bytes,
        "index_bytes_per_chunk": round(len(data) / index.num_chunks, 2),
    }


@pytest.mark.parametrize("num_ranks", [64, 256, 1024] if FULL else [16])
def test_many_ranks(tell: Callable[[Workload], None], tmp_path: Path, num_ranks: int) -> None:
    samples = []
    for number in range(ROUNDS):
        root = tmp_path / str(number)
        ((sample, facts),) = run_ranks(1, join_and_commit, str(root), num_ranks, NUM_TENSORS, timeout_seconds=600)
        samples.append(sample)
        shutil.rmtree(root)
    title = f"Join the index of {num_ranks} ranks with {NUM_TENSORS} tensors, and commit"
    outcomes = (WorkloadOutcome.of(OURS, samples),)
    tell(Workload(name="", title=title, size_bytes=0, ranks=1, outcomes=outcomes, facts=facts))
