"""Modules of one process: names, ties, extra state, the meta device, and what is said when things do not fit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from carrier import Carried, bits
from torch import nn

from ckptstore import open_store
from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.live.apply import begin_load, collect
from ckptstore.state.live.flatten import replicated
from ckptstore.state.live.matching import Mismatch


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


def test_a_save_shows_the_live_memory_and_copies_nothing() -> None:
    module = Tied()
    flat = collect({"model": module})
    assert flat.tensors["model.scale"].tensor.data_ptr() == module.scale.data_ptr()
    assert flat.tensors["model.embedding.weight"].tensor.data_ptr() == module.embedding.weight.data_ptr()
    assert "model.cache" not in flat.paths, "only what is persistent is stored"
    assert flat.aliases == {"model.head.weight": "model.embedding.weight"}


def test_tied_weights_load_under_either_name_and_stay_tied() -> None:
    carried = Carried({"model": shaken(Tied())})
    again = Tied()
    before = memory(again)
    carried.load({"model": again})
    assert memory(again) == before
    assert again.head.weight is again.embedding.weight
    assert bits(dict(again.state_dict())) == bits({**carried_state(carried, "model")})

    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 4))
    carried.load({"model": untied})
    assert torch.equal(untied.head.weight, untied.embedding.weight)
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()


def carried_state(carried: Carried, key: str) -> dict[str, torch.Tensor]:
    names = [name for name in carried.flat.paths if name.startswith(f"{key}.")]
    return {name.removeprefix(f"{key}."): carried.tensors[carried.flat.aliases.get(name, name)] for name in names}


def test_a_module_at_two_places_is_stored_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    flat = collect({"model": module, "first": module[0]})
    assert flat.aliases == {"first.weight": "model.0.weight", "first.bias": "model.0.bias"}


def test_a_tensor_that_stands_at_two_places_comes_back_at_both() -> None:
    module = shaken(nn.Linear(2, 2))
    saved = Carried({"model": module, "more": {"weight": module.weight, "twice": [module.weight], "n": 1}})
    assert saved.flat.aliases == {"more.weight": "model.weight", "more.twice.0": "model.weight"}
    other = nn.Linear(2, 2)
    more = {"weight": torch.zeros(2, 2), "twice": [torch.zeros(2, 2)], "n": 0}
    assert saved.load({"model": other, "more": more}) == Mismatch()
    assert bits([other.weight.data, more]) == bits([module.weight.data, {**more, "n": 1}])
    assert torch.equal(more["weight"], module.weight)
    assert torch.equal(more["twice"][0], module.weight)


def test_loading_leaves_parameters_gradients_and_random_numbers_where_they_are() -> None:
    module, other = shaken(Tied()), Tied()
    other.head(torch.rand(2, 4)).sum().backward()
    gradient, random = other.head.weight.grad, torch.get_rng_state()
    kept = gradient.clone()
    Carried({"model": module}).load({"model": other})
    assert other.head.weight.grad is gradient
    assert torch.equal(gradient, kept)
    assert torch.equal(torch.get_rng_state(), random)


def test_every_difference_is_listed() -> None:
    saved = Carried(
        {"model": nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "c": nn.Linear(1, 1)}), "n": 1}
    )
    state = {
        "model": nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(2, 2).double(), "d": nn.Linear(1, 1)}),
        "n": torch.ones(2),
        "lost": 3,
    }
    before = bits(dict(state["model"].state_dict()))
    with pytest.raises(StateMismatch) as caught:
        saved.load(state)
    text = str(caught.value)
    for part in (
        "model.a.weight is float32 [3, 2] in the checkpoint and float32 [4, 2] in the state",
        "model.a.bias is float32 [3] in the checkpoint and float32 [4] in the state",
        "model.b.weight is float32 [2, 2] in the checkpoint and float64 [2, 2] in the state",
        "n is a plain value in the checkpoint and a tensor in the state",
        "3 missing in the checkpoint: lost, model.d.bias, model.d.weight",
        "2 without a place in the state: model.c.bias, model.c.weight",
    ):
        assert part in text
    assert bits(dict(state["model"].state_dict())) == before


def test_without_strict_the_rest_is_loaded_and_reported() -> None:
    saved = Carried({"model": nn.ModuleDict({"a": shaken(nn.Linear(2, 3)), "c": nn.Linear(1, 1)})})
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "d": nn.Linear(1, 1)})
    before = bits(dict(model["d"].state_dict()))
    mismatch = saved.load({"model": model}, strict=False)
    assert mismatch == Mismatch({"model.d.weight", "model.d.bias"}, {"model.c.weight", "model.c.bias"})
    assert torch.equal(model["a"].weight, saved.tensors["model.a.weight"])
    assert bits(dict(model["d"].state_dict())) == before
    with pytest.raises(StateMismatch, match=r"float32 \[3, 2\]"):
        saved.load({"model": nn.ModuleDict({"a": nn.Linear(5, 3)})}, strict=False)


def test_a_pattern_narrows_what_is_loaded_and_what_must_fit() -> None:
    saved = Carried({"model": shaken(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), "epoch": 4})
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    before = bits(dict(model[1].state_dict()))
    state = {"model": model, "epoch": 0}
    assert saved.load(state, include="model.0.*") == Mismatch()
    assert state["epoch"] == 0
    assert torch.equal(model[0].weight, saved.tensors["model.0.weight"])
    assert bits(dict(model[1].state_dict())) == before
    assert saved.load({"model": model[:1], "epoch": 0}, include=["epoch", "model.0.weight"]) == Mismatch()


def test_parts_that_the_state_does_not_name_are_not_asked_for() -> None:
    saved = Carried({"model": nn.Linear(2, 2), "epoch": 4})
    assert saved.load({"model": nn.Linear(2, 2)}) == Mismatch()


def test_what_no_rank_can_place_is_unexpected_and_what_one_misses_is_missing() -> None:
    first = Mismatch({"a"}, {"x", "y"}, {"d": "differs"})
    second = Mismatch({"b"}, {"y", "z"})
    joined = Mismatch.joined([first, Mismatch.from_json(second.to_json())])
    assert joined == Mismatch({"a", "b"}, {"y"}, {"d": "differs"})
    assert Mismatch.joined([]) == Mismatch()
    with pytest.raises(StateMismatch, match="2 missing in the checkpoint: a, b"):
        joined.check(strict=True)


def test_a_rank_that_does_not_name_a_part_has_no_say_in_what_is_unexpected_there() -> None:
    first = Mismatch(unexpected={"model.a", "model.b", "head.a"}, names=frozenset({"model", "head"}))
    second = Mismatch(unexpected={"model.b"}, names=frozenset({"model", "hea"}))
    for parts in ([first, second], [second, first]):
        assert Mismatch.joined(parts).unexpected == {"model.b", "head.a"}
    assert Mismatch.joined([first, first, Mismatch(names=frozenset({"head"}))]).unexpected == {"model.a", "model.b"}


def test_meta_modules_get_memory_and_stay_tied_and_in_their_optimizer() -> None:
    saved = Carried({"model": shaken(Tied())})
    model = Tied(device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"'model'.*stay there until you set them: cache"):
        saved.load({"model": model}, device="cpu")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_meta] == ["cache"]
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, saved.tensors["model.embedding.weight"])
    assert torch.equal(model.norm.running_var, saved.tensors["model.norm.running_var"])
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


def test_buffers_outside_of_the_state_are_made_by_their_module_or_stay_on_meta(tmp_path: Path) -> None:
    first, state = Rotary(), torch.get_rng_state()
    with open_store(tmp_path) as store:
        checkpoint = store.save(1, {"model": nn.Sequential(first)})
        model = nn.Sequential(Rotary(device="meta"))
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
def test_a_llama_on_meta_has_the_logits_of_the_saved_one(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    with open_store(tmp_path) as store:
        checkpoint = store.save(1, {"model": model})
        with torch.device("meta"):
            other = LlamaForCausalLM(config).eval()
        report = checkpoint.load({"model": other}, device="cpu")
    assert "model.model.rotary_emb.inv_freq" in report.remade
    assert not report.left_on_meta
    tokens = torch.arange(8)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)


def test_only_the_meta_part_gets_memory() -> None:
    saved = Carried({"model": shaken(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))})
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = memory(model[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.load({"model": model})
    assert memory(model[0]) == before
    assert all(torch.equal(item, saved.tensors[f"model.{name}"]) for name, item in model.state_dict().items())


def test_a_load_that_is_given_up_leaves_a_meta_module_on_meta() -> None:
    saved = Carried({"model": nn.Linear(2, 2)})
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(StateMismatch):
        saved.load({"model": model})
    assert all(parameter.is_meta for parameter in model.parameters())
    loading = begin_load({"model": model}, Carried({"model": nn.Sequential(nn.Linear(2, 2))}).saved)
    assert not any(parameter.is_meta for parameter in model.parameters())
    loading.abandon()
    assert all(parameter.is_meta for parameter in model.parameters())


class Picky(nn.Module):
    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError("not now")


def test_a_module_that_torch_cannot_read_is_named() -> None:
    with pytest.raises(InvalidState, match=r"module at 'a\.b'.*not now"):
        collect({"a": {"b": Picky()}})


class Average:
    """As an EMA of weights: tensors that exist only after the first update, and a container that grows."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.history: list[dict[str, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "history": self.history, "pair": (len(self.shadow), torch.ones(1))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.history, self.pair = state["shadow"], state["history"], state["pair"]


