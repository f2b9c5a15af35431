"""One rank reads what all ranks need and broadcasts it, whatever each of them does with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from ckptstore import Checkpoint, RankFailed, open_store
from ckptstore.state.read import shared_reads
from ckptstore.state.read.read_plan import Step

pytestmark = pytest.mark.slow

BLOCK = torch.arange(512.0 * 512).view(512, 512)
"""Exactly 1 MiB, which is the unit of digests: each rank reads all of it, for whatever part it wants."""
LARGE = torch.arange(1000.0 * 1100).view(1000, 1100)


def load_shared(uri: str, piece_bytes: int) -> list[str]:
    """Load what all ranks want differently, and what was tied into memories of their own; return the wrong keys."""
    dist.init_process_group("gloo")
    shared_reads._PIECE_BYTES = piece_bytes
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()

    def sharded(tensor: torch.Tensor, dim: int) -> DTensor:
        return zeros(tensor.shape, device_mesh=mesh, placements=[Shard(dim)])

    wrong: list[str] = []
    for state in (
        {"a": torch.zeros(BLOCK.shape).t().contiguous().t(), "c": torch.zeros_like(LARGE)},
        {"a": sharded(BLOCK, 0), "c": sharded(LARGE, 0)},
        {"a": sharded(BLOCK, 1) if rank else torch.zeros_like(BLOCK), "c": sharded(LARGE, 1)},
        {"a": torch.zeros_like(BLOCK), "b": torch.zeros_like(BLOCK)},
        {"a": sharded(BLOCK, 0), "b": sharded(BLOCK, 1), "c": sharded(LARGE, 0), "d": torch.zeros_like(LARGE)},
        {"a": torch.zeros_like(BLOCK)} | ({"b": torch.zeros_like(BLOCK)} if rank else {}),
    ):
        Checkpoint.from_uri(uri).load(state, read_once="job")
        for key, item in state.items():
            expected = LARGE if key in "cd" else BLOCK
            found = item.to_local() if isinstance(item, DTensor) else item
            if isinstance(item, DTensor):
                expected = expected.chunk(mesh.size(), item.placements[0].dim)[rank]
            if not torch.equal(found, expected):
                wrong.append(f"{key} of {list(state)}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("piece_bytes", [shared_reads._PIECE_BYTES, 300_000])
def test_ranks_take_the_same_bytes_into_other_memory(tmp_path: Path, piece_bytes: int) -> None:
    with open_store(tmp_path, durable=False) as store:
        uri = store.save(1, {"a": BLOCK, "b": BLOCK, "c": LARGE, "d": LARGE}).uri
    assert run_ranks(3, load_shared, uri, piece_bytes) == [[]] * 3


def load_with_trouble(uri: str, trouble: str) -> tuple[type, tuple[int, ...], str]:
    """Load what both ranks want, where rank 1 dies, or has no memory left, after the first broadcast."""
    dist.init_process_group("gloo")
    finish = Step.finish
    num_finished = 0

    def finishing(step: Step, buffer: memoryview) -> None:
        nonlocal num_finished
        num_finished += 1
        if dist.get_rank() == 1 and num_finished == 1:
            if trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory")
        finish(step, buffer)

    Step.finish = finishing
    state = {key: torch.zeros(3_000_000) for key in "ab"}
    try:
        Checkpoint.from_uri(uri).load(state, read_once="job")
    except RankFailed as error:
        assert trouble == "dies" or num_finished > 1
        return type(error), error.ranks, str(error)
    raise AssertionError("it was loaded")


@pytest.mark.parametrize("trouble", ["dies", "fails"])
def test_a_rank_that_dies_or_fails_between_broadcasts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv("CKPTSTORE_RANK_TIMEOUT_SECONDS", "2" if trouble == "dies" else "60")
    with open_store(tmp_path, durable=False) as store:
        uri = store.save(1, {key: torch.ones(3_000_000) for key in "ab"}).uri
    ends = run_ranks(2, load_with_trouble, uri, trouble, expect_killed=[1] if trouble == "dies" else [])
    for kind, ranks, text in filter(None, ends):
        assert issubclass(kind, RankFailed)
        assert 1 in ranks
        assert ("Rank 1 gave no sign of life" if trouble == "dies" else "CUDA out of memory") in text
