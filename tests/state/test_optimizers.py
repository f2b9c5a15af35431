"""Optimizers of one process: names, state that is not there yet, exact settings, unchanged training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from carrier import Carried, bits, training, unchanged_by
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.live.apply import begin_load, collect
from ckptstore.state.live.matching import Mismatch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda items: torch.optim.AdamW(items, lr=0.02),
    "adamw-amsgrad-foreach": lambda items: torch.optim.AdamW(items, lr=0.02, amsgrad=True, foreach=True),
    "adam-fused": lambda items: torch.optim.Adam(items, lr=0.02, fused=True),
    "sgd": lambda items: torch.optim.SGD(items, lr=0.02),
    "sgd-momentum": lambda items: torch.optim.SGD(items, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
}


class Run:
    """A model, its optimizer and scheduler, and the steps of a training."""

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer], schedule: Callable[[Any], LRScheduler] | None = None
    ) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        self.optimizer = make(self.model.parameters())
        self.scheduler = schedule(self.optimizer) if schedule else None

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "rng": torch.get_rng_state()}
        return state if self.scheduler is None else {**state, "sched": self.scheduler}

    def steps(self, count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(5, 4)).square().sum()
            loss.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            seen.append(loss.item())
        return [
            seen,
            [bits(parameter) for parameter in self.model.parameters()],
            bits(dict(self.model.named_buffers())),
        ]


def resumed(make: Callable[[Any], torch.optim.Optimizer], carried: Carried, **keywords: Any) -> Run:
    run = Run(make, **keywords)
    torch.manual_seed(99)
    state = run.state
    assert carried.load(state) == Mismatch()
    torch.set_rng_state(state["rng"])
    return run


@pytest.mark.parametrize("steps", [0, 2])
def test_a_resumed_training_is_the_uninterrupted_one_and_saving_changes_nothing(steps: int) -> None:
    """With the one optimizer that the drawn states do not have."""
    name = "adam-fused"
    run, undisturbed = Run(OPTIMIZERS[name]), Run(OPTIMIZERS[name])
    torch.manual_seed(5)
    run.steps(steps)
    carried = unchanged_by(lambda: Carried(run.state), *training(run.model, run.optimizer))
    curve = run.steps(3)

    torch.manual_seed(5)
    undisturbed.steps(steps)
    assert undisturbed.steps(3) == curve

    again = resumed(OPTIMIZERS[name], carried)
    assert bits(groups(again.optimizer)) == bits([carried_group(carried)])
    assert again.steps(3) == curve


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]


def carried_group(carried: Carried) -> dict[str, Any]:
    prefix = "optim.param_groups.model.0.weight."
    found = {}
    for key in carried.flat.paths:
        if key.startswith(prefix):
            tensor = carried.tensors.get(carried.flat.aliases.get(key, key))
            found[key.removeprefix(prefix)] = carried.saved.values.get(key, tensor)
    return found


def states(optimizer: torch.optim.Optimizer) -> Any:
    """The state of each parameter, its items in the order of their names."""
    return [bits(dict(sorted(items.items()))) for items in optimizer.state.values()]


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "multi-step": lambda optimizer: MultiStepLR(optimizer, [1, 3]),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "sequential": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [2]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_after_their_optimizer(name: str) -> None:
    make, schedule = OPTIMIZERS["sgd-momentum"], SCHEDULERS[name]
    run = Run(make, schedule)
    run.steps(3)
    carried = Carried(run.state)
    again = resumed(make, carried, schedule=schedule)
    assert bits(groups(again.optimizer)) == bits(groups(run.optimizer))
    assert again.scheduler is not None
    assert run.scheduler is not None
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    assert run.steps(3)[0] != []
    torch.set_rng_state(carried.tensors["rng"])
    assert again.steps(3) == resumed(make, carried, schedule=schedule).steps(3)


def test_keys_are_flat_and_one_per_item() -> None:
    run = Run(OPTIMIZERS["adamw"])
    run.steps(1)
    flat = collect(run.state)
    assert "optim.state.model.0.weight.exp_avg" in flat.tensors
    assert flat.paths["optim.state.model.0.weight.exp_avg"] == ("optim", "state.model.0.weight.exp_avg")
    assert flat.values["optim.param_groups.model.3.bias.betas"] == (0.9, 0.999)
    exp_avg = run.optimizer.state[run.model[0].weight]["exp_avg"]
    assert flat.tensors["optim.state.model.0.weight.exp_avg"].tensor.data_ptr() == exp_avg.data_ptr()


def test_an_optimizer_that_has_not_stepped_is_stored_empty_also_with_gradients_pending() -> None:
    run = Run(OPTIMIZERS["adamw"])
    for prepare in (lambda: None, lambda: run.model(torch.randn(3, 4)).sum().backward()):
        prepare()
        flat = unchanged_by(lambda: collect(run.state), *training(run.model, run.optimizer))
        assert not run.optimizer.state
        assert not [key for key in flat.tensors if key.startswith("optim.")]
        assert flat.values["optim.param_groups.model.0.weight.lr"] == 0.02


class Careless(torch.optim.SGD):
    """An optimizer that changes everything that it can reach."""

    def step(self, closure: Any = None) -> None:
        torch.rand(1)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["row"] = torch.zeros(parameter.shape[0], dtype=torch.float64)
                    state.setdefault("nested", {1: {"x": torch.zeros(2)}, "count": 0})["count"] += 1
                    with torch.no_grad():
                        parameter.add_(1)


def test_a_load_takes_no_step_and_runs_no_hook_of_one() -> None:
    source = Run(Careless)
    source.optimizer.step()
    source.steps(1)
    carried = Carried({"model": source.model, "optim": source.optimizer})
    run = Run(Careless)
    run.optimizer.param_groups[0]["count"] = 7
    calls: list[int] = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    run.optimizer.register_step_post_hook(lambda *_: calls.append(2))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append(3))
    run.model(torch.randn(5, 4)).sum().backward()
    gradients = [parameter.grad for parameter in run.model.parameters()]
    looks = training(run.model, run.optimizer)
    loading = unchanged_by(lambda: begin_load({"model": run.model, "optim": run.optimizer}, carried.saved), *looks)
    assert all(parameter.grad is before for parameter, before in zip(run.model.parameters(), gradients, strict=True))
    loading.abandon()
    assert dict(run.optimizer.state) == {}

    carried.load({"model": run.model, "optim": run.optimizer})
    everywhere.remove()
    assert calls == []
    assert states(run.optimizer) == states(source.optimizer)
    assert run.optimizer.param_groups[0]["count"] == source.optimizer.param_groups[0]["count"]


def test_state_in_another_precision_than_its_parameter_stays_exact() -> None:
    def half() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3).bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    model, optimizer = half()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    carried = Carried({"m": model, "o": optimizer})
    again, other = half()
    for parameter in again.parameters():
        other.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros(parameter.shape),
            "exp_avg_sq": torch.zeros(parameter.shape),
        }
    carried.load({"m": again, "o": other})
    assert states(other) == states(optimizer)


def test_settings_come_back_exactly_with_those_of_the_user_and_of_each_group() -> None:
    def make(**more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": torch.tensor(0.5, dtype=torch.float64), **more},
                {"params": [], "lr": 5.0},
                {"params": model[1].parameters(), "weight_decay": 0, "betas": (0.5, 0.6)},
            ],
            foreach=False,
        )
        return model, optimizer

    model, optimizer = make(name="first", tags=["a", ("b", 1)], initial_lr=0.25)
    carried = Carried({"model": model, "optim": optimizer})
    again, other = make()
    held, groups_held = other.param_groups[0]["lr"], list(other.param_groups)
    carried.load({"model": again, "optim": other})
    expected = groups(optimizer)
    assert bits([dict(sorted(group.items())) for group in groups(other)]) == bits(
        [dict(sorted(group.items())) for group in expected]
    )
    assert type(other.param_groups[2]["weight_decay"]) is int
    assert other.param_groups[0]["lr"] is held
    assert all(group is before for group, before in zip(other.param_groups, groups_held, strict=True))
    assert [len(group["params"]) for group in other.param_groups] == [2, 0, 2]
    assert other.param_groups[1]["lr"] == 5.0
    plain, float_lr = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None
    float_lr = torch.optim.AdamW([{"params": plain[0].parameters()}, {"params": plain[1].parameters()}], foreach=False)
    with pytest.raises(StateMismatch, match=r"without a place in the state: optim\.settings_of_empty_groups"):
        carried.load({"model": plain, "optim": float_lr})
    carried.load({"model": plain, "optim": float_lr}, strict=False)
    assert bits(float_lr.param_groups[0]["lr"]) == bits(torch.tensor(0.5, dtype=torch.float64))
    assert float_lr.param_groups[1]["lr"] == 0.001


def test_groups_cut_differently_are_a_mismatch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    apart = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.25}]
    carried = Carried({"model": model, "optim": torch.optim.SGD(apart)})
    with pytest.raises(
        StateMismatch, match=r"optim\.param_groups\.model\.1\.bias\.lr is 0\.25 in the checkpoint, and other"
    ):
        carried.load({"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1.0)})


def test_a_checkpoint_of_an_older_release_gets_what_the_class_fills_in() -> None:
    run = Run(OPTIMIZERS["adamw"])
    run.steps(1)
    carried = Carried(run.state)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"):
        del carried.saved.values[f"optim.param_groups.model.{name}.decoupled_weight_decay"]
        carried.saved.values[f"optim.state.model.{name}.step"] = 1
        del carried.saved.tensors[f"optim.state.model.{name}.step"]
    other = Run(OPTIMIZERS["adamw"])
    carried.load(other.state)
    assert other.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert states(other.optimizer) == states(run.optimizer)


def test_settings_decide_what_state_there_is() -> None:
    momentum, plain = Run(OPTIMIZERS["sgd-momentum"]), Run(OPTIMIZERS["sgd"])
    momentum.steps(1)
    Carried(momentum.state).load(plain.state)
    assert (plain.optimizer.param_groups[0]["momentum"], len(plain.optimizer.state)) == (0.9, 6)
    adam, amsgrad = Run(OPTIMIZERS["adamw"]), Run(OPTIMIZERS["adamw-amsgrad-foreach"])
    adam.steps(1)
    amsgrad.steps(2)
    Carried(adam.state).load(amsgrad.state)
    assert amsgrad.optimizer.param_groups[0]["amsgrad"] is False
    assert states(amsgrad.optimizer) == states(adam.optimizer)
    amsgrad.steps(1)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_of_another_kind_of_optimizer_stays_out(steps: int) -> None:
    momentum, adam = Run(OPTIMIZERS["sgd-momentum"]), Run(OPTIMIZERS["adamw"])
    momentum.steps(1)
    adam.steps(steps)
    before = states(adam.optimizer)
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: .*optim\.param_groups\.model\.0\.bias\.betas"):
        Carried(momentum.state).load(adam.state)
    assert states(adam.optimizer) == before
    found = Carried(momentum.state).load(adam.state, strict=False)
    assert "optim.state.model.0.bias.momentum_buffer" in found.unexpected
    assert states(adam.optimizer) == before
    adam.steps(1)


def test_an_optimizer_over_two_modules_has_their_keys_in_its_names() -> None:
    def make() -> dict[str, Any]:
        first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 2))
        both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
        single = torch.optim.SGD(second[1].parameters(), lr=0.3, momentum=0.9)
        return {"gan": {"d.x": first, "g": second}, "both": both, "single": single}

    state = make()
    for module in state["gan"].values():
        for parameter in module.parameters():
            parameter.grad = torch.rand_like(parameter)
    state["both"].step()
    state["single"].step()
    carried = Carried(state)
    assert "both.state.gan.d.x.weight.exp_avg" in carried.tensors
    assert "both.state.gan.g.0.bias.exp_avg" in carried.tensors
    assert "single.state.gan.g.1.weight.momentum_buffer" in carried.tensors
    other = make()
    carried.load(other)
    for name in ("both", "single"):
        assert states(other[name]) == states(state[name])
        assert groups(other[name]) == groups(state[name])


def test_a_parameter_that_no_module_owns_is_named_by_group_and_index() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias, nn.Parameter(torch.ones(4))]}])
    with pytest.raises(InvalidState, match=r"'o'.*parameter 1 of group 1 \(shape \[4\]\).*after the module is wrapped"):
        collect({"m": model, "o": optimizer})
    with pytest.raises(InvalidState, match="Put the module into the state as well"):
        collect({"o": optimizer})


def test_the_first_module_that_owns_all_parameters_names_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), momentum=0.9)
    flat = collect({"optim": optimizer, "whole": model, "part": model[0]})
    assert "optim.param_groups.whole.0.weight.lr" in flat.values


def test_tied_weights_have_one_state() -> None:
    def make() -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optim": optimizer}

    state = make()
    state["model"]["b"](state["model"]["a"](torch.rand(2, 3))).sum().backward()
    state["optim"].step()
    carried = Carried(state)
    assert [key for key in carried.tensors if key.endswith("exp_avg")] == [
        "optim.state.model.a.weight.exp_avg",
        "optim.state.model.a.bias.exp_avg",
        "optim.state.model.b.bias.exp_avg",
    ]
    other = make()
    carried.load(other)
    assert states(other["optim"]) == states(state["optim"])


def test_only_the_optimizer_or_a_part_of_it_can_be_loaded() -> None:
    run = Run(OPTIMIZERS["adamw"])
    run.steps(2)
    carried = Carried(run.state)
    other = Run(OPTIMIZERS["adamw"])
    other.optimizer.param_groups[0]["lr"] = 7.0
    before = bits(dict(other.model.state_dict()))
    assert carried.load(other.state, include="optim.state.model.0.*") == Mismatch()
    assert bits(dict(other.model.state_dict())) == before
    assert set(other.optimizer.state) == set(other.model[0].parameters())
    weight = other.optimizer.state[other.model[0].weight]
    assert bits(dict(sorted(weight.items()))) == bits(dict(sorted(run.optimizer.state[run.model[0].weight].items())))
    assert other.optimizer.param_groups[0]["lr"] == 7.0
    assert carried.load(other.state, include="model.*") == Mismatch()
    assert len(other.optimizer.state) == 2
    assert carried.load(other.state, include="optim.*") == Mismatch()
    assert states(other.optimizer) == states(run.optimizer)
    assert other.optimizer.param_groups[0]["lr"] == 0.02


class Hooked(torch.optim.AdamW):
    """Sees the loads, as optimizers that keep more than torch knows of do."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.loaded = getattr(self, "loaded", 0) + 1


