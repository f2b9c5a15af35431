"""Modules with ways of their own: partial state dicts, own methods, hooks, extra state of any kind, nested wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from carrier import FITS, bits, load, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckptstore import InvalidState, StateMismatch
from ckptstore.runtime.torch_private import canonical_names


class LowRank(nn.Module):
    """As with adapters: the base is frozen, and left out of the state."""

    def __init__(self, *, device: str | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(6, 3, device=device).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 6, device=device))
        self.calls: list[str] = []
        self.register_state_dict_post_hook(self.drop)
        self.register_state_dict_pre_hook(lambda *_: self.calls.append("state_dict"))
        self.register_load_state_dict_pre_hook(lambda *_: self.calls.append("before load"))
        self.register_load_state_dict_post_hook(lambda *_: self.calls.append("after load"))

    @staticmethod
    def drop(module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [name for name in found if name.startswith(f"{prefix}base.")]:
            del found[name]


class OwnForm(nn.Module):
    """A state dict that has nothing to do with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"a": torch.zeros(2)}
        self.count = 0

    def state_dict(self) -> Any:  # type: ignore[override]
        return {"table": self.table, "count": self.count}

    def load_state_dict(self, given: Any) -> None:  # type: ignore[override]
        self.table, self.count = given["table"], given["count"]


@pytest.mark.parametrize("keywords", [{}, {"strict": False}, {"include": "m.a"}])
def test_what_a_state_dict_leaves_out_stays_and_hooks_run_once(keywords: dict[str, Any]) -> None:
    first, other = LowRank(), LowRank()
    checkpoint = saved({"m": first})
    assert checkpoint.keys() == ["m.a"]
    base = bits(dict(other.base.state_dict()))
    checkpoint.load({"m": other}, **keywords)
    assert torch.equal(other.a, first.a)
    assert bits(dict(other.base.state_dict())) == base
    assert other.calls == ["state_dict", "before load", "after load"]
    assert first.calls == ["state_dict"]


def test_a_part_of_a_meta_module_that_is_left_out_stays_on_meta_and_is_named() -> None:
    first, other = LowRank(), LowRank(device="meta")
    checkpoint = saved({"m": first})
    with pytest.warns(UserWarning, match=r"stay there until you set them: base\.weight, base\.bias"):
        report = checkpoint.load({"m": other})
    assert report.left_on_meta == ("m.base.bias", "m.base.weight")
    assert torch.equal(other.a, first.a)
    assert other.base.weight.is_meta
    assert other.calls == ["state_dict", "before load", "after load"]


def test_a_state_dict_of_any_form_comes_back() -> None:
    first, other = OwnForm(), OwnForm()
    first.table, first.count = {"a": torch.ones(2), "b": torch.ones(1)}, 4
    saved({"m": first}).load({"m": other})
    assert bits([other.table, other.count]) == bits([first.table, first.count])


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_buffer_of_another_shape_is_refused_where_the_module_takes_none(kind: Any) -> None:
    checkpoint = saved({"m": nn.Sequential(nn.Linear(2, 3), kind(3, affine=False, track_running_stats=True))})
    other = nn.Sequential(nn.Linear(2, 3), kind(4, affine=False, track_running_stats=True))
    before = bits(dict(other.state_dict()))
    with pytest.raises(StateMismatch, match=r"m\.1\.running_mean is float32 \[3\] in the checkpoint"):
        checkpoint.load({"m": other})
    assert bits(dict(other.state_dict())) == before


class Renaming(nn.Linear):
    """Hooks that give the weight another name, and take it back under that."""

    def __init__(self, *, takes: bool, copies: bool = False) -> None:
        super().__init__(2, 2)
        self.copies = copies
        self.register_state_dict_post_hook(self.rename)
        if takes:
            self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        weight = found.pop(f"{prefix}weight")
        found[f"{prefix}w.new"] = weight.clone() if module.copies else weight

    @staticmethod
    def rename_back(module: Any, found: dict[str, Any], prefix: str, *_: Any) -> None:
        found[f"{prefix}weight"] = found.pop(f"{prefix}w.new")


@pytest.mark.parametrize(("takes", "copies"), [(True, False), (True, True), (False, False), (False, True)])
def test_hooks_may_rename_and_what_nobody_takes_back_is_an_error(takes: bool, copies: bool) -> None:
    first, other = Renaming(takes=takes, copies=copies), Renaming(takes=takes, copies=copies)
    checkpoint = saved({"m": first})
    assert checkpoint.keys() == ["m.bias", "m.w.new"]
    if takes or not copies:  # without a copy it is the memory of the weight that was filled
        checkpoint.load({"m": other})
        assert torch.equal(other.weight, first.weight)
    else:
        with pytest.raises(StateMismatch, match=r"'m' has w\.new in its state_dict.*does not take it back"):
            checkpoint.load({"m": other})


