"""Of a large index each rank reads the parts alone that have what it needs; `HEAD_BYTES` is small here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from test_state_parallel import assert_same_curves, job, train_and_resume
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptstore import CheckpointDamaged, StateMismatch
from ckptstore.loading.index_read import IndexReader
from ckptstore.state.index.outline import INDEX_NAME, Outline

ROWS = torch.arange(8 * 12, dtype=torch.float32).reshape(8, 12)
THIN = torch.arange(3.0)
"""Of four ranks one has nothing of it."""


@contextmanager
def parts_opened() -> Iterator[list[list[int]]]:
    """The ranks whose parts were read, for each index that was opened."""
    opened: list[list[int]] = []
    begin, read_parts = IndexReader.__init__, IndexReader.with_parts

    def begun(self: IndexReader, *args: Any) -> None:
        begin(self, *args)
        opened.append([])

    def read(self: IndexReader, ranks: Any) -> Any:
        index = read_parts(self, ranks)
        opened[-1] = [part.rank for part in index.parts]
        return index

    replaced = patch.multiple(IndexReader, __init__=begun, with_parts=read)
    with patch("ckptstore.loading.index_read.HEAD_BYTES", 64), replaced:
        yield opened


@contextmanager
def part_lost(part: int, *, to: int) -> Iterator[None]:
    """Let the reading of a rank's part fail on one rank."""
    read_parts = IndexReader.with_parts

    def read(self: IndexReader, ranks: Any) -> Any:
        wanted = list(ranks)
        if dist.get_rank() == to and part in wanted:
            raise CheckpointDamaged(f"the part of rank {part} is lost to rank {to}")
        return read_parts(self, wanted)

    with patch.object(IndexReader, "with_parts", read):
        yield


def distributed(full: torch.Tensor, dim: int | None, *, zeros: bool = False) -> DTensor:
    """The tensor over all ranks: in rows, in columns, or the same on each."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False)
    local = full
    if dim is not None:
        blocks = full.chunk(size, dim)
        local = blocks[rank] if rank < len(blocks) else full.narrow(dim, 0, 0)
    placements = [Replicate() if dim is None else Shard(dim)]
    local = torch.zeros_like(local) if zeros else local.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def stage(number: int, *, zeros: bool, bias: bool = True) -> nn.Module:
    """A module whose parameters are all the same number."""
    module = nn.Linear(2, 2, bias=bias)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0 if zeros else 1 + number)
    return module


def state(*, rows_dim: int = 0, zeros: bool = False) -> dict[str, Any]:
    """What each rank has: shards, what all have alike, what each has for itself, and stages of a pipeline."""
    rank = dist.get_rank()
    held: dict[str, Any] = {
        "rows": distributed(ROWS, rows_dim, zeros=zeros),
        "thin": distributed(THIN, 0, zeros=zeros),
        "step": distributed(torch.tensor(7.0), None, zeros=zeros),
        "epoch": 0 if zeros else 5,
        "seed": -1 if zeros else 100 + rank,
        f"stage{rank // 2}": stage(rank // 2, zeros=zeros),
    }
    return held


def is_loaded(found: dict[str, Any]) -> bool:
    """Whether a state of zeros has become what was saved."""
    expected = state(rows_dim=found["rows"].placements[0].dim)

    def same(key: str) -> bool:
        one, other = found[key], expected[key]
        if isinstance(one, DTensor):
            return torch.equal(one.to_local(), other.to_local())
        if isinstance(one, nn.Module):
            return all(map(torch.equal, one.parameters(), other.parameters()))
        return bool(one == other)

    return all(map(same, found))


def load_own_parts(root: str) -> dict[str, Any]:
    """Save, and load in the same layout and in others; for each the parts that were read and whether all is right."""
    found: dict[str, Any] = {}
    with job(root) as store, parts_opened() as opened:

        def load(name: str, target: dict[str, Any], **keywords: Any) -> None:
            opened.clear()
            try:
                store[1].load(target, **keywords)
                found[name] = list(opened), is_loaded(target)
            except (StateMismatch, CheckpointDamaged) as error:
                found[name] = list(opened), str(error)

        store.save(1, state())
        load("same", state(zeros=True))
        load("node", state(zeros=True), read_once="node")
        load("job", state(zeros=True), read_once="job")
        load("columns", state(rows_dim=1, zeros=True))
        load("missing", {**state(zeros=True), "other": 1})
        load("unplaced", {key: value for key, value in state(zeros=True).items() if key != "epoch"})
        narrow = state(zeros=True)
        if dist.get_rank() >= 2:
            narrow["stage1"] = stage(1, zeros=True, bias=False)
        load("unexpected", narrow)
        with part_lost(2, to=3):  # after all ranks have opened the index
            load("lost", state(zeros=True), read_once="job")
    dist.barrier()
    if dist.get_rank() == 0:
        damage_part(Path(root), rank=3)  # which rank 3 alone reads
    dist.barrier()
    found["damaged"] = load_damaged(root)
    return found


def damage_part(store: Path, *, rank: int) -> None:
    """Change one byte of a rank's part of the only index in the store."""
    (index,) = store.rglob(INDEX_NAME)
    data = bytearray(index.read_bytes())
    outline = Outline.decode(data)
    start = len(data) - outline.packed_bytes + outline.place(rank)[1]
    data[start + outline.parts[rank].size_bytes // 2] ^= 1
    index.chmod(0o644)
    index.write_bytes(data)


def train_with_own_parts(root: str, layouts: list[str]) -> tuple[Any, list[list[int]]]:
    """`train_and_resume`, and the parts that were read."""
    with parts_opened() as opened:
        return train_and_resume(root, layouts), opened


def load_damaged(root: str) -> str:
    """What a load says of an index whose part of one rank has a wrong byte."""
    with job(root) as store, parts_opened():
        try:
            store[1].load(state(zeros=True))
        except CheckpointDamaged as error:
            return str(error)
    return "nothing"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ALL = [0, 1, 2, 3]


def test_own_parts_are_read_and_more_only_where_they_are_needed(tmp_path: Path) -> None:
    found = run_ranks(4, load_own_parts, str(tmp_path / "store"), timeout_seconds=240)
    for rank, one in enumerate(found):
        own = sorted({0, rank, *([2] if rank == 3 else [])})  # rank 0 has what all have, rank 2 what its stage has
        assert one["same"] == ([own], True)
        assert one["node"] == ([own], True)
        assert one["job"] == ([own], True)
        assert one["columns"] == ([ALL], True)
        assert one["unplaced"] == ([own], True)
        opened, said = one["missing"]
        assert opened == [sorted({0, rank})]
        assert "missing in the checkpoint: other" in said
        opened, said = one["unexpected"]
        assert opened == [sorted({0, rank})]
        assert "without a place in the state: stage1.bias" in said
        assert "the part of rank 2 is lost to rank 3" in one["lost"][1], "all ranks are told"
        assert INDEX_NAME in one["damaged"]
        assert "damaged" in one["damaged"]


@pytest.mark.slow
def test_training_goes_on_with_own_parts(tmp_path: Path) -> None:
    found = run_ranks(2, train_with_own_parts, str(tmp_path), ["fsdp2", "fsdp1"], timeout_seconds=240)
    assert_same_curves([curves for curves, _ in found])
    (_, of_leader), (_, of_other) = found
    assert of_leader == [[0]] * 4, "of FSDP1 no rule says which rank has what, but its own part has all that it needs"
    assert of_other == [[0, 1]] * 4
