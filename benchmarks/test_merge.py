"""A merge of three checkpoints on a disk, beside a copy of as many bytes: three are read, and one is written and
synced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sizes import FULL, Take, group, turns

import ckptstore
from ckptstore.tools.bench.figures.report import OURS, Role, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter

MIB = 1 << 20
SIZE_BYTES = (512 if FULL else 32) * MIB
TENSOR_BYTES = 16 * MIB
NUM_CHECKPOINTS = 3
COPY = "read, read, copy"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with checkpoints in bfloat16."""
    root = tmp_path_factory.mktemp("merge") / "store"
    generator = torch.Generator().manual_seed(0)
    with ckptstore.open_store(root, group="solo") as store:
        for step in range(NUM_CHECKPOINTS):
            names = range(SIZE_BYTES // TENSOR_BYTES)
            store.save(
                step, {f"t{name}": torch.randn(TENSOR_BYTES // 2, generator=generator).bfloat16() for name in names}
            )
    return root


def copied(root: Path, target: Path) -> None:
    """Read the bytes of all checkpoints, and write those of one of them."""
    buffer = bytearray(4 * MIB)
    files = sorted(file for file in (root / "checkpoints").rglob("*.distcp"))
    last = files[-1].parent
    for file in files:
        with file.open("rb", buffering=0) as source, (target / file.name).open("wb", buffering=0) as copy:
            while count := source.readinto(buffer):
                if file.parent == last:
                    copy.write(memoryview(buffer)[:count])
            os.fsync(copy.fileno())


@group(f"Merge {NUM_CHECKPOINTS} checkpoints on a disk")
@pytest.mark.parametrize("turn", turns(5))
@pytest.mark.parametrize("name", [OURS, COPY])
def test_merge(take: Take, saved: Path, tmp_path: Path, name: str, turn: int) -> None:
    def run() -> tuple[WorkloadOutcome, int]:
        with ckptstore.open_store(saved, group="solo") as store, Meter() as meter:
            if name == OURS:
                ckptstore.merge([store[step] for step in range(NUM_CHECKPOINTS)], tmp_path / "merged", include="*")
            else:
                copied(saved, tmp_path)
        role: Role = "ckptstore" if name == OURS else "limit"
        return WorkloadOutcome.of(name, [meter.sample()], role=role), NUM_CHECKPOINTS * SIZE_BYTES

    take(run)
