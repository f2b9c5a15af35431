"""Optimizers of one process: names, state that is not there yet, exact settings, unchanged training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from carrier import FITS, bits, load, saved, training, unchanged_by
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptstore import Checkpoint, InvalidState, StateMismatch
from ckptstore.state.live.apply import collect

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda items: torch.optim.AdamW(items, lr=0.02),
    "adamw-amsgrad-foreach": lambda items: torch.optim.AdamW(items, lr=0.02, amsgrad=True, foreach=True),
    "adam-fused": lambda items: torch.optim.Adam(items, lr=0.02, fused=True),
    "sgd": lambda items: torch.optim.SGD(items, lr=0.02),
    "sgd-momentum": lambda items: torch.optim.SGD(items, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
}


class Run:
    """A model, its optimizer, and the steps of a training."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        self.optimizer = make(self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "rng": torch.get_rng_state()}

    def steps(self, count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(5, 4)).square().sum()
            loss.backward()
            self.optimizer.step()
            seen.append(loss.item())
        return [seen, bits(dict(self.model.state_dict()))]


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: item for key, item in sorted(group.items()) if key != "params"} for group in optimizer.param_groups]


def states(optimizer: torch.optim.Optimizer) -> Any:
    """The state of each parameter, its items in the order of their names."""
    return [bits(dict(sorted(items.items()))) for items in optimizer.state.values()]


def trained(name: str, steps: int = 1) -> tuple[Run, Checkpoint]:
    run = Run(OPTIMIZERS[name])
    run.steps(steps)
    return run, saved(run.state)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_resumed_training_is_the_uninterrupted_one_and_saving_changes_nothing(steps: int) -> None:
    """With the one optimizer that the drawn states do not have."""
    run, undisturbed, again = (Run(OPTIMIZERS["adam-fused"]) for _ in range(3))
    torch.manual_seed(5)
    run.steps(steps)
    checkpoint = unchanged_by(lambda: saved(run.state), *training(run.model, run.optimizer))
    curve = run.steps(3)
    torch.manual_seed(5)
    undisturbed.steps(steps)
    assert undisturbed.steps(3) == curve
    again.optimizer.param_groups[0]["lr"] = 7.0
    state = again.state
    assert load(checkpoint, state) == FITS
    torch.set_rng_state(state["rng"])
    assert groups(again.optimizer) == groups(run.optimizer)
    assert again.steps(3) == curve


def test_keys_are_flat_and_one_per_item() -> None:
    run, _ = trained("adamw")
    flat = collect(run.state)
    assert flat.paths["optim.state.model.0.weight.exp_avg"] == ("optim", "state.model.0.weight.exp_avg")
    assert flat.values["optim.param_groups.model.3.bias.betas"] == (0.9, 0.999)
    exp_avg = run.optimizer.state[run.model[0].weight]["exp_avg"]
    assert flat.tensors["optim.state.model.0.weight.exp_avg"].tensor.data_ptr() == exp_avg.data_ptr()


def test_an_optimizer_that_has_not_stepped_is_stored_empty_also_with_gradients_pending() -> None:
    run = Run(OPTIMIZERS["adamw"])
    for prepare in (lambda: None, lambda: run.model(torch.randn(3, 4)).sum().backward()):
        prepare()
        checkpoint = unchanged_by(lambda: saved(run.state), *training(run.model, run.optimizer))
        assert not run.optimizer.state
        assert not [key for key in checkpoint.tensors if key.startswith("optim.")]
        assert checkpoint.to_dict()["optim"]["param_groups.model.0.weight.lr"] == 0.02


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
    source, run = Run(Careless), Run(Careless)
    source.optimizer.step()
    source.steps(1)
    checkpoint = saved({"model": source.model, "optim": source.optimizer})
    run.optimizer.param_groups[0]["count"] = 7
    calls: list[int] = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    run.optimizer.register_step_post_hook(lambda *_: calls.append(2))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append(3))
    run.model(torch.randn(5, 4)).sum().backward()
    gradients = [parameter.grad for parameter in run.model.parameters()]

    def refused() -> None:
        with pytest.raises(StateMismatch, match=r"missing in the checkpoint: lost"):
            load(checkpoint, {"model": run.model, "optim": run.optimizer, "lost": 1})

    unchanged_by(refused, *training(run.model, run.optimizer))
    assert dict(run.optimizer.state) == {}
    load(checkpoint, {"model": run.model, "optim": run.optimizer})
    everywhere.remove()
    assert calls == []
    assert all(parameter.grad is before for parameter, before in zip(run.model.parameters(), gradients, strict=True))
    assert states(run.optimizer) == states(source.optimizer)
    assert run.optimizer.param_groups[0]["count"] == source.optimizer.param_groups[0]["count"]


def test_state_in_another_precision_than_its_parameter_stays_exact() -> None:
    def half(make: Callable[..., torch.Tensor]) -> dict[str, Any]:
        model = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for item in model.parameters():
            optimizer.state[item] = {"step": make(()), "exp_avg": make(item.shape), "exp_avg_sq": make(item.shape)}
        return {"m": model, "o": optimizer}

    state, other = half(torch.rand), half(torch.zeros)
    load(saved(state), other)
    assert states(other["o"]) == states(state["o"])


