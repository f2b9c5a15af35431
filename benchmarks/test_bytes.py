"""What is counted, not timed: bytes read for one tensor, written beside the payload, written by each rank; memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sizes import FULL
from torch.nn.parallel import DistributedDataParallel

from ckptstore import open_store
from ckptstore.testing import CountCalls, with_faults
from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Sample
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.dcp import Dcp
from ckptstore.tools.bench.shapes import rank_state, size_of

MIB = 1 << 20
SMALL_BYTES = 4 << 10
REPLICATED_BYTES = (1 << 30) if FULL else (16 * MIB)
MEMORY_BYTES = (2 << 30) if FULL else (128 * MIB)
NUM_RANKS = 4 if FULL else 2
BUDGET_BYTES = (256 if FULL else 16) * MIB


@pytest.mark.parametrize("tensor_bytes", [SMALL_BYTES, 300 << 10, 4 * MIB], ids=["4KiB", "300KiB", "4MiB"])
@pytest.mark.benchmark(group="Load one tensor of many")
def test_one_tensor_of_many(benchmark: Any, tmp_path: Path, tensor_bytes: int) -> None:
    num_tensors = (1000 if tensor_bytes < MIB else 100) if FULL else 20
    state = rank_state("tensors", num_tensors * tensor_bytes, rank=0, tensor_bytes=tensor_bytes)
    (name, tensor), calls = list(state.items())[num_tensors // 2], CountCalls()
    with with_faults(open_store(tmp_path / "store", durable=False), calls) as store:
        checkpoint = store.save(1, state)
        target = {name: torch.zeros_like(tensor)}
        benchmark.pedantic(lambda: store.load(target, strict=False), setup=calls.clear, rounds=3)
    assert torch.equal(target[name].view(torch.uint8), tensor.view(torch.uint8))
    read, written = calls.size_bytes["read_into"], checkpoint.size_bytes
    assert calls.total < 12
    assert read <= (-(-tensor_bytes // MIB) + 1) * MIB, "whole blocks, since these have digests"
    assert written <= 1.002 * size_of(state) + 200 * num_tensors + (16 << 10)
    benchmark.extra_info.update(
        requests=calls.total, read_over_needed=read / tensor_bytes, written_over_payload=written / size_of(state)
    )
    shutil.rmtree(tmp_path / "store")


def save_replicated(directory: str) -> tuple[float, float]:
    """Save one tensor that DDP keeps equal; what this rank wrote of its share, ckptstore's and DCP's."""
    with process_group() as (rank, world_size):
        model = torch.nn.utils.skip_init(torch.nn.Linear, 1024, REPLICATED_BYTES // 4096, bias=False)
        torch.nn.init.ones_(model.weight)
        case = Case(place=Place(uri=directory), rank=rank, world_size=world_size, durable=False)
        case.state = {"weight": model.weight.detach()}
        with open_store(case.uri("store"), durable=False) as store:
            checkpoint = store.save(1, {"model": DistributedDataParallel(model, init_sync=False)})
        ours = sum(file.size_bytes for file in checkpoint.files if file.rank == rank and "state-rank" in file.name)
        Dcp(case, thread_count=1).save(case.uri("dcp"))
        dist.barrier()
        theirs = sum(path.stat().st_size for path in Path(directory, "dcp").glob(f"__{rank}_*.distcp"))
        share = REPLICATED_BYTES / world_size
        return ours / share, theirs / share


@pytest.mark.long
def test_replicated_tensor_is_shared_by_ranks(tmp_path: Path) -> None:
    """DCP has one rank write all of it: it cuts nothing smaller than a tensor."""
    ours, theirs = zip(*run_ranks(NUM_RANKS, save_replicated, str(tmp_path), timeout_seconds=600), strict=True)
    assert all(0.99 < share < 1.01 for share in ours)
    assert max(theirs) > 0.99 * NUM_RANKS
    shutil.rmtree(tmp_path)


def save_transposed(directory: str) -> tuple[Sample, Sample]:
    """Save and load tensors that cannot be written as they lie in memory."""
    state = {name: tensor.view(2048, -1).t() for name, tensor in rank_state("tensors", MEMORY_BYTES, rank=0).items()}
    warm = {"t": torch.ones(8 * MIB, dtype=torch.uint8)}
    with open_store(directory, durable=False, memory_budget_bytes=BUDGET_BYTES) as store:
        store.save(0, warm)
        store.load(warm)
        with Meter() as saving:
            store.save(1, state)
        with Meter() as loading:
            store.load(state)
    return saving.sample(), loading.sample()


def test_memory_for_transposed_tensors(tmp_path: Path) -> None:
    """For others `ckptstore bench` shows it."""
    ((saving, loading),) = run_ranks(1, save_transposed, str(tmp_path / "store"), timeout_seconds=600)
    for sample in (saving, loading):
        assert sample.peak_bytes is not None
        assert sample.peak_bytes < BUDGET_BYTES + 64 * MIB
