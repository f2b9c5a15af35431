"""Modules of one process: names, ties, extra state, the meta device, and what is said when things do not fit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from carrier import FITS, bits, load, saved
from torch import nn

from ckptstore import InvalidState, StateMismatch, open_store
from ckptstore.state import replicated
from ckptstore.state.live.apply import collect


class Tied(nn.Module):
    def __init__(self, *, device: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, device=device)
        self.norm = nn.BatchNorm1d(4, device=device)
        self.head = nn.Linear(4, 5, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), 7.0, device=device))
        self.register_buffer("cache", torch.ones(2, device=device), persistent=False)


def memory(module: nn.Module) -> list[tuple[str, int]]:
    return [(name, tensor.data_ptr()) for name, tensor in [*module.named_parameters(), *module.named_buffers()]]


def shaken(module: nn.Module) -> nn.Module:
    """The same module with other numbers."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.rand(tensor.shape) * 10)
    return module


def contents(module: nn.Module) -> Any:
    return bits(dict(module.state_dict()))


def test_a_save_shows_the_live_memory_and_copies_nothing() -> None:
    module = Tied()
    flat = collect({"model": module})
    for name in ("scale", "embedding.weight"):
        assert flat.tensors[f"model.{name}"].tensor.data_ptr() == module.state_dict()[name].data_ptr()
    assert "model.cache" not in flat.paths, "only what is persistent is stored"
    assert flat.aliases == {"model.head.weight": "model.embedding.weight"}


def test_tied_weights_load_under_either_name_and_stay_tied() -> None:
    module, again, untied = shaken(Tied()), Tied(), Tied()
    checkpoint, before = saved({"model": module}), memory(again)
    load(checkpoint, {"model": again})
    assert memory(again) == before
    assert again.head.weight is again.embedding.weight
    assert contents(again) == contents(module)
    untied.head.weight = nn.Parameter(torch.zeros(5, 4))
    load(checkpoint, {"model": untied})
    assert contents(untied) == contents(module)
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()


def test_a_tensor_that_stands_at_two_places_comes_back_at_both() -> None:
    module, other = shaken(nn.Linear(2, 2)), nn.Linear(2, 2)
    checkpoint = saved({"model": module, "more": {"weight": module.weight, "twice": [module.weight], "n": 1}})
    more = {"weight": torch.zeros(2, 2), "twice": [torch.zeros(2, 2)], "n": 0}
    assert load(checkpoint, {"model": other, "more": more}) == FITS
    assert all(torch.equal(found, module.weight) for found in (other.weight, more["weight"], more["twice"][0]))
    assert more["n"] == 1


def test_loading_leaves_gradients_and_random_numbers_where_they_are() -> None:
    other = Tied()
    other.head(torch.rand(2, 4)).sum().backward()
    gradient, checkpoint = other.head.weight.grad, saved({"model": shaken(Tied())})
    kept, random = gradient.clone(), torch.get_rng_state()
    load(checkpoint, {"model": other})
    assert other.head.weight.grad is gradient
    assert torch.equal(gradient, kept)
    assert torch.equal(torch.get_rng_state(), random)


def test_every_difference_is_listed() -> None:
    saved_model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "c": nn.Linear(1, 1)})
    model = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(2, 2).double(), "d": nn.Linear(1, 1)})
    before = contents(model)
    with pytest.raises(StateMismatch) as caught:
        load(saved({"model": saved_model, "n": 1}), {"model": model, "n": torch.ones(2), "lost": 3})
    for part in (
        "model.a.weight is float32 [3, 2] in the checkpoint and float32 [4, 2] in the state",
        "model.a.bias is float32 [3] in the checkpoint and float32 [4] in the state",
        "model.b.weight is float32 [2, 2] in the checkpoint and float64 [2, 2] in the state",
        "n is a plain value in the checkpoint and a tensor in the state",
        "3 missing in the checkpoint: lost, model.d.bias, model.d.weight",
        "2 without a place in the state: model.c.bias, model.c.weight",
    ):
        assert part in str(caught.value)
    assert contents(model) == before


def test_without_strict_the_rest_is_loaded_and_reported() -> None:
    source = nn.ModuleDict({"a": shaken(nn.Linear(2, 3)), "c": nn.Linear(1, 1)})
    checkpoint, model = saved({"model": source}), nn.ModuleDict({"a": nn.Linear(2, 3), "d": nn.Linear(1, 1)})
    before = contents(model["d"])
    lacking = {"model.d.weight", "model.d.bias"}, {"model.c.weight", "model.c.bias"}
    assert load(checkpoint, {"model": model}, strict=False) == lacking
    assert contents(model["a"]) == contents(source["a"])
    assert contents(model["d"]) == before
    with pytest.raises(StateMismatch, match=r"float32 \[3, 2\]"):
        load(checkpoint, {"model": nn.ModuleDict({"a": nn.Linear(5, 3)})}, strict=False)