def test_the_optimizers_own_load_runs() -> None:
    run, other = Run(Hooked), Run(Hooked)
    run.steps(1)
    Carried(run.state).load(other.state)
    assert other.optimizer.loaded == 1


def test_entries_that_a_hook_adds_are_stored_and_handed_to_the_hook() -> None:
    def make() -> tuple[Run, list[Any]]:
        run, seen = Run(OPTIMIZERS["sgd-momentum"]), []
        run.optimizer.register_state_dict_post_hook(lambda _, packed: {**packed, "mark": torch.ones(2)})
        run.optimizer.register_load_state_dict_pre_hook(lambda _, packed: seen.append(packed["mark"]))
        return run, seen

    (run, _), (other, seen) = make(), make()
    run.steps(1)
    Carried(run.state).load(other.state)
    assert bits(seen) == bits([torch.ones(2)])
    with pytest.raises(StateMismatch, match=r"without a place in the state: optim\.more"):
        Carried(run.state).load(Run(OPTIMIZERS["sgd-momentum"]).state)


class Apart(torch.optim.SGD):
    """A state dict that is nothing like torch's."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"loss_scale": 2.0, "flat": torch.cat([item.flatten() for item in self.param_groups[0]["params"]])}

    def load_state_dict(self, state_dict: Any) -> None:
        self.given = state_dict


def test_a_state_dict_of_its_own_form_is_taken_whole() -> None:
    run, other = Run(Apart), Run(Apart)
    Carried(run.state).load(other.state)
    assert bits(other.optimizer.given) == bits(run.optimizer.state_dict())


def test_names_of_parameters_are_those_of_the_modules_now() -> None:
    def make(*, backwards: bool = False, more: bool = False) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), *([nn.Linear(3, 3)] if more else []))
        named = list(model.named_parameters())
        return {"model": model, "optim": torch.optim.AdamW(named[::-1] if backwards else named)}

    state, other, wider = make(), make(backwards=True), make(more=True)
    state["model"](torch.ones(3)).sum().backward()
    state["optim"].step()
    carried = Carried(state)
    assert not [key for key in carried.flat.paths if key.endswith("param_names")]
    carried.load(other)
    assert other["optim"].param_groups[0]["param_names"] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    weights = [run["optim"].state[run["model"][1].weight]["exp_avg"] for run in (state, other)]
    assert bits(weights[0]) == bits(weights[1])
    carried.load(wider, strict=False)
    assert wider["optim"].param_groups[0]["param_names"][-1] == "2.bias"
    assert len(wider["optim"].state) == 4


def test_names_follow_the_modules_and_not_how_many_there_are() -> None:
    def make(*trained: str) -> dict[str, Any]:
        torch.manual_seed(4)
        modules = {"gen": nn.Linear(2, 3), "disc": nn.Linear(2, 3)}
        parameters = [parameter for name in trained for parameter in modules[name].parameters()]
        return {**modules, "optim": torch.optim.AdamW(parameters, lr=0.1)}

    one, two = make("gen"), make("disc", "gen")
    for state in (one, two):
        (state["gen"](torch.ones(2)) + state["disc"](torch.ones(2))).sum().backward()
        state["optim"].step()
    assert "optim.state.gen.weight.exp_avg" in Carried(one).tensors
    wider = make("gen", "disc")
    found = Carried(one).load(wider, strict=False)
    assert all(".disc." in key for key in found.missing)
    weights = [state["optim"].state[state["gen"].weight] for state in (one, wider)]
    assert bits(weights[0]["exp_avg"]) == bits(weights[1]["exp_avg"])
    narrower = make("gen")
    found = Carried(two).load(narrower, strict=False)
    assert all(".disc." in key for key in found.unexpected)
    assert len(narrower["optim"].state) == 2


def test_names_within_the_module_as_torch_gives_them_fit_too() -> None:
    run, other = Run(OPTIMIZERS["adamw"]), Run(OPTIMIZERS["adamw"])
    run.steps(1)
    carried = Carried(run.state)

    def short(key: str) -> str:
        return key.replace("optim.state.model.", "optim.state.").replace("groups.model.", "groups.")

    saved = carried.saved
    carried.tensors = {short(key): tensor for key, tensor in carried.tensors.items()}
    carried.saved = type(saved)(
        {short(key): item for key, item in saved.tensors.items()},
        {short(key): value for key, value in saved.values.items()},
    )
    carried.load(other.state)
    assert states(other.optimizer) == states(run.optimizer)