class Sharded(nn.Module):
    """Shows its rows as a ShardedTensor with a shard for each, as the tables of torchrec."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)
        self.register_state_dict_post_hook(self.show)
        self.register_load_state_dict_pre_hook(self.take)

    @staticmethod
    def show(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        found[f"{prefix}rows"] = in_shards(module.rows.detach())

    @staticmethod
    def take(module: Any, found: dict[str, Any], prefix: str, *_: Any) -> None:
        found[f"{prefix}rows"] = torch.cat([shard.tensor for shard in found[f"{prefix}rows"].local_shards()])


def in_shards(rows: torch.Tensor) -> ShardedTensor:
    """A ShardedTensor of which this rank has several shards, or none, in the memory of these rows."""
    shards = [Shard.from_tensor_and_offsets(rows[at : at + 1], [at, 0], rank=0) for at in range(len(rows))]
    return init_from_local_shards(shards, rows.shape)


@pytest.mark.usefixtures("alone")
def test_sharded_tensors_come_back_whatever_number_of_shards_a_rank_has() -> None:
    first, again = torch.arange(6.0).reshape(3, 2), torch.zeros(3, 2)
    module = Sharded(torch.zeros(3, 2))
    checkpoint = saved({"m": Sharded(first.clone()), "plain": {"rows": in_shards(first)}})
    checkpoint.load({"m": module, "plain": {"rows": in_shards(again)}})
    assert torch.equal(module.rows, first)
    assert torch.equal(again, first)


class Refusing(nn.Linear):
    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise AttributeError("not today")


def test_a_module_that_refuses_its_state_is_named() -> None:
    checkpoint = saved({"m": nn.Linear(2, 2)})
    with pytest.raises(StateMismatch, match=r"module at 'm'.*AttributeError: not today"):
        checkpoint.load({"m": Refusing(2, 2)})


def test_two_entries_that_are_one_without_wrappers_are_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Linear(1, 1))
            self.register_state_dict_post_hook(lambda _m, found, _p, _l: found.update({"inner.bias": torch.ones(1)}))

    with pytest.raises(InvalidState, match=r"both 'inner\._orig_mod\.bias' and 'inner\.bias'"):
        saved({"m": Both()})


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 3,
    "empty": lambda: torch.empty(0, dtype=torch.uint8),
    "bytes": lambda: torch.arange(7, dtype=torch.uint8),
    "more bytes": lambda: torch.arange(9, dtype=torch.uint8),
    "floats": lambda: torch.ones(2, 3),
    "scalar": lambda: torch.tensor(2.5),
    "dict": lambda: {"amax": torch.ones(4), "recipe": "delayed"},
    "other dict": lambda: {"amax": torch.ones(5), "inner": {"x": torch.ones(1)}},
    "list": lambda: [torch.ones(2), 1],
    "expanded": lambda: torch.ones(1).expand(3),
}


@pytest.mark.parametrize("before", EXTRAS)
def test_the_module_decides_about_extra_state_of_any_kind(before: str) -> None:
    first = Extra(EXTRAS[before]())
    checkpoint = saved({"m": nn.Sequential(first)})
    for now in EXTRAS:
        other = Extra(EXTRAS[now]())
        assert load(checkpoint, {"m": nn.Sequential(other)}) == FITS
        assert bits(other.extra) == bits(first.extra), now
        assert torch.equal(other.layer.weight, first.layer.weight)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    """Compile it when it is called, once: torch refuses what is compiled already."""
    if hasattr(module, "get_compiler_config"):
        return module
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "ddp": DistributedDataParallel,
    "ddp of checkpoint": lambda module: DistributedDataParallel(checkpoint_wrapper(module)),
}


class Deep(nn.Module):
    """With children that are called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.last = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(3))


def numbers(module: nn.Module) -> list[Any]:
    return [bits(tensor) for tensor in [*module.parameters(), *module.buffers()]]


@settings(max_examples=min(25, settings.default.max_examples), deadline=None)
@given(
    outside=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3),
    inside=st.lists(st.sampled_from(["checkpoint", "compile"]), max_size=3),
    deepest=st.lists(st.sampled_from(["checkpoint", "compile"]), max_size=3),
)
@pytest.mark.usefixtures("alone")
def test_wrappers_nested_in_any_way_leave_no_trace(outside: list[str], inside: list[str], deepest: list[str]) -> None:
    def make() -> nn.Module:
        module = Deep()
        for name in deepest:
            module.module[1] = WRAPPERS[name](module.module[1])
        for name in inside:
            module.module = WRAPPERS[name](module.module)
        whole: nn.Module = module
        for name in outside:
            whole = WRAPPERS[name](whole)
        return whole

    plain, wrapped, again = Deep(), make(), make()
    expected = numbers(wrapped)
    checkpoint = saved({"m": wrapped, "o": torch.optim.SGD(wrapped.parameters(), lr=0.5)})
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    load(checkpoint, {"m": again, "o": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert load(checkpoint, {"m": plain}) == FITS
    assert numbers(again) == numbers(plain) == expected


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_wrappers_inside_of_fsdp1_leave_no_trace(use_orig_params: bool) -> None:
    def make() -> nn.Module:
        module = Deep()
        module.module[0] = checkpoint_wrapper(compiled(module.module[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inner = FullyShardedDataParallel(
                module.module, device_id=torch.device("cpu"), use_orig_params=use_orig_params
            )
            module.module = compiled(inner)
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)

    plain, wrapped, again = Deep(), make(), make()
    names = {own for name, _ in wrapped.named_parameters() for own in canonical_names(wrapped, name)}
    assert names == {name for name, _ in plain.named_parameters()}
    expected = numbers(plain)
    assert load(saved({"m": plain}), {"m": again}) == FITS
    nn.init.zeros_(plain.scale)
    assert load(saved({"m": again}), {"m": plain}) == FITS
    assert numbers(plain) == expected
