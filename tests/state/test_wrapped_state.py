"""Tensors that keep their numbers in others, through save and load: brought back, or refused by name."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from meshes import distributed, mesh_for, new_uri, outlined
from thread_ranks import run_threads
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor

import ckptstore


def two(*shape: int, start: float = 0.0) -> TwoTensor:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + start
    return TwoTensor(numbers, -numbers)


def bits(tensor: TwoTensor) -> tuple[list[Any], list[Any]]:
    return tensor.a.tolist(), tensor.b.tolist()


def save(state: dict[str, Any], uri: str | None = None) -> ckptstore.CheckpointStore:
    store = ckptstore.open_store(uri or new_uri())
    store.save(1, state)
    return store


def test_alone_in_containers_and_in_one_another() -> None:
    def state(start: float) -> dict[str, Any]:
        inner = TwoTensor(two(3, start=start), two(3, start=start + 7))
        return {"w": two(2, 3, start=start), "list": [1, {"x": two(4, start=start)}], "deep": inner}

    given, found = state(5), state(0)
    store = save(given)
    tensors = found["w"], found["list"][1]["x"], found["deep"]
    store.load(found)
    assert (found["w"], found["list"][1]["x"], found["deep"]) == tensors, "filled in place"
    assert bits(found["w"]) == bits(given["w"])
    assert bits(found["list"][1]["x"]) == bits(given["list"][1]["x"])
    assert [bits(part) for part in (found["deep"].a, found["deep"].b)] == [
        bits(part) for part in (given["deep"].a, given["deep"].b)
    ]
    assert found["list"][0] == 1


class Kernel(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclass
class Options:
    kernel: Kernel = Kernel.FAST
    scale: float = 0.1


class Coded(torch.Tensor):
    """Shaped as the quantised tensors of libraries are: codes of one dtype, scales of another, and a context."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        made.codes, made.scale, made.context = codes, scale, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, *_: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is not needed for a checkpoint")


def coded(seed: int = 0, context: Any = None) -> Coded:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-99, 99, (4, 6), dtype=torch.int8, generator=generator)
    return Coded(codes, torch.rand(4, generator=generator), context)


class Computed(Coded):
    """Its codes are made at each look."""

    @property
    def made(self) -> torch.Tensor:
        return self.scale + 1

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["made"], None