class Refusing(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("shadow")


def test_stateful_objects_get_the_structure_that_was_saved() -> None:
    average, other = Average(), Average()
    average.shadow, average.history = {"w": torch.arange(3.0), "b": torch.ones(())}, [{"a": 1}, {"a": 2}]
    other.shadow = {"w": torch.zeros(3)}
    own = other.shadow["w"]
    saved = Carried({"ema": average})
    assert {"ema.shadow.w", "ema.shadow.b", "ema.pair.1"} == set(saved.tensors)
    assert saved.load({"ema": other}) == Mismatch()
    assert bits(other.shadow) == bits(average.shadow)
    assert other.shadow["w"] is own, "what fits is filled in place"
    assert other.history == average.history
    assert type(other.pair) is tuple
    with pytest.raises(StateMismatch, match=r"Refusing at 'ema' refused.*KeyError"):
        saved.load({"ema": Refusing()})


def test_a_tensor_marked_as_replicated_is_filled_in_place() -> None:
    saved = Carried({"t": replicated(torch.arange(3.0)), "more": {"u": replicated(torch.ones(1)), "n": 1}})
    table, inner = torch.zeros(3), torch.zeros(1)
    state = {"t": replicated(table), "more": {"u": replicated(inner), "n": 0}}
    assert saved.load(state) == Mismatch()
    assert (table.tolist(), inner.tolist(), state["more"]["n"]) == ([0.0, 1.0, 2.0], [1.0], 1)
    assert state["t"].tensor is table
    assert state["more"]["u"].tensor is inner


def test_a_parameter_on_its_own_is_filled_and_keeps_its_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.sum().backward()
    Carried({"w": torch.ones(2)}).load({"w": parameter})
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.grad is not None
    assert parameter.requires_grad


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
    saved, shy = Carried({"loader": Shy()}), Shy()
    random = torch.get_rng_state()
    saved.load({"loader": shy})
    assert (shy.asked, shy.position) == (0, 1)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.fixture
def mixed() -> dict[str, Any]:
    return {"t": torch.arange(4.0), "step": 3, "log": [{"loss": 1.0}], "deep": {"u": torch.ones(2), "name": "x"}}


def test_plain_values_and_tensors_come_back_into_the_same_containers(mixed: dict[str, Any]) -> None:
    saved = Carried({"train": mixed})
    deep = {"u": torch.zeros(2), "name": "y"}
    train = {"t": torch.zeros(4), "step": 0, "log": [], "deep": deep, "gone": 1}
    own = (train["t"], deep["u"])
    state = {"train": train}
    assert saved.load(state) == Mismatch()
    assert bits(state["train"]) == bits(mixed)
    assert state["train"] is train
    assert train["deep"] is deep
    assert train["t"] is own[0]
    assert deep["u"] is own[1]


def test_an_empty_place_takes_what_the_checkpoint_has(mixed: dict[str, Any]) -> None:
    saved = Carried({"train": mixed, "t": mixed["t"] + 1})
    state: dict[str, Any] = {"train": {}, "t": None}
    assert saved.load(state) == Mismatch()
    assert bits(state["train"]) == bits(mixed)
    assert state["t"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_tensors_in_a_value_must_be_the_same_ones(mixed: dict[str, Any]) -> None:
    saved = Carried({"train": mixed})
    state = {"train": {"t": torch.zeros(4), "new": torch.zeros(1), "step": 0, "deep": {"name": "old"}}}
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: train\.new.*state: train\.deep\.u"):
        saved.load(state)
    mismatch = saved.load(state, strict=False)
    assert mismatch == Mismatch({"train.new"}, {"train.deep.u"})
    assert state["train"]["t"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (state["train"]["step"], state["train"]["deep"]) == (3, {"name": "x"})


def test_values_of_a_stock_checkpoint_are_found_leaf_by_leaf() -> None:
    average = Average()
    average.shadow = {"w": torch.arange(3.0)}
    saved = Carried({"ema": average.shadow["w"]})
    stock = copy.copy(saved)
    stock.saved = type(saved.saved)(
        {"ema.shadow.w": saved.saved.tensors["ema"]}, {"ema.history": [5], "ema.pair": (1, 2), "config.lr": 0.5}
    )
    stock.tensors = {"ema.shadow.w": saved.tensors["ema"]}
    other = Average()
    other.shadow = {"w": torch.zeros(3)}
    state = {"ema": other, "config": {"lr": 0.1}}
    assert stock.load(state) == Mismatch()
    assert other.shadow["w"].tolist() == [0.0, 1.0, 2.0]
    assert (other.history, other.pair, state["config"]) == ([5], (1, 2), {"lr": 0.5})


def test_a_missing_object_or_value_is_missing() -> None:
    saved = Carried({"a": 1})
    with pytest.raises(StateMismatch, match="3 missing in the checkpoint: ema, empty, plain"):
        saved.load({"a": 0, "ema": Average(), "plain": 2, "empty": {}})


def test_skipped_keys_are_left_alone() -> None:
    saved = Carried({"a": 1, "t": torch.ones(2), "ema": Average()})
    saved.saved = type(saved.saved)(saved.saved.tensors, {}, {}, skipped=frozenset({"a", "t", "ema"}))
    average = Average()
    state = {"a": 5, "t": torch.zeros(2), "ema": average}
    assert saved.load(state) == Mismatch()
    assert (state["a"], state["t"].tolist(), hasattr(average, "pair")) == (5, [0.0, 0.0], False)


def test_an_object_of_which_a_part_is_skipped_is_left_alone() -> None:
    average, other = Average(), Average()
    average.shadow = {"w": torch.ones(2), "v": torch.ones(2)}
    saved = Carried({"ema": average, "mixed": {"w": torch.ones(2), "n": 1}})
    kept = {key: tensor for key, tensor in saved.saved.tensors.items() if key not in ("ema.shadow.w", "mixed.w")}
    saved.saved = type(saved.saved)(kept, saved.saved.values, {}, skipped=frozenset({"ema.shadow.w", "mixed.w"}))
    other.shadow = {"w": torch.zeros(2)}
    state: dict[str, Any] = {"ema": other, "mixed": {"w": torch.zeros(2), "n": 0}}
    assert saved.load(state) == Mismatch()
    assert (other.shadow["w"].tolist(), hasattr(other, "pair")) == ([0.0, 0.0], False)
    assert (state["mixed"]["w"].tolist(), state["mixed"]["n"]) == ([0.0, 0.0], 1)
    state = {"mixed": {}}
    assert saved.load(state) == Mismatch()
    assert state == {"mixed": {}}


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
            assert {name: bits(item) for name, item in other.state_dict().items()} == {
                name: bits(item) for name, item in module.state_dict().items()
            }
            ours, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
            assert all(torch.equal(theirs[number]["exp_avg"], ours[number]["exp_avg"]) for number in ours)
