"""What ranks read: all of a training, their own parts of a large index, and what one of them reads for all."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckptstore import Checkpoint, CheckpointDamaged, CheckpointStore, RankFailed, StateMismatch, open_store
from ckptstore.loading.index_read import IndexReader
from ckptstore.state.index.outline import INDEX_NAME, Outline
from ckptstore.state.read import shared_reads
from ckptstore.state.read.read_plan import Step


class Net(nn.Module):
    """Two linear layers around a batch norm, and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 16)
        self.tied = nn.Linear(32, 16)
        self.tied.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.second(hidden) + self.tied(hidden)


def build(layout: str, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and scheduler in a parallel layout over all ranks."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    size = dist.get_world_size()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "tp":
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel(), "tied": RowwiseParallel()}
        model.norm = nn.Identity()  # a batch norm over a shard is another model
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(parts: tuple[nn.Module, torch.optim.Optimizer, Any], num_steps: int, *, layout: str) -> list[float]:
    """Train on random data, each rank its own but under tensor parallelism; the losses of this rank."""
    model, optimizer, scheduler = parts
    losses = []
    for _ in range(num_steps):
        x = torch.randn(8, 16)
        if layout == "tp":
            dist.broadcast(x, 0)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def state_of(parts: tuple[nn.Module, torch.optim.Optimizer, Any], **values: Any) -> dict[str, Any]:
    """The whole state of a run, random numbers included."""
    model, optimizer, scheduler = parts
    return {"model": model, "optim": optimizer, "scheduler": scheduler, "rng": Random(), **values}


class Random:
    """This rank's random numbers, which differ from rank to rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        full = list(np.random.get_state())
        full[1] = state["numpy"]
        np.random.set_state(tuple(full))


@contextmanager
def job(root: str, **keywords: Any) -> Iterator[CheckpointStore]:
    """A store, in a process group that is initialised once for all that this process does."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with open_store(root, rank_timeout_seconds=60, **keywords) as store:
        yield store


def seed_rank() -> None:
    """Random numbers of this rank's own."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    np.random.seed(rank)


def train_and_resume(root: str, layouts: list[str]) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """For each layout: losses of an uninterrupted run, and of one that resumes from sync and async saves in between."""
    found = {}
    for layout in layouts:
        with job(f"{root}/{layout}") as store:
            parts = build(layout, seed=1)
            seed_rank()
            train(parts, 3, layout=layout)
            store.save(3, state_of(parts, epoch=3), metrics={"loss": 1.0})
            whole = train(parts, 2, layout=layout)
            pending = store.save_async(5, state_of(parts, epoch=5))
            whole += train(parts, 3, layout=layout)
            assert pending.result().step == 5
            resumed = []
            for step, skip in ((3, 0), (5, 2)):
                other = build(layout, seed=2)
                state = state_of(other, epoch=0)
                torch.manual_seed(0)
                store[step].load(state)
                assert state["epoch"] == step
                resumed.append(train(other, 5 - skip, layout=layout))
            assert store[3].verify().ok
        found[layout] = (whole, *resumed)
    return found


pytestmark = pytest.mark.timeout(600)


def assert_same_curves(results: list[dict[str, tuple[list[float], list[float], list[float]]]]) -> None:
    for of_rank in results:
        for layout, (whole, from_sync, from_async) in of_rank.items():
            assert from_sync == whole, layout
            assert from_async == whole[2:], layout


@pytest.mark.parametrize("layouts", [["ddp", "fsdp2"], pytest.param(["fsdp1", "tp"], marks=pytest.mark.slow)], ids=str)
def test_training_goes_on_as_if_never_interrupted(tmp_path: Path, layouts: list[str]) -> None:
    results = run_ranks(2, train_and_resume, str(tmp_path), layouts)
    assert set(results[0]) == set(layouts)
    assert_same_curves(results)
    if "ddp" in layouts:
        assert results[0]["ddp"] != results[1]["ddp"]


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


pytestmark = pytest.mark.timeout(600)
ALL = [0, 1, 2, 3]


@pytest.mark.slow
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


@pytest.mark.slow
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