def test_a_pattern_narrows_what_is_loaded_and_what_must_fit() -> None:
    source = shaken(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    checkpoint, model = saved({"model": source, "epoch": 4}), nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    before, state = contents(model[1]), {"model": model, "epoch": 0}
    assert load(checkpoint, state, include="model.0.*") == FITS
    assert state["epoch"] == 0
    assert contents(model[0]) == contents(source[0])
    assert contents(model[1]) == before
    assert load(checkpoint, {"model": model[:1], "epoch": 0}, include=["epoch", "model.0.weight"]) == FITS


def test_meta_modules_get_memory_and_stay_tied_and_in_their_optimizer() -> None:
    source, model = shaken(Tied()), Tied(device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = saved({"model": source})
    with pytest.warns(UserWarning, match=r"'model'.*stay there until you set them: cache"):
        load(checkpoint, {"model": model}, device="cpu")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_meta] == ["cache"]
    assert model.head.weight is model.embedding.weight
    assert contents(model) == contents(source)
    assert {id(item) for item in optimizer.param_groups[0]["params"]} == {id(item) for item in model.parameters()}
    assert model.head.weight.requires_grad


class Rotary(nn.Module):
    """A buffer outside of the state, which the module can make and, beside it, one that it cannot."""

    def __init__(self, *, device: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device=device))
        self.register_buffer("freq", torch.empty(4, device=device), persistent=False)
        self.register_buffer("table", torch.empty(2, dtype=torch.bool, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.freq.copy_(torch.arange(4.0))


def test_buffers_outside_of_the_state_are_made_by_their_module_or_stay_on_meta() -> None:
    first, state = Rotary(), torch.get_rng_state()
    checkpoint, model = saved({"model": nn.Sequential(first)}), nn.Sequential(Rotary(device="meta"))
    with pytest.warns(UserWarning, match=r"stay there until you set them: 0\.table"):
        report = checkpoint.load({"model": model})
    assert (report.remade, report.left_on_meta) == (("model.0.freq",), ("model.0.table",))
    assert torch.equal(model[0].weight, first.weight)
    assert torch.equal(model[0].freq, torch.arange(4.0))
    assert model[0].table.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    half = Rotary(device="meta")
    half.weight = nn.Parameter(torch.full((3,), 5.0))
    with pytest.warns(UserWarning, match="freq"):
        checkpoint.load({"model": nn.Sequential(half)}, include="model.0.weight")
    assert half.freq.is_meta  # making it would have changed a weight that is there


@pytest.mark.slow
def test_a_llama_on_meta_has_the_logits_of_the_saved_one() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    with torch.device("meta"):
        other = LlamaForCausalLM(config).eval()
    report = saved({"model": model}).load({"model": other}, device="cpu")
    assert "model.model.rotary_emb.inv_freq" in report.remade
    assert not report.left_on_meta
    tokens = torch.arange(8)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)


def test_only_the_meta_part_gets_memory_and_none_where_the_load_is_given_up() -> None:
    source = shaken(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = memory(model[0])
    with pytest.raises(StateMismatch):
        load(saved({"model": source[0]}), {"model": model})
    assert all(parameter.is_meta for parameter in model[1].parameters())
    checkpoint = saved({"model": source})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(checkpoint, {"model": model})
    assert memory(model[0]) == before
    assert contents(model) == contents(source)


class Picky(nn.Module):
    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError("not now")


def test_a_module_that_torch_cannot_read_is_named() -> None:
    with pytest.raises(InvalidState, match=r"module at 'a\.b'.*not now"):
        saved({"a": {"b": Picky()}})


class Average:
    """As an EMA of weights: tensors that exist only after the first update, and a container that grows."""

    def __init__(self, **shadow: torch.Tensor) -> None:
        self.shadow = shadow
        self.history: list[dict[str, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "history": self.history, "pair": (len(self.shadow), torch.ones(1))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.history, self.pair = state["shadow"], state["history"], state["pair"]


class Refusing(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("shadow")


def test_stateful_objects_get_the_structure_that_was_saved() -> None:
    average, other = Average(w=torch.arange(3.0), b=torch.ones(())), Average(w=torch.zeros(3))
    average.history, own = [{"a": 1}, {"a": 2}], other.shadow["w"]
    checkpoint = saved({"ema": average})
    assert {"ema.shadow.w", "ema.shadow.b", "ema.pair.1"} == set(checkpoint.tensors)
    assert load(checkpoint, {"ema": other}) == FITS
    assert bits(other.shadow) == bits(average.shadow)
    assert other.shadow["w"] is own, "what fits is filled in place"
    assert other.history == average.history
    assert type(other.pair) is tuple
    with pytest.raises(StateMismatch, match=r"Refusing at 'ema' refused.*KeyError"):
        load(checkpoint, {"ema": Refusing()})


def test_what_stands_alone_or_is_marked_as_replicated_is_filled_in_place() -> None:
    checkpoint = saved({"t": replicated(torch.arange(3.0)), "more": {"u": replicated(torch.ones(1)), "n": 1}})
    table, inner = nn.Parameter(torch.zeros(3)), torch.zeros(1)
    table.sum().backward()
    state = {"t": replicated(table), "more": {"u": replicated(inner), "n": 0}}
    assert load(checkpoint, state) == FITS
    assert (table.tolist(), inner.tolist(), state["more"]["n"]) == ([0.0, 1.0, 2.0], [1.0], 1)
    assert state["t"].tensor is table
    assert state["more"]["u"].tensor is inner
    assert table.grad is not None


class Shy:
    """As a data loader: to ask for its state changes it."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        torch.rand(1)
        return {"position": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_an_object_is_not_asked_for_its_state_without_need() -> None:
    checkpoint, shy = saved({"loader": Shy()}), Shy()
    random = torch.get_rng_state()
    load(checkpoint, {"loader": shy})
    assert (shy.asked, shy.position) == (0, 1)
    assert torch.equal(torch.get_rng_state(), random)


MIXED: dict[str, Any] = {
    "t": torch.arange(4.0),
    "step": 3,
    "log": [{"loss": 1.0}],
    "deep": {"u": torch.ones(2), "name": "x"},
}


def test_plain_values_and_tensors_come_back_into_the_same_containers_and_into_empty_ones() -> None:
    checkpoint, deep = saved({"train": MIXED, "t": MIXED["t"] + 1}), {"u": torch.zeros(2), "name": "y"}
    train = {"t": torch.zeros(4), "step": 0, "log": [], "deep": deep, "gone": 1}
    own = (train["t"], deep["u"])
    state: dict[str, Any] = {"train": train}
    assert load(checkpoint, state) == FITS
    assert bits(state["train"]) == bits(MIXED)
    assert state["train"] is train
    assert train["deep"] is deep
    assert train["t"] is own[0]
    assert deep["u"] is own[1]
    state = {"train": {}, "t": None}
    assert load(checkpoint, state) == FITS
    assert bits(state) == bits({"train": MIXED, "t": MIXED["t"] + 1})


def test_tensors_in_a_value_must_be_the_same_ones() -> None:
    checkpoint = saved({"train": MIXED})
    state = {"train": {"t": torch.zeros(4), "new": torch.zeros(1), "step": 0, "deep": {"name": "old"}}}
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: train\.new.*state: train\.deep\.u"):
        load(checkpoint, state)
    assert load(checkpoint, state, strict=False) == ({"train.new"}, {"train.deep.u"})
    assert state["train"]["t"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (state["train"]["step"], state["train"]["deep"]) == (3, {"name": "x"})


def test_a_missing_object_or_value_is_missing() -> None:
    with pytest.raises(StateMismatch, match="3 missing in the checkpoint: ema, empty, plain"):
        load(saved({"a": 1}), {"a": 0, "ema": Average(), "plain": 2, "empty": {}})


@pytest.mark.parametrize("kind", ["scripted", "traced", "inside"])
def test_modules_of_torchscript_come_back(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated, and still met
            found: Any = torch.jit.trace(inner, torch.ones(2, 4)) if kind == "traced" else torch.jit.script(inner)
        module = nn.Sequential(found) if kind == "inside" else found
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        return module, optimizer

    (module, optimizer), (other, other_optimizer) = made(), made()
    with open_store(tmp_path) as store:
        store.save(1, {"model": module, "optimizer": optimizer})
        store.save_async(2, {"model": module, "optimizer": optimizer}).result()
        for step in (1, 2):
            shaken(other)
            store[step].load({"model": other, "optimizer": other_optimizer})
            assert contents(other) == contents(module)
            ours, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
            assert all(torch.equal(theirs[number]["exp_avg"], ours[number]["exp_avg"]) for number in ours)
