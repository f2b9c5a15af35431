"""Cases of two and four ranks. All cases of one number of ranks run in the same processes."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_single import cached, optim_state, quantised, randn
from torch.distributed._shard.sharded_tensor import Shard as StShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, save_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor
from trials import Trial, add, case

two = functools.partial(case, ranks=2)
four = functools.partial(case, ranks=4)


def across(**more: Any) -> Trial:
    """A trial in which all ranks take part."""
    return Trial(no_dist=False, **more)


@functools.cache
def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def distributed(whole: torch.Tensor, placements: Sequence[Any], *sizes: int) -> torch.Tensor:
    return distribute_tensor(whole, mesh(*sizes), list(placements), src_data_rank=None)


def dtensors(saved: Sequence[Any], loaded: Sequence[Any] | None = None, *sizes: int, shape: Any = (13, 6)) -> Trial:
    into = saved if loaded is None else loaded
    return across(
        state=lambda: {"t": distributed(randn(*shape), saved, *sizes), "n": 3},
        blank=lambda: {"t": distributed(torch.zeros(shape), into, *sizes), "n": 0},
        expected=lambda: {"t": distributed(randn(*shape), into, *sizes), "n": 3},
    )


PLACEMENTS = {"Shard(0)": [Shard(0)], "Shard(1)": [Shard(1)], "Replicate()": [Replicate()]}
for _from, _saved in PLACEMENTS.items():
    for _to, _into in PLACEMENTS.items():
        add(f"{_from} to {_to}", "DTensor", f"{_from} to {_to}", functools.partial(dtensors, _saved, _into), ranks=2)
add("large DTensor", "DTensor", "2 MB", functools.partial(dtensors, [Shard(0)], shape=(512, 1024)), ranks=2)
add(
    "empty shards",
    "DTensor",
    "ranks without an element",
    functools.partial(dtensors, [Shard(0)], shape=(1, 3)),
    ranks=2,
)
for _name, _saved, _into in (
    ("Shard(0), Replicate()", [Shard(0), Replicate()], [Replicate(), Shard(1)]),
    ("Shard(0), Shard(1)", [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
    ("Shard(0), Shard(0)", [Shard(0), Shard(0)], [Shard(1), Shard(0)]),
):
    add(
        f"2D {_name}", "DTensor", f"two dimensions of a mesh: {_name}",
        functools.partial(dtensors, _saved, _into, 2, 2), ranks=4,
    )  # fmt: skip


@two("replicas", "plain tensors and values of all ranks")
def replicated() -> Trial:
    return across(
        state=lambda: {"small": randn(10), "large": randn(700, 1000), "n": [1, 2], "bytes": b"x" * 100_000},
        blank=lambda: {"small": torch.zeros(10), "large": torch.zeros(700, 1000), "n": 0, "bytes": b""},
    )


@two("replicas", "`dedup_save_to_lowest_rank=True`")
def lowest_rank() -> Trial:
    return across(
        state=lambda: {"a": randn(10), "b": randn(700, 1000)},
        blank=lambda: {"a": torch.zeros(10), "b": torch.zeros(700, 1000)},
        planner=lambda: dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )


@two("replicas", "keys that some ranks have: pipeline stages")
def pipeline() -> Trial:
    rank = dist.get_rank()
    return across(
        state=lambda: {f"stage{rank}": {"w": randn(9, seed=rank), "n": rank}, "all": randn(3)},
        blank=lambda: {f"stage{rank}": {"w": torch.zeros(9), "n": -1}, "all": torch.zeros(3)},
    )


@functools.cache
def meshes_of_one() -> list[DeviceMesh]:
    return [DeviceMesh("cpu", [each]) for each in range(dist.get_world_size())]


@two("replicas", "experts: DTensors on the mesh of one rank")
def experts() -> Trial:
    meshes = meshes_of_one()

    def make(filled: bool) -> dict[str, Any]:
        whole = randn(6, 4) if filled else torch.zeros(6, 4)
        return {f"expert{each}": distribute_tensor(whole, one, [Shard(0)]) for each, one in enumerate(meshes)}

    return across(state=lambda: make(True), blank=lambda: make(False))


def sharded(filled: bool, count: int) -> ShardedTensor:
    """A tensor of which each rank has several shards."""
    rank, shards = dist.get_rank(), []
    for number in range(count):
        at = (rank * count + number) * 3
        tensor = randn(3, 4, seed=at) if filled else torch.zeros(3, 4)
        shards.append(StShard.from_tensor_and_offsets(tensor, [at, 0], rank))
    made: ShardedTensor = init_from_local_shards(shards, 3 * count * dist.get_world_size(), 4)
    return made


for _count in (1, 2):
    add(
        f"ShardedTensor {_count}", "ShardedTensor", f"{_count} local shards",
        functools.partial(
            lambda count: across(state=lambda: {"t": sharded(True, count)}, blank=lambda: {"t": sharded(False, count)}),
            _count,
        ),
        ranks=2,
    )  # fmt: skip


def local_shards(filled: bool, count: int) -> DTensor:
    rank = dist.get_rank()
    shards = [randn(4, 3, seed=10 * rank + n) if filled else torch.zeros(4, 3) for n in range(count)]
    offsets = [(0, 3 * (rank * count + n)) for n in range(count)]
    wrapper = LocalShardsWrapper(shards, offsets)
    return DTensor.from_local(
        wrapper, mesh(), [Shard(1)], run_check=False, shape=torch.Size([4, 6 * count]), stride=(6 * count, 1)
    )


for _count in (1, 2):
    add(
        f"LocalShardsWrapper {_count}", "tensors with `__create_write_items__`",
        f"torchrec's `LocalShardsWrapper` in a DTensor, {_count} local shards",
        functools.partial(
            lambda count: across(
                state=lambda: {"t": local_shards(True, count)}, blank=lambda: {"t": local_shards(False, count)}
            ),
            _count,
        ),
        ranks=2,
    )  # fmt: skip


class Diagonal(torch.Tensor):
    """Says itself what is to be written: a square that each rank has a corner of. It has real memory."""

    @staticmethod
    def make(filled: bool) -> Diagonal:
        whole = randn(2, 8, seed=dist.get_rank()) if filled else torch.zeros(2, 8)
        return torch.Tensor._make_subclass(Diagonal, whole)  # type: ignore[no-any-return]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([2 * dist.get_rank(), 0]), torch.Size([2, 8]))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        told = TensorWriteData(self._chunk(), TensorProperties(torch.float32), torch.Size([4, 8]))
        return [WriteItem(MetadataIndex(fqn, self._chunk().offsets), WriteItemType.SHARD, tensor_data=told)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def size(self, *given: Any) -> Any:
        return torch.Size([4, 8])


@two("tensors with `__create_write_items__`", "a user's")
def write_items() -> Trial:
    return across(state=lambda: {"t": Diagonal.make(True)}, blank=lambda: {"t": Diagonal.make(False)})


def wrapped_dtensor(make: Callable[[bool], torch.Tensor], filled: bool, placements: Sequence[Any]) -> DTensor:
    local = make(filled)
    if isinstance(placements[0], Shard):
        with torch.no_grad():
            shape = torch.Size([local.shape[0] * dist.get_world_size(), *local.shape[1:]])
    else:
        shape = local.shape
    return DTensor.from_local(local, mesh(), list(placements), run_check=False, shape=shape, stride=local.stride())


def of_rank(make: Callable[[bool], torch.Tensor], placements: Sequence[Any]) -> Trial:
    if isinstance(placements[0], Shard):
        torch.manual_seed(dist.get_rank())
    made = functools.cache(lambda: wrapped_dtensor(make, True, placements))
    return across(
        state=lambda: {"a": {"t": made()}, "n": 3},
        blank=lambda: {"a": {"t": wrapped_dtensor(make, False, placements)}, "n": 0},
    )


LOCALS: dict[str, Callable[[bool], torch.Tensor]] = {
    "`__tensor_flatten__` with a context": lambda filled: quantised(filled),
    "`TwoTensor`": lambda f: TwoTensor(torch.randn(4, 3) * f, torch.randn(4, 3) * f),
    "torchao `OptimState8bit`": lambda f: optim_state("OptimState8bit", f),
}
for _name, _make in LOCALS.items():
    for _kind, _placed in (("sharded", [Shard(0)]), ("replicated", [Replicate()])):
        add(
            f"{_kind} {_name}", "tensors that wrap others", f"{_name} in a {_kind} DTensor",
            functools.partial(of_rank, _make, _placed), ranks=2, stock="any",
        )  # fmt: skip


@two(
    "tensors that wrap others",
    "in a DTensor, onto another layout",
    ours="t was saved from a .*TwoTensor in other parts",
    stock="any",
    refused_at="load",
)
def wrapped_resharded() -> Trial:
    return across(
        state=lambda: {"t": wrapped_dtensor(lambda _: TwoTensor(randn(8, 3), randn(8, 3)), True, [Replicate()])},
        blank=lambda: {"t": wrapped_dtensor(LOCALS["`TwoTensor`"], False, [Shard(0)])},
    )


@two("ranks", "`process_group` of some ranks")
def process_group() -> Trial:
    group = dist.new_group([1])

    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        if dist.get_rank() == 1:
            dcp.save(state, storage_writer=writer, process_group=group)
        dist.barrier()

    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        if dist.get_rank() == 1:
            dcp.load(state, storage_reader=reader, process_group=group)
        return state

    filled = dist.get_rank() == 1
    return across(
        state=lambda: {"t": randn(5) if filled else torch.zeros(5)},
        blank=lambda: {"t": torch.zeros(5)},
        save=save,
        load=load,
    )


@two("ranks", "a coordinator that is not rank 0")
def coordinator() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        save_state_dict(state, writer, coordinator_rank=1)

    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        load_state_dict(state, reader, coordinator_rank=1)
        return state

    return across(
        state=lambda: {"t": distributed(randn(5, 3), [Shard(0)]), "p": randn(4)},
        blank=lambda: {"t": distributed(torch.zeros(5, 3), [Shard(0)]), "p": torch.zeros(4)},
        save=save,
        load=load,
    )


@two("ranks", "`use_collectives=False`", ours="use_collectives=False writes one checkpoint for each rank")
def no_collectives() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        dcp.save(state, storage_writer=writer, use_collectives=False)

    rank = dist.get_rank()
    return across(
        state=lambda: {"t": randn(5, seed=rank), "n": rank}, blank=lambda: {"t": torch.zeros(5), "n": 9}, save=save
    )


@two("ranks", "reading what torch wrote with `use_collectives=False`")
def read_no_collectives() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        stock = dcp.FileSystemWriter(writer.checkpoint_id, sync_files=False)
        dcp.save(state, storage_writer=stock, use_collectives=False)

    rank = dist.get_rank()
    return across(
        state=lambda: {"t": randn(5, seed=rank), "n": rank}, blank=lambda: {"t": torch.zeros(5), "n": 9}, save=save
    )


def run_async(kind: AsyncCheckpointerType) -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        future: Any = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        state["p"].zero_()  # after the copy was made
        future.result()

    return across(
        state=lambda: {"t": distributed(randn(5, 3), [Shard(0)]), "p": randn(4), "n": 3},
        blank=lambda: {"t": distributed(torch.zeros(5, 3), [Shard(0)]), "p": torch.zeros(4), "n": 0},
        save=save,
    )


add(
    "async thread",
    "ranks",
    "`async_save` in a thread",
    functools.partial(run_async, AsyncCheckpointerType.THREAD),
    ranks=2,
)
add(
    "async process", "ranks", "`async_save` in a process",
    functools.partial(run_async, AsyncCheckpointerType.PROCESS), ranks=4,
)  # fmt: skip


def one_after_another(states: Callable[[], list[dict[str, Any]]], blank: Callable[[], dict[str, Any]]) -> Trial:
    """Saves with one cache of plans; every one of them must still be there in the end."""

    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        path = pathlib.Path(writer.checkpoint_id)
        for number, each in enumerate(states()):
            goes = path if number == len(states()) - 1 else path.with_name(f"{path.name}-{number}")
            dcp.save(each, storage_writer=type(writer)(goes), planner=cached())

    return across(state=lambda: states()[-1], blank=blank, save=save)


def layers(seed: int, *, more: bool = False) -> dict[str, Any]:
    state = {
        "p": randn(300, 1000, seed=seed),
        "s": distributed(randn(7, 3, seed=seed), [Shard(0)]),
        "r": distributed(randn(900, 400, seed=seed), [Replicate()]),
        "n": seed,
    }
    if more and dist.get_rank() == 1:
        state["mine"] = randn(4, seed=seed)
    return state


@two("planners", "plan caching over steps and ranks")
def caching_ranks() -> Trial:
    return one_after_another(lambda: [layers(1), layers(2), layers(3)], lambda: layers(0))


@two("planners", "plan caching, one rank's state changes")
def caching_ranks_changes() -> Trial:
    return one_after_another(
        lambda: [layers(1), layers(2), layers(3, more=True), layers(4, more=True)], lambda: layers(0, more=True)
    )


def state_of(layout: str, *, optimizer: bool = True) -> Trial:
    from layouts import Run

    def make(steps: int) -> dict[str, Any]:
        run = Run(layout)
        run.steps(steps)
        model = get_model_state_dict(run.model)
        # The statistics of each rank are its own, and DCP keeps one rank's.
        state: dict[str, Any] = {"model": {key: item for key, item in model.items() if "norm.running" not in key}}
        if optimizer:
            state["optim"] = get_optimizer_state_dict(run.model, run.optimizer)
        return state

    filled, empty = functools.cache(lambda: make(2)), functools.cache(lambda: make(1))
    return across(state=lambda: filled(), blank=lambda: _copied(empty()))


def _copied(state: Any) -> Any:
    """A state with memory of its own."""
    if isinstance(state, dict):
        return type(state)((key, _copied(item)) for key, item in state.items())
    if isinstance(state, torch.Tensor) and not hasattr(state, "local_shards"):
        return state.clone()
    return state


add("layout fsdp2", "model and optimizer", "fsdp2", functools.partial(state_of, "fsdp2"), ranks=2)
for _layout in ("ddp", "fsdp1", "tensor-parallel", "fsdp1-hybrid", "hsdp2", "tensor-parallel-fsdp2"):
    add(f"layout {_layout}", "model and optimizer", _layout, functools.partial(state_of, _layout), ranks=4)


@four("model and optimizer", "`load_sharded_optimizer_state_dict` of FSDP1")
def sharded_optimizer() -> Trial:
    from layouts import Run

    @functools.cache
    def run() -> Any:
        made = Run("fsdp1")
        made.steps(2)
        return made

    def optim() -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(run().model, StateDictType.SHARDED_STATE_DICT):
            found: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(run().model, run().optimizer)
        return found

    def model() -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(run().model, StateDictType.SHARDED_STATE_DICT):
            found: dict[str, Any] = run().model.state_dict()
        return found

    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        loaded = load_sharded_optimizer_state_dict(model(), "optim", reader)
        return {"loaded": loaded["optim"]["state"]["block.up.weight"]}

    def expected() -> dict[str, Any]:
        state = optim()["state"]["block.up.weight"]
        return {"loaded": {key: _resharded(item) for key, item in state.items()}}

    return across(state=lambda: {"optim": optim(), "model": model()}, blank=dict, load=load, expected=expected)


def _resharded(tensor: Any) -> Any:
    """The local shard that `load_sharded_optimizer_state_dict` makes of a tensor."""
    from layouts import full

    if not hasattr(tensor, "local_shards"):
        return tensor
    whole, rank = full(tensor), dist.get_rank()
    rows = -(-whole.shape[0] // dist.get_world_size())
    local = whole[rank * rows : (rank + 1) * rows]
    return init_from_local_shards(
        [StShard.from_tensor_and_offsets(local.contiguous(), [rank * rows, 0], rank)], *whole.shape
    )


@four("model and optimizer", "FSDP1 with tensor parallel: the state dicts")
def fsdp1_tensor_parallel() -> Trial:
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make(steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model = FullyShardedDataParallel(
            model, device_mesh=both["data"], use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            model(randn(4, 8, seed=step)).square().mean().backward()
            optimizer.step()
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    filled, empty = functools.cache(lambda: make(2)), functools.cache(lambda: make(1))
    return across(state=lambda: filled(), blank=lambda: _copied(empty()))