def test_settings_come_back_exactly_with_those_of_the_user_and_of_each_group() -> None:
    def make(**more: Any) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        given = [
            {"params": model[0].parameters(), "lr": torch.tensor(0.5, dtype=torch.float64), **more},
            {"params": [], "lr": 5.0},
            {"params": model[1].parameters(), "weight_decay": 0, "betas": (0.5, 0.6)},
        ]
        return {"model": model, "optim": torch.optim.AdamW(given, foreach=False)}  # type: ignore[arg-type]

    state, other = make(name="first", tags=["a", ("b", 1)], initial_lr=0.25), make()
    checkpoint, optimizer = saved(state), other["optim"]
    held, groups_held = optimizer.param_groups[0]["lr"], list(optimizer.param_groups)
    load(checkpoint, other)
    assert bits(groups(optimizer)) == bits(groups(state["optim"]))
    assert type(optimizer.param_groups[2]["weight_decay"]) is int
    assert optimizer.param_groups[0]["lr"] is held
    assert all(group is before for group, before in zip(optimizer.param_groups, groups_held, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0, 2]
    assert optimizer.param_groups[1]["lr"] == 5.0
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    float_lr = torch.optim.AdamW([{"params": layer.parameters()} for layer in plain], foreach=False)
    with pytest.raises(StateMismatch, match=r"without a place in the state: optim\.settings_of_empty_groups"):
        load(checkpoint, {"model": plain, "optim": float_lr})
    load(checkpoint, {"model": plain, "optim": float_lr}, strict=False)
    assert bits(float_lr.param_groups[0]["lr"]) == bits(torch.tensor(0.5, dtype=torch.float64))
    assert float_lr.param_groups[1]["lr"] == 0.001


def test_a_checkpoint_of_an_older_release_gets_what_the_class_fills_in() -> None:
    """And names within the module, as torch gives them, fit too."""
    run, checkpoint = trained("adamw")
    old = {
        f"optim.{key.replace('.model.', '.')}": 1 if key.endswith(".step") else item
        for key, item in checkpoint.to_dict()["optim"].items()
        if not key.endswith("decoupled_weight_decay")
    }
    other = Run(OPTIMIZERS["adamw"])
    other.steps(1)
    for items in other.optimizer.state.values():
        items["exp_avg"].zero_()
    del other.optimizer.param_groups[0]["decoupled_weight_decay"]
    load(saved({"model": run.model, **old}), {"model": other.model, "optim": other.optimizer})
    assert states(other.optimizer) == states(run.optimizer)


def test_settings_decide_what_state_there_is() -> None:
    _, checkpoint = trained("sgd-momentum")
    plain = Run(OPTIMIZERS["sgd"])
    load(checkpoint, plain.state)
    assert (plain.optimizer.param_groups[0]["momentum"], len(plain.optimizer.state)) == (0.9, 6)
    (adam, checkpoint), (amsgrad, _) = trained("adamw"), trained("adamw-amsgrad-foreach", 2)
    load(checkpoint, amsgrad.state)
    assert amsgrad.optimizer.param_groups[0]["amsgrad"] is False
    assert states(amsgrad.optimizer) == states(adam.optimizer)
    amsgrad.steps(1)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_of_another_kind_of_optimizer_stays_out(steps: int) -> None:
    (_, checkpoint), (adam, _) = trained("sgd-momentum"), trained("adamw", steps)
    before = states(adam.optimizer)
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: .*optim\.param_groups\.model\.0\.bias\.betas"):
        load(checkpoint, adam.state)
    assert states(adam.optimizer) == before
    assert "optim.state.model.0.bias.momentum_buffer" in load(checkpoint, adam.state, strict=False)[1]
    assert states(adam.optimizer) == before
    adam.steps(1)


def test_an_optimizer_over_two_modules_has_their_keys_in_its_names() -> None:
    def make() -> dict[str, Any]:
        first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 2))
        both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
        single = torch.optim.SGD(second[1].parameters(), lr=0.3, momentum=0.9)
        return {"gan": {"d.x": first, "g": second}, "both": both, "single": single}

    state, other = make(), make()
    for module in state["gan"].values():
        for parameter in module.parameters():
            parameter.grad = torch.rand_like(parameter)
    state["both"].step()
    state["single"].step()
    checkpoint = saved(state)
    names = {"both.state.gan.d.x.weight.exp_avg", "both.state.gan.g.0.bias.exp_avg"}
    assert {*names, "single.state.gan.g.1.weight.momentum_buffer"} <= checkpoint.tensors.keys()
    load(checkpoint, other)
    for name in ("both", "single"):
        assert states(other[name]) == states(state[name])
        assert groups(other[name]) == groups(state[name])


