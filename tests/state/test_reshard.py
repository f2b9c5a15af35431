"""A state saved by four ranks, loaded by two and by one, and the other way, from any layout into any other."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from saving import ATTEMPT, make_transfer, open_index, open_stored, plain_state, save_flat
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.format.layout import Attempt
from ckptstore.group import find_group
from ckptstore.state.live.flatten import FlatState, TensorEntry, TensorRef
from ckptstore.state.tensors.placement import pieces_of
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.state.write.describe import describe
from ckptstore.storage.disk.local import LocalStorage

ATTEMPTS = {4: Attempt(4, 1, "44444444"), 2: Attempt(2, 1, "22222222")}
SHAPES = {
    "even": (512, 800),
    "uneven": (1001, 403),
    "thin": (3, 7),
    "vector": (10_007,),
    "scalar": (),
    "cube": (6, 700, 130),
    "empty": (0, 5),
}
LAYOUTS = {
    "rows": ((4,), lambda dims: [Shard(0)]),
    "columns": ((4,), lambda dims: [Shard(dims - 1)]),
    "replicated": ((4,), lambda dims: [Replicate()]),
    "hybrid": ((2, 2), lambda dims: [Replicate(), Shard(0)]),
    "grid": ((2, 2), lambda dims: [Shard(0), Shard(dims - 1)]),
    "strided": ((2, 2), lambda dims: [_StridedShard(0, split_factor=2), Shard(0)]),
}


@cache
def whole(name):
    """The numbers of a tensor, the same in every process. Not to be written to."""
    seed = list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


@cache
def mesh_of(layout, ranks):
    """A mesh that never communicates."""
    shape, _ = LAYOUTS[layout]
    shape = shape if ranks == 4 else (2,) if len(shape) == 1 else (2, 1)
    return DeviceMesh("cpu", torch.arange(ranks).reshape(shape), _init_backend=False)


@cache
def local_part(name, layout, ranks):
    """This rank's part of a tensor in a layout, cut out by arithmetic of this test's own. Not to be written to."""
    full, mesh = whole(name), mesh_of(layout, ranks)
    local = full
    placements = LAYOUTS[layout][1](full.ndim)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        factor = getattr(placement, "split_factor", 1)
        share, shares = mesh.get_coordinate()[dim], mesh.size(dim)
        blocks = chunks(local, factor, placement.dim)
        parts = [chunks(block, shares, placement.dim)[share] for block in blocks]
        local = torch.cat(parts, placement.dim)
    return local


def distributed(name, layout, ranks, *, zeros=False):
    """The tensor in a layout, with memory of its own."""
    full, mesh, local = whole(name), mesh_of(layout, ranks), local_part(name, layout, ranks)
    placements = LAYOUTS[layout][1](full.ndim)
    local = torch.zeros_like(local) if zeros else local.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def chunks(tensor, count, dim):
    """`torch.chunk`, with empty ones at the end so that there are as many as asked for."""
    found = list(tensor.chunk(count, dim))
    empty = tensor.narrow(dim, 0, 0)
    return found + [empty] * (count - len(found))


def layouts_of(name):
    return [layout for layout in LAYOUTS if SHAPES[name] or layout == "replicated"]


def sharded(name, ranks, *, zeros=False):
    """The tensor as FSDP1 has it."""
    rank = dist.get_rank()
    full = whole(name)
    blocks = list(full.chunk(ranks, 0))
    starts = [sum(len(block) for block in blocks[:index]) for index in range(len(blocks))]
    local = torch.zeros_like(blocks[rank]) if zeros else blocks[rank].clone()
    shard = LocalShard.from_tensor_and_offsets(local, [starts[rank], *(0,) * (full.ndim - 1)], rank)
    return init_from_local_shards([shard], full.shape)


def build(ranks):
    """What each of the ranks saves."""
    rank = dist.get_rank()
    flat = FlatState()
    for name in SHAPES:
        for layout in layouts_of(name):
            flat.add_tensor((f"{layout}.{name}",), TensorEntry(distributed(name, layout, ranks)))
    half = DeviceMesh("cpu", torch.tensor([0, 1] if rank < 2 else [2, 3]), _init_backend=False)
    part = whole("even").chunk(2, 0)[rank % 2]
    flat.add_tensor(("copied",), TensorEntry(DTensor.from_local(part.clone(), half, [Shard(0)], run_check=False)))
    if ranks == 4:
        flat.add_tensor(("sharded.uneven",), TensorEntry(sharded("uneven", 4)))
    flat.add_tensor(("ddp",), TensorEntry(whole("uneven").repeat(4, 1), replicated=True))
    flat.add_tensor(("buffer",), TensorEntry(torch.full((3,), float(rank)), replicated=True, lowest_rank_counts=True))
    flat.add_tensor(("same",), TensorEntry(torch.ones(5)))
    flat.add_tensor(("statistics",), TensorEntry(torch.full((4,), float(rank))))
    flat.add_value(("epoch",), 3)
    flat.add_value(("generator",), {"position": rank, "history": bytes([rank]) * 70_000})
    flat.add_value(("noise",), {"seed": torch.tensor([rank, rank]), "position": rank})
    if rank == ranks - 1:
        flat.add_value(("last",), "only here")
    return flat


def check_load(root, saved_by, ranks, rank):
    """Load every stored tensor into every layout of these ranks; what was wrong."""
    transfer = make_transfer(root)
    stored = open_stored(root, transfer, rank=rank, world_size=ranks, attempt=ATTEMPTS[saved_by], per_rank="first")
    values = stored.saved().values
    wrong = []
    for name in SHAPES:
        sources = [f"{layout}.{name}" for layout in layouts_of(name)]
        sources += ["sharded.uneven"] if name == "uneven" and saved_by == 4 else []
        targets = {
            (source, layout): distributed(name, layout, ranks, zeros=True)
            for source in sources
            for layout in layouts_of(name)
        }
        stored.fill({f"{source}->{layout}": (target, source) for (source, layout), target in targets.items()})
        for (source, layout), target in targets.items():
            if not torch.equal(target.to_local(), local_part(name, layout, ranks)):
                wrong.append((source, layout))
    if ranks == 4:
        old_style = sharded("uneven", 4, zeros=True)
        stored.fill({"old": (old_style, "columns.uneven")})
        (local,) = old_style.local_shards()
        if not torch.equal(local.tensor, whole("uneven").chunk(4, 0)[rank]):
            wrong.append("ShardedTensor")
    mine = rank if ranks == saved_by else 0
    plain = {
        "ddp": torch.zeros(4004, 403),
        "same": torch.zeros(5),
        "statistics": torch.zeros(4),
        "buffer": torch.ones(3),
    }
    stored.fill({key: (tensor, key) for key, tensor in plain.items()})
    expected = {
        "ddp": whole("uneven").repeat(4, 1),
        "same": torch.ones(5),
        "statistics": torch.full((4,), float(mine)),
        "buffer": torch.zeros(3),
    }
    plain["copied"], expected["copied"] = torch.zeros(512, 800), whole("even")
    stored.fill({"copied": (plain["copied"], "copied")})
    wrong += [key for key in plain if not torch.equal(plain[key], expected[key])]
    generator = {"position": mine, "history": bytes([mine]) * 70_000}
    noise = {"seed": TensorRef("noise.seed"), "position": mine}
    if values != {"epoch": 3, "generator": generator, "noise": noise, "last": "only here"}:
        wrong.append("values")
    transfer.close()
    return wrong


def every_direction(root):
    """Four ranks: all save, two of them save, all load both, two of them load both."""
    dist.init_process_group("gloo")
    rank, storage, root = dist.get_rank(), LocalStorage(root), Path(root)
    first_two = dist.new_group([0, 1])
    group = find_group(None, storage=storage, config=StoreConfig())
    memo, sizes = SaveMemo(), {}
    for _ in range(2):  # the second one takes the short way
        save_flat(root, build(4), group=group, memo=memo, attempt=ATTEMPTS[4])
        dist.barrier()
        if rank == 0 and not sizes:
            names = sorted((root / ATTEMPTS[4].prefix).glob("*.distcp"))
            sizes = {name.name: name.stat().st_size for name in names}
            for file in (root / ATTEMPTS[4].prefix).iterdir():
                file.unlink()
        dist.barrier()
    if rank < 2:
        pair = find_group(first_two, storage=storage, config=StoreConfig())
        save_flat(root, build(2), group=pair, attempt=ATTEMPTS[2])
        pair.close()
    dist.barrier()
    wrong = {(saved_by, 4): check_load(root, saved_by, 4, rank) for saved_by in (4, 2)}
    if rank < 2:
        wrong |= {(saved_by, 2): check_load(root, saved_by, 2, rank) for saved_by in (4, 2)}
    refused = differing(root, group, rank)
    dist.barrier()
    group.close()
    dist.destroy_process_group()
    return wrong, sizes, refused


def differing(root, group, rank):
    """Ranks that disagree: what each is told."""
    told = []
    mesh = mesh_of("rows", 4)
    states = {
        "shape": {"w": DTensor.from_local(torch.ones(2, 3 + (rank == 3)), mesh, [Shard(0)], run_check=False)},
        "kind": {"w": torch.ones(2) if rank == 2 else distributed("even", "rows", 4)},
        "partial": {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)},
    }
    for state in states.values():
        try:
            save_flat(root, plain_state(state), group=group, attempt=Attempt(9, 1, "99999999"))
        except InvalidState as error:
            told.append(str(error))
    hole = {} if rank == 1 else {"w": distributed("even", "rows", 4)}
    try:
        save_flat(root, plain_state(hole), group=group, attempt=Attempt(8, 1, "88888888"))
    except InvalidState as error:
        told.append(str(error))
    return told


def Partial():
    from torch.distributed.tensor import Partial as Pending

    return Pending()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    root = tmp_path_factory.mktemp("reshard")
    return root, run_ranks(4, every_direction, str(root), timeout_seconds=150)


@pytest.mark.parametrize("saved_by", [4, 2])
@pytest.mark.parametrize("loaded_by", [4, 2])
def test_everything_comes_back_in_every_layout(ran, saved_by, loaded_by):
    for wrong, _, _ in ran[1][:loaded_by]:
        assert wrong[saved_by, loaded_by] == []


@pytest.mark.parametrize("saved_by", [4, 2])
def test_one_rank_loads_it_all(ran, saved_by):
    transfer = make_transfer(ran[0])
    stored = open_stored(ran[0], transfer, attempt=ATTEMPTS[saved_by], per_rank="first")
    saved = stored.saved()
    targets = {key: torch.zeros(one.shape, dtype=one.torch_dtype) for key, one in saved.tensors.items()}
    stored.fill({key: (tensor, key) for key, tensor in targets.items()})
    for name in SHAPES:
        for layout in layouts_of(name):
            assert torch.equal(targets[f"{layout}.{name}"], whole(name)), (layout, name)
    assert saved.values["generator"]["position"] == 0
    transfer.close()


@pytest.mark.parametrize("saved_by", [4, 2])
def test_each_byte_is_stored_once(ran, saved_by):
    index = open_index(ran[0], ATTEMPTS[saved_by])
    index.check_complete()
    stored = sum(
        chunk.box.volume * 4
        for key, entry in index.tensors.items()
        if not entry.per_rank
        for chunk in index.chunks(key, 0)
    )
    needed = sum(torch.Size(entry.shape).numel() * 4 for entry in index.tensors.values() if not entry.per_rank)
    assert stored == needed


def test_the_ranks_write_equal_shares(ran):
    sizes = list(ran[1][0][1].values())
    assert len(sizes) == 4
    assert max(sizes) < 1.25 * min(sizes)


def test_ranks_that_disagree_are_told_before_anything_is_committed(ran):
    for _, _, told in ran[1]:
        assert len(told) == 4
        assert "w is a distributed tensor" in told[0]
        assert "rank 2" in told[1]
        assert "Partial" in told[2]
        assert "the chunks of w (ranks 0 and 2-3) do not cover" in told[3]


def test_what_differed_needs_a_word_at_another_world_size(ran):
    transfer = make_transfer(ran[0])
    stored = open_stored(ran[0], transfer, attempt=ATTEMPTS[4], world_size=2)
    with pytest.raises(
        StateMismatch, match=r"its own generator, noise, noise\.seed, statistics, and there are 2 ranks now"
    ):
        stored.saved()
    skipping = open_stored(ran[0], transfer, attempt=ATTEMPTS[4], world_size=2, per_rank="skip")
    saved = skipping.saved()
    assert saved.skipped == {"generator", "noise", "noise.seed", "statistics"}
    assert set(saved.values) == {"epoch", "last"}
    assert [one["position"] for one in skipping.value_of_each_rank("generator")] == [0, 1, 2, 3]
    assert skipping.value_of_each_rank("epoch") == [3]
    assert skipping.value_of_each_rank("nothing") == []
    assert [one.tolist() for one in skipping.value_of_each_rank("statistics")] == [
        [float(rank)] * 4 for rank in range(4)
    ]
    assert [one.tolist() for one in skipping.value_of_each_rank("same")] == [[1.0] * 5]
    noise = skipping.value_of_each_rank("noise")
    assert [one["seed"].tolist() for one in noise] == [[rank, rank] for rank in range(4)]
    transfer.close()


def test_a_plain_tensor_is_one_piece_and_an_empty_one_none():
    (piece,) = pieces_of(torch.ones(2, 3), "w")
    assert (piece.box.offsets, piece.box.sizes) == ((0, 0), (2, 3))
    assert pieces_of(torch.ones(0, 3), "w") == []
    described = describe(plain_state({"a": torch.ones(2), "b": torch.ones(0)}), compare=True)
    assert [item.boxes for item in described.items] == [(piece_box((2,)),), ()]
    assert ATTEMPT.step == 7


def piece_box(shape):
    from ckptstore.state.tensors.boxes import whole as all_of

    return all_of(shape)
