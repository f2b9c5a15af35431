"""`Checkpoint.from_uri` on a directory that stock DCP wrote: loaded like any other, nothing in it run."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import blank
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckptstore
from ckptstore import InvalidState
from ckptstore.dcp import StoreReader, StoreWriter, translated
from ckptstore.interchange import import_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model():
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 600))


def trained(seed):
    torch.manual_seed(seed)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_an_optimizers_own_state_dict_keeps_its_groups(tmp_path):
    net = model()

    def optimizer(lr):
        groups = [{"params": net[0].parameters(), "lr": lr}, {"params": net[2].parameters(), "lr": 10 * lr}]
        made = torch.optim.SGD(groups, momentum=0.9)
        net(torch.ones(2, 30)).sum().backward()
        made.step()
        return made.state_dict()

    saved, state = optimizer(0.25), {"optim": optimizer(9.0)}
    dcp.save({"optim": saved}, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = ckptstore.Checkpoint.from_uri(tmp_path / "c")
    assert checkpoint.to_dict()["optim"]["param_groups"] == saved["param_groups"]
    checkpoint.load(state)
    assert state["optim"]["param_groups"] == saved["param_groups"]
    for number, items in saved["state"].items():
        assert torch.equal(state["optim"]["state"][number]["momentum_buffer"], items["momentum_buffer"])


class Halving(dcp.DefaultSavePlanner):
    """Casts item by item, and says so to nobody."""

    def transform_object(self, item, obj):
        found = super().transform_object(item, obj)
        return found.half() if isinstance(found, torch.Tensor) else found


class Odd(torch.Tensor):
    """Torch's reader makes one by running code."""


@pytest.mark.parametrize("size", [10, 400_000])
def test_tensors_that_are_smaller_than_metadata_says_are_read(tmp_path, size):
    saved = {"a": torch.arange(float(size)) % 100, "b": torch.arange(5.0)}
    dcp.save(saved, checkpoint_id=tmp_path / "c", planner=Halving(), no_dist=True)
    state, read = ({key: torch.zeros_like(tensor) for key, tensor in saved.items()} for _ in range(2))
    ckptstore.Checkpoint.from_uri(tmp_path / "c").load(state)
    dcp.load(read, storage_reader=StoreReader(tmp_path / "c"), no_dist=True)
    assert all(torch.equal(found[key], saved[key]) for found in (state, read) for key in saved)


def test_a_tensor_that_needs_code_is_refused_by_its_key_and_hinders_no_other(tmp_path):
    state = {"w": torch.zeros(4), "odd": torch.zeros(30)}
    odd = torch.ones(30).as_subclass(Odd)
    dcp.save({"w": torch.arange(4.0), "odd": odd}, checkpoint_id=tmp_path / "c", no_dist=True)
    for allow_pickle, message in ((False, "odd cannot be read safely"), (True, "odd was stored as Odd")):
        reader = StoreReader(tmp_path / "c", allow_pickle=allow_pickle)
        with pytest.raises(InvalidState, match=message), translated():
            dcp.load(dict(state), storage_reader=reader, no_dist=True)
    ckptstore.Checkpoint.from_uri(tmp_path / "c").load(state, include="w")
    assert state["w"].tolist() == [0, 1, 2, 3]


def test_values_with_code_only_matter_when_they_are_wanted(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    dcp.save({"w": torch.ones(3), "evil": Evil()}, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = ckptstore.Checkpoint.from_uri(str(tmp_path / "c"))
    state = {"w": torch.zeros(3), "evil": None}
    with pytest.raises(InvalidState, match="evil"):
        checkpoint.load(state)
    checkpoint.load(state, include="w")
    assert state["w"].sum() == 3
    assert not (tmp_path / "run").exists()
    checkpoint.load(state, allow_pickle=True)
    assert (tmp_path / "run").exists()


def odd_tensors():
    """Tensors above and below the size up to which torch reads the frame, that say more than dtype, shape and place."""
    found = {}
    for size in (30_000, 50):
        complex_, real = torch.randn(size, dtype=torch.complex64), torch.randn(size)
        found |= {
            f"conjugated.{size}": complex_.conj(),
            f"negated.{size}": torch._neg_view(real),
            f"both.{size}": torch._neg_view(complex_.conj()),
            f"imaginary.{size}": complex_.conj().imag,
            f"parameter.{size}": torch.nn.Parameter(real),
            f"strided.{size}": real.reshape(5, -1).t(),
            f"part.{size}": real[5:-5],
            f"plain.{size}": complex_,
        }
    return found


@pytest.fixture
def odd(tmp_path):
    tensors = odd_tensors()
    dcp.save(tensors, checkpoint_id=tmp_path / "odd", no_dist=True)
    return tmp_path / "odd", tensors


@pytest.mark.parametrize("way", ["load", "StoreReader", "import"])
def test_numbers_that_stock_dcp_keeps_with_marks_come_as_they_were(odd, tmp_path, way):
    path, tensors = odd
    state = blank(tensors)
    if way == "load":
        ckptstore.Checkpoint.from_uri(str(path)).load(state)
    elif way == "StoreReader":
        dcp.load(state, storage_reader=StoreReader(path), no_dist=True)
    else:
        with ckptstore.open_store(tmp_path / "store", durable=False) as store:
            import_state(path, store, 1, kind="dcp")
            store.load(state)
    for key, tensor in tensors.items():
        assert torch.equal(state[key], tensor), key


def in_groups(seed):
    net = trained(seed)[0]
    first, *rest = net.parameters()
    groups = [{"params": [first], "lr": 0.1 * seed}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * seed)
    net(torch.ones(8, 30)).sum().backward()
    optimizer.step()
    return net, optimizer


def contents(net, optimizer):
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    return [*net.state_dict().values(), *(optimizer.state[each]["exp_avg"] for each in net.parameters())], groups


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("way", ["stock", "writer", "store"])
def test_what_get_state_dict_gave_is_loaded_by_objects(tmp_path, way, flat):
    net, optimizer = in_groups(1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(net, optimizer, options=options)
    state, fresh, other = {"model": weights, "optimizer": moments, "epoch": 3}, *in_groups(2)
    target, alone = {"model": fresh, "optimizer": other, "epoch": 0}, tmp_path / "step-120"
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        writer = dcp.FileSystemWriter(alone)
        if way != "stock":
            writer = StoreWriter(store.dcp_target(), step=5) if way == "store" else StoreWriter(alone)
        dcp.save(state, storage_writer=writer, no_dist=True)
        if way == "store":
            store.resume(target)
        else:
            checkpoint = ckptstore.Checkpoint.from_uri(str(alone))
            assert checkpoint.world_size == 1
            assert way != "stock" or checkpoint.step == 120
            checkpoint.load(target)
    assert target["epoch"] == 3
    (mine, groups), (theirs, saved_groups) = contents(fresh, other), contents(net, optimizer)
    assert groups == saved_groups
    assert all(map(torch.equal, mine, theirs))


def test_stock_dcp_reads_an_optimizer_with_flat_names(tmp_path):
    net, optimizer = in_groups(1)
    fresh, other = in_groups(2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with ckptstore.open_store(tmp_path, durable=False) as store:
        checkpoint = store.save(1, {"model": net, "optimizer": optimizer})
    weights, moments = get_state_dict(fresh, other, options=options)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint.uri, no_dist=True)
    set_state_dict(fresh, other, model_state_dict=weights, optim_state_dict=moments, options=options)
    (mine, groups), (theirs, saved_groups) = contents(fresh, other), contents(net, optimizer)
    assert groups == saved_groups
    assert all(map(torch.equal, mine, theirs))