def test_a_parameter_that_no_module_owns_is_named_by_group_and_index() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias, nn.Parameter(torch.ones(4))]}])
    with pytest.raises(InvalidState, match=r"'o'.*parameter 1 of group 1 \(shape \[4\]\).*after the module is wrapped"):
        saved({"m": model, "o": optimizer})
    with pytest.raises(InvalidState, match="Put the module into the state as well"):
        saved({"o": optimizer})


def test_the_first_module_that_owns_all_parameters_names_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), momentum=0.9)
    checkpoint = saved({"optim": optimizer, "whole": model, "part": model[0]})
    assert "optim.param_groups.whole.0.weight.lr" in checkpoint.keys()  # noqa: SIM118


def test_only_the_optimizer_or_a_part_of_it_can_be_loaded() -> None:
    run, checkpoint = trained("adamw", 2)
    other = Run(OPTIMIZERS["adamw"])
    other.optimizer.param_groups[0]["lr"] = 7.0
    before = bits(dict(other.model.state_dict()))
    assert load(checkpoint, other.state, include="optim.state.model.0.*") == FITS
    assert bits(dict(other.model.state_dict())) == before
    assert set(other.optimizer.state) == set(other.model[0].parameters())
    assert states(other.optimizer) == states(run.optimizer)[:2]
    assert other.optimizer.param_groups[0]["lr"] == 7.0
    assert load(checkpoint, other.state, include="model.*") == FITS
    assert len(other.optimizer.state) == 2
    again, _ = trained("adamw")
    assert load(checkpoint, again.state, include="optim.state.*.exp_avg") == FITS
    for found, mine in zip(again.optimizer.state.values(), run.optimizer.state.values(), strict=True):
        assert torch.equal(found["exp_avg"], mine["exp_avg"])
        assert (found["step"], mine["step"]) == (1, 2)
    assert load(checkpoint, other.state, include="optim.*") == FITS
    assert states(other.optimizer) == states(run.optimizer)
    assert other.optimizer.param_groups[0]["lr"] == 0.02


class Hooked(torch.optim.AdamW):
    """Sees the loads, as optimizers that keep more than torch knows of do."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.loaded = getattr(self, "loaded", 0) + 1


class Apart(torch.optim.SGD):
    """A state dict that is nothing like torch's."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"loss_scale": 2.0, "flat": torch.cat([item.flatten() for item in self.param_groups[0]["params"]])}

    def load_state_dict(self, state_dict: Any) -> None:
        self.given = state_dict


def test_the_optimizers_own_load_runs_and_takes_a_state_dict_of_its_own_form_whole() -> None:
    run, other = Run(Hooked), Run(Hooked)
    run.steps(1)
    load(saved(run.state), other.state)
    assert other.optimizer.loaded == 1
    run, other = Run(Apart), Run(Apart)
    load(saved(run.state), other.state)
    assert bits(other.optimizer.given) == bits(run.optimizer.state_dict())


def test_entries_that_a_hook_adds_are_stored_and_handed_to_the_hook() -> None:
    def make() -> tuple[Run, list[Any]]:
        run, seen = Run(OPTIMIZERS["sgd-momentum"]), []
        run.optimizer.register_state_dict_post_hook(lambda _, packed: {**packed, "mark": torch.ones(2)})
        run.optimizer.register_load_state_dict_pre_hook(lambda _, packed: seen.append(packed["mark"]))
        return run, seen

    (run, _), (other, seen) = make(), make()
    run.steps(1)
    checkpoint = saved(run.state)
    load(checkpoint, other.state)
    assert bits(seen) == bits([torch.ones(2)])
    with pytest.raises(StateMismatch, match=r"without a place in the state: optim\.more"):
        load(checkpoint, Run(OPTIMIZERS["sgd-momentum"]).state)


def test_names_of_parameters_are_those_of_the_modules_now() -> None:
    def make(*, backwards: bool = False, more: bool = False) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), *([nn.Linear(3, 3)] if more else []))
        named = list(model.named_parameters())
        return {"model": model, "optim": torch.optim.AdamW(named[::-1] if backwards else named)}

    state, other, wider = make(), make(backwards=True), make(more=True)
    state["model"](torch.ones(3)).sum().backward()
    state["optim"].step()
    checkpoint = saved(state)
    assert not [key for key in checkpoint.keys() if key.endswith("param_names")]  # noqa: SIM118
    load(checkpoint, other)
    assert other["optim"].param_groups[0]["param_names"] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    weights = [run["optim"].state[run["model"][1].weight]["exp_avg"] for run in (state, other)]
    assert bits(weights[0]) == bits(weights[1])
    load(checkpoint, wider, strict=False)
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
    checkpoint, wider, narrower = saved(one), make("gen", "disc"), make("gen")
    assert "optim.state.gen.weight.exp_avg" in checkpoint.tensors
    assert all(".disc." in key for key in load(checkpoint, wider, strict=False)[0])
    weights = [state["optim"].state[state["gen"].weight] for state in (one, wider)]
    assert bits(weights[0]["exp_avg"]) == bits(weights[1]["exp_avg"])
    assert all(".disc." in key for key in load(saved(two), narrower, strict=False)[1])
    assert len(narrower["optim"].state) == 2
