"""Many small tensors; what is written beside the payload; how ranks share the work; memory beside the state."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_worker import peaks
from peers import load_with_dcp, save_with_dcp
from raw import settle
from save_ranks import save_replicated
from states import assert_equal, empty_like, even_state, size_of
from told import CLOCK, tell
from versus import FULL, versus

from ckptstore import CheckpointStore, open_store
from ckptstore.testing import run_ranks

NUM_TENSORS = 20_000 if FULL else 1000
SMALL_BYTES = 4 << 10
REPLICATED_BYTES = (1 << 30) if FULL else (16 << 20)
MEMORY_BYTES = (2 << 30) if FULL else (128 << 20)
BUDGET_BYTES = 256 << 20


class Stores:
    """A new store for each save."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: CheckpointStore | None = None

    def clear(self) -> None:
        if self.store:
            self.store.close()
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        self.store = open_store(self.root / "store")
        self.store.save(0, {"epoch": 0})
        settle(self.root)

    def save(self, state: dict[str, torch.Tensor]) -> None:
        assert self.store
        self.store.save(1, state)


def test_save_of_small_tensors(benchmark: Any, tmp_path: Path) -> None:
    state = even_state(NUM_TENSORS * SMALL_BYTES, SMALL_BYTES)
    stores = Stores(tmp_path / "out")
    peers = {
        f"DCP, {threads} threads": partial(save_with_dcp, state, tmp_path / "out" / "dcp", num_threads=threads)
        for threads in (1, 2, 4)
    }
    versus(benchmark, lambda: stores.save(state), peers, prepare=stores.clear, size_bytes=size_of(state))
    assert stores.store
    with stores.store as store:
        checkpoint = store[1]
        benchmark.extra_info["bytes_written_over_payload"] = round(checkpoint.size_bytes / size_of(state), 3)
        target = empty_like(state)
        store.load(target)
    assert_equal(target, state)
    shutil.rmtree(stores.root)


def test_load_of_small_tensors(benchmark: Any, tmp_path: Path) -> None:
    state = even_state(NUM_TENSORS * SMALL_BYTES, SMALL_BYTES)
    target = empty_like(state)
    save_with_dcp(state, tmp_path / "dcp", durable=False)
    with open_store(tmp_path / "store", durable=False) as store:
        store.save(1, state)
        peers = {"DCP": partial(load_with_dcp, target, tmp_path / "dcp")}
        versus(benchmark, lambda: store.load(target), peers, size_bytes=size_of(state))
    assert_equal(target, state)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "dcp")


@pytest.mark.benchmark(timer=CLOCK)
def test_replicated_tensor_is_shared_by_ranks(benchmark: Any, tmp_path: Path) -> None:
    """Bytes that each of four ranks writes of one tensor that DDP keeps equal, over a quarter of it."""
    of_ranks = run_ranks(4, save_replicated, str(tmp_path / "out"), REPLICATED_BYTES, timeout_seconds=600)
    quarter = REPLICATED_BYTES / 4
    tell(
        benchmark,
        {"no time is measured": [0.0]},
        bytes_over_quarter=[round(ours / quarter, 4) for ours, _ in of_ranks],
        bytes_over_quarter_dcp=[round(theirs / quarter, 4) for _, theirs in of_ranks],
    )
    shutil.rmtree(tmp_path / "out")


@pytest.mark.benchmark(timer=CLOCK)
def test_memory_beside_the_state(benchmark: Any, tmp_path: Path) -> None:
    """Peak resident memory above the state, against the budget."""
    found = run_ranks(1, peaks, str(tmp_path), MEMORY_BYTES, BUDGET_BYTES, timeout_seconds=600)[0]
    tell(
        benchmark,
        {"no time is measured": [0.0]},
        budget_mib=BUDGET_BYTES >> 20,
        peak_mib={name: round(size_bytes / (1 << 20), 1) for name, size_bytes in found.items()},
    )
