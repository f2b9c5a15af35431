"""Saving a state to a disk, against DCP's best setting and against what the disk takes in the same run."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import save_with_dcp, save_with_safetensors, save_with_torch
from raw import Memory, best_ways, settle
from save_ranks import of_slowest, save_in_turns
from states import STATES, State, assert_equal, empty_like, size_of
from told import CLOCK, tell
from versus import FULL, ROUNDS, versus

from ckptstore import CheckpointStore, open_store
from ckptstore.testing import run_ranks


class Saves:
    """The contenders, each writing to a directory that does not exist yet. A job opens its store once: that is not
    counted."""

    def __init__(self, state: State, root: Path, *, durable: bool) -> None:
        self.state, self.root, self.durable = state, root, durable
        self.store: CheckpointStore | None = None

    def clear(self) -> None:
        if self.store:
            self.store.close()
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        self.store = open_store(self.root / "store", durable=self.durable)
        self.store.save(0, {"epoch": 0})
        settle(self.root)

    def ckptstore(self) -> None:
        assert self.store
        self.store.save(1, self.state)

    def peers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for threads in (1, 2, 4):
            save = partial(save_with_dcp, self.state, self.root / "dcp", num_threads=threads, durable=self.durable)
            found[f"DCP, {threads} threads"] = save
        if not self.durable:
            found["torch.save"] = partial(save_with_torch, self.state, self.root / "state.pt")
            found["safetensors"] = partial(save_with_safetensors, self.state, self.root / "state.safetensors")
        return found


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not-durable"])
@pytest.mark.parametrize("shape", list(STATES))
def test_save(benchmark: Any, tmp_path: Path, shape: str, durable: bool) -> None:
    torch.manual_seed(0)
    state = STATES[shape]()
    size_bytes = size_of(state)
    saves = Saves(state, tmp_path / "out", durable=durable)
    memory = Memory(size_bytes)
    raw = best_ways(memory.view, tmp_path / "out" / "raw", saves.clear, durable=durable, turns=2 if FULL else 1)
    versus(benchmark, saves.ckptstore, {**saves.peers(), **raw}, prepare=saves.clear, size_bytes=size_bytes)
    memory.close()
    target = empty_like(state)
    assert saves.store
    with saves.store as store:
        store.load(target)
    assert_equal(target, state)
    shutil.rmtree(saves.root)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not-durable"])
@pytest.mark.parametrize("shape", list(STATES))
def test_save_of_two_ranks(benchmark: Any, tmp_path: Path, shape: str, durable: bool) -> None:
    """Each rank has half of the tensors as rows of DTensors; the slower rank's time counts."""
    of_ranks = run_ranks(2, save_in_turns, str(tmp_path / "out"), shape, ROUNDS, durable, timeout_seconds=1800)
    tell(benchmark, of_slowest(of_ranks), size_bytes=size_of(STATES[shape]()))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
