"""Loading into tensors that exist, from the page cache, against others and against reads without any check."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import (
    load_with_dcp,
    load_with_safetensors,
    load_with_torch,
    save_with_dcp,
    save_with_safetensors,
    save_with_torch,
)
from raw import MIB, Memory, read_into
from save_ranks import load_in_turns, of_slowest
from states import STATES, assert_equal, empty_like, size_of
from told import CLOCK, tell
from versus import ROUNDS, versus

from ckptstore import open_store
from ckptstore.testing import CountCalls, run_ranks
from ckptstore.testing.stores import with_faults

NUM_TENSORS = 1000


@pytest.mark.parametrize("shape", list(STATES))
def test_load(benchmark: Any, tmp_path: Path, shape: str) -> None:
    torch.manual_seed(0)
    state = STATES[shape]()
    size_bytes = size_of(state)
    with open_store(tmp_path / "store", durable=False) as store:
        checkpoint = store.save(1, state)
        save_with_dcp(state, tmp_path / "dcp", durable=False)
        save_with_torch(state, tmp_path / "state.pt")
        save_with_safetensors(state, tmp_path / "state.safetensors")
        target, memory = empty_like(state), Memory(size_bytes)
        ours = [Path(checkpoint.uri) / file.name for file in checkpoint.files if file.name.startswith("state-rank")]
        everything = [path for path in tmp_path.rglob("*") if path.is_file()]

        def into_cache() -> None:
            chunk = bytearray(4 * MIB)
            for path in everything:
                with path.open("rb", buffering=0) as file:
                    while file.readinto(chunk):
                        pass

        versus(
            benchmark,
            lambda: store.load(target),
            {
                "DCP": partial(load_with_dcp, target, tmp_path / "dcp"),
                "torch.load": partial(load_with_torch, target, tmp_path / "state.pt"),
                "torch.load, mmap": partial(load_with_torch, target, tmp_path / "state.pt", mapped=True),
                "safetensors": partial(load_with_safetensors, target, tmp_path / "state.safetensors"),
                "raw preadv, 1 thread": partial(read_into, memory.view, ours, num_threads=1),
                "raw preadv, 2 threads": partial(read_into, memory.view, ours, num_threads=2),
            },
            prepare=into_cache,
            size_bytes=size_bytes,
        )
        assert_equal(target, state)
    memory.close()
    for name in ("store", "dcp"):
        shutil.rmtree(tmp_path / name)
    for name in ("state.pt", "state.safetensors"):
        (tmp_path / name).unlink()


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("shape", list(STATES))
def test_load_of_two_ranks(benchmark: Any, tmp_path: Path, shape: str) -> None:
    """Each rank has half of the tensors as rows of DTensors; the slower rank's time counts."""
    of_ranks = run_ranks(2, load_in_turns, str(tmp_path / "out"), shape, ROUNDS, timeout_seconds=1800)
    tell(benchmark, of_slowest(of_ranks), size_bytes=size_of(STATES[shape]()))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("tensor_bytes", [4 << 10, 300 << 10, 4 << 20], ids=["4KiB", "300KiB", "4MiB"])
def test_one_tensor_of_many(benchmark: Any, tmp_path: Path, tensor_bytes: int) -> None:
    """Bytes that are read from the checkpoint's files for one tensor of a thousand, over those that it has."""
    num_tensors = NUM_TENSORS if tensor_bytes < MIB else NUM_TENSORS // 10
    state = {
        f"t{number}": torch.full((tensor_bytes,), number % 251, dtype=torch.uint8) for number in range(num_tensors)
    }
    counted = CountCalls()
    with with_faults(open_store(tmp_path / "store", durable=False), counted) as store:
        store.save(1, state)
        target = {"t57": torch.zeros(tensor_bytes, dtype=torch.uint8)}

        def load() -> None:
            counted.clear()
            store.load(target, strict=False)

        benchmark.pedantic(load, rounds=3)
        assert (target["t57"] == 57).all()
    read_bytes = counted.size_bytes["read_into"]
    benchmark.extra_info.update(
        num_tensors=num_tensors, read_bytes=read_bytes, read_over_needed=round(read_bytes / tensor_bytes, 3)
    )
    shutil.rmtree(tmp_path / "store")