CONTEXTS: dict[str, tuple[Any, Any]] = {
    "none": (None, ["other"]),
    "float": (1.0, 1),
    "bool": (True, 1),
    "text": ("1", 1),
    "list": ([True, torch.float32], [True, torch.float16]),
    "dataclass": (Options(), Options(Kernel.EXACT)),
    "numbers of a dataclass": (
        {"block": (1, 64), "options": Options()},
        {"block": (1, 64), "options": Options(scale=0.2)},
    ),
    "size": (torch.Size([2]), torch.Size([3])),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_the_same_context_fits_and_another_does_not(kind: str) -> None:
    context, other = CONTEXTS[kind]
    given, found = coded(context=context), coded(1, copy.deepcopy(context))
    store = save({"w": given})
    store.load({"w": found})
    assert torch.equal(found.codes, given.codes)
    assert torch.equal(found.scale, given.scale)
    for wrong in (coded(context=other), two(4, 6)):
        with pytest.raises(ckptstore.StateMismatch, match="w was saved from another kind"):
            store.load({"w": wrong})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: coded(context=object()), "w wraps tensors and has a builtins.object"),
        (lambda: Coded(torch.ones(3), torch.ones(3, device="cpu").to_sparse(), None), "w.scale"),
        (lambda: Coded(torch.ones(3), torch.ones(3, device="meta"), None), "w.scale is a tensor on meta"),
        (lambda: Coded(torch.ones(3), None, None), "w.scale is a NoneType"),  # type: ignore[arg-type]
        (lambda: Computed(torch.ones(3), torch.ones(3), None), "w.made is computed each time"),
    ],
)
def test_what_cannot_come_back_is_refused_with_its_key(make: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises(ckptstore.InvalidState, match=words):
        save({"w": make()})


class Quantised(torch.nn.Module):
    """Two layers that share a wrapped weight."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)
        self.first.weight = torch.nn.Parameter(two(3, 3, start=start), requires_grad=False)
        self.last.weight = self.first.weight
        self.register_buffer("codes", two(5, start=start))


def test_parameters_and_buffers_of_a_module() -> None:
    given, found = Quantised(4), Quantised(0)
    weight = found.first.weight
    save({"model": given}).load({"model": found})
    assert found.first.weight is weight is found.last.weight
    assert bits(weight) == bits(given.first.weight)  # type: ignore[arg-type]
    assert bits(found.codes) == bits(given.codes)  # type: ignore[arg-type]
    assert torch.equal(found.first.bias, given.first.bias)


class Halved(torch.optim.Optimizer):
    """Its state is in wrapped tensors, as that of 8-bit optimizers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = TwoTensor(torch.zeros_like(parameter.data), torch.zeros_like(parameter.data))
                    state["mean"].a.lerp_(parameter.grad, 0.5)
                    state["mean"].b.add_(state["mean"].a)
                    parameter.data.sub_(state["mean"].b * group["lr"])


@pytest.mark.parametrize("has_stepped", [True, False])
def test_optimizer_state_goes_on_bit_by_bit(has_stepped: bool) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, Halved]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        return model, Halved(model.parameters())

    def step(model: torch.nn.Module, optimizer: Halved) -> None:
        optimizer.zero_grad()
        model(torch.linspace(0, 1, 6).reshape(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = make(1)
    step(model, optimizer)
    store = save({"model": model, "optim": optimizer})
    step(model, optimizer)
    other, again = make(2)
    if has_stepped:
        step(other, again)
    store.load({"model": other, "optim": again})
    step(other, again)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
        assert bits(optimizer.state[left]["mean"]) == bits(again.state[right]["mean"])


def parts(rank: int, full: TwoTensor, ranks: list[int], placement: Any) -> DTensor:
    """A DTensor whose parts are wrapped."""
    mesh = mesh_for(rank, ranks)
    cut = [distributed(inner, mesh, [placement]).to_local() for inner in (full.a, full.b)]
    return DTensor.from_local(TwoTensor(*cut), mesh, [placement], run_check=False, shape=full.shape, stride=(2, 1))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_parts_of_a_dtensor(placement: Any) -> None:
    """Five rows on four ranks: the last has none."""
    uri = new_uri()

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        store.save(1, {"w": parts(rank, two(5, 2), [0, 1, 2, 3], placement)})
        found = parts(rank, two(5, 2, start=99), [0, 1, 2, 3], placement)
        store.load({"w": found})
        local, expected = found._local_tensor, parts(rank, two(5, 2), [0, 1, 2, 3], placement)._local_tensor
        return bits(local) == bits(expected) or rank

    assert run_threads(4, uri, flow) == [True] * 4

    def elsewhere(store: ckptstore.CheckpointStore, rank: int) -> Any:
        other = Replicate() if placement == Shard(0) else Shard(0)
        with pytest.raises(ckptstore.StateMismatch, match=r"w@0,0 cannot be loaded: w"):
            store.load({"w": parts(rank, two(5, 2), [0, 1], other)})
        return True

    assert run_threads(2, uri, elsewhere) == [True] * 2


def test_a_part_that_no_rank_has_is_named() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        state = {"w": parts(rank, two(4, 2), [0, 1], Shard(0))} if rank == 1 else {"x": 1}
        with pytest.raises(ckptstore.InvalidState, match=r"the chunks of w \(rank 1\) do not cover"):
            store.save(1, state)
        return len(list(store))

    assert run_threads(2, new_uri(), flow) == [0, 0]


@pytest.mark.parametrize(
    ("made", "words"),  # the first of these tensors costs a second, in each process that collects the tests
    [
        (lambda: (two(3), torch.zeros(3)), r"w is a plain value in the checkpoint and a tensor in the state"),
        (
            lambda: (torch.zeros(3), two(3)),
            r"w is a tensor in the checkpoint and a TwoTensor, which wraps tensors, in the state",
        ),
        (lambda: (two(3), two(4)), r"w cannot be loaded: .*shape"),
        (lambda: (two(3), TwoTensor(torch.zeros(3).half(), torch.zeros(3).half())), r"w cannot be loaded: .*float16"),
        (lambda: ({"x": 1}, {"x": two(3)}), r"missing in the checkpoint: w.x"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(made: Callable[[], tuple[Any, Any]], words: str) -> None:
    saved, loaded = made()
    with pytest.raises(ckptstore.StateMismatch, match=words):
        save({"w": saved}).load({"w": loaded})


class Silent(torch.Tensor):
    """A subclass that keeps its numbers elsewhere and does not say where."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Silent:
        made: Silent = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Silent(args[0].inner)
        raise AssertionError(f"{func} is not for a checkpoint")


def freed() -> torch.Tensor:
    """A tensor whose memory was taken away, as FSDP1 does with what it gathers."""
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Silent(torch.ones(64)), "w is a Silent that has no memory of its own"),
        (freed, "The memory of w has been given back"),
    ],
)
def test_a_tensor_without_memory_is_refused_at_the_save_and_not_written_to_by_a_load(make: Any, what: str) -> None:
    with pytest.raises(ckptstore.InvalidState, match=what):
        save({"w": make()})
    store = save({"w": torch.ones(64)})
    with pytest.raises(ckptstore.InvalidState, match=what):
        store.load({"w": make()})


@pytest.mark.parametrize("always", [False, True], ids=["listed", "outlined"])
def test_several_boxes_in_one_local_tensor(always: bool) -> None:
    """What torchrec gives: a part made of shards, each with its place in the whole."""
    full = torch.arange(24.0).reshape(6, 4)

    def state(rank: int, scale: float) -> dict[str, Any]:
        rows = [slice(0, 1), slice(4, 6)] if rank == 0 else [slice(1, 4)]
        shards = [full[row].clone() * scale for row in rows]
        local = LocalShardsWrapper(shards, [(row.start, 0) for row in rows])
        mesh = mesh_for(rank, [0, 1])
        return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(4, 1))}

    uri = new_uri()

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        store.save(1, state(rank, 1))
        found = state(rank, 0)
        store.load(found)
        expected = state(rank, 1)["w"]._local_tensor.local_shards()
        return all(map(torch.equal, found["w"]._local_tensor.local_shards(), expected))

    with outlined(always):
        assert run_threads(2, uri, flow) == [True, True]
    whole = {"w": torch.zeros(6, 4)}
    ckptstore.open_store(uri).load(whole)
    assert torch.equal(whole["w"], full)

    def reshard(store: ckptstore.CheckpointStore, rank: int) -> Any:
        found = {"w": distributed(full, mesh_for(rank, [0, 1, 2]), [Shard(0)], zeros=True)}
        store.load(found)
        return torch.equal(found["w"]._local_tensor, full[2 * rank : 2 * rank + 2])

    assert run_threads(3, uri, reshard) == [True] * 3
