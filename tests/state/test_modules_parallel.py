"""What only shows with several ranks: which tensors are the same, the meta device, resets, and modules side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layouts as given
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from carrier import bits, training, unchanged_by
from forked_ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import ckptstore
from ckptstore import InvalidState, StateMismatch
from ckptstore.state.live.apply import collect

pytestmark = pytest.mark.slow


def momentum(items: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(items, lr=0.1, momentum=0.9)


def save(directory: Path, state: dict[str, Any], step: int = 1) -> ckptstore.Checkpoint:
    with ckptstore.open_store(directory, durable=False) as store:
        return store.save(step, state)


def load(directory: Path, state: dict[str, Any]) -> None:
    with ckptstore.open_store(directory) as store:
        store.load(state)


def whole(directory: Path, step: int, include: str = "*") -> dict[str, Any]:
    """What was saved, as one process reads it; buffers of the norm may be those of each rank."""
    with ckptstore.open_store(directory, group="solo") as store:
        found = store[step].to_dict(include=include, per_rank="first")
    return {f"{part}.{key}": item for part, items in found.items() for key, item in items.items() if "norm" not in key}


def assert_alike(directory: Path, state: dict[str, Any], include: str = "*") -> None:
    """Save what the first checkpoint was loaded into, and hold that both are the same."""
    save(directory, state, 2)
    assert bits(whole(directory, 2, include)) == bits(whole(directory, 1, include))


def what_ddp_keeps_the_same(directory: Path) -> None:
    """Only what all ranks of the job share, and not what DDP was told to ignore."""

    def replicated(state: dict[str, Any]) -> set[str]:
        return {key for key, entry in collect(state).tensors.items() if entry.replicated}

    quiet = DistributedDataParallel(given.Block(), broadcast_buffers=False)
    optimizer = momentum(quiet.parameters())
    quiet(torch.rand(3, 6)).sum().backward()
    optimizer.step()
    parameters = {f"{layer}.{kind}" for layer in ("up", "norm", "down") for kind in ("weight", "bias")}
    assert replicated({"model": quiet, "optim": optimizer}) == {
        *(f"model.{name}" for name in parameters),
        *(f"optim.state.model.{name}.momentum_buffer" for name in parameters),
    }
    assert not any(entry.lowest_rank_counts for entry in collect({"model": quiet}).tensors.values())
    ignoring = given.Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["block.up.weight", "block.scale"])
    model = DistributedDataParallel(ignoring)
    names = replicated({"model": model})
    assert "model.block.up.bias" in names
    assert not {"model.block.up.weight", "model.block.scale"} & names
    lowest = {key for key, entry in collect({"model": model}).tensors.items() if entry.lowest_rank_counts}
    assert lowest == {f"model.block.norm.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")}
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = DistributedDataParallel(given.Block(), process_group=groups[dist.get_rank()])
    assert not replicated({"model": alone})
    assert not replicated({"model": given.Block()})
    assert replicated({"nested": {"inner": torch.nn.Sequential(DistributedDataParallel(given.Block()))}})


def unsharded_to_meta_fsdp2(directory: Path) -> None:
    run = given.Run("ddp")
    run.steps(2)
    save(directory, {"model": run.model, "optim": run.optimizer})
    with torch.device("meta"):
        model = given.LAYOUTS["fsdp2"](given.Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(directory, {"model": model, "optim": optimizer})
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_meta] == ["block.cache"]
    assert_alike(directory, {"model": model, "optim": optimizer})
    model.block.cache = torch.ones(2)
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()


def an_empty_optimizer_resets(directory: Path) -> None:
    for layout in ("fsdp1", "fsdp1-flat", "fsdp2", "tensor-parallel"):
        run = given.Run(layout)
        save(directory / layout, run.state)
        assert not run.optimizer.state
        run.steps(2)
        assert run.optimizer.state
        load(directory / layout, run.state)
        assert not run.optimizer.state, layout
        run.steps(1)


def parameters_that_never_got_a_gradient(directory: Path) -> None:
    for layout in ("ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tensor-parallel"):
        run, again = given.Run(layout, momentum), given.Run(layout, momentum)
        run.steps(1)
        names = ("first.weight", "module._flat_param")  # the outer flat parameter holds that layer alone
        unused = next(item for name, item in run.model.named_parameters() if name.endswith(names))
        del run.optimizer.state[unused]
        run.optimizer.param_groups[0]["lr"] = 0.7
        save(directory / layout, run.state)
        found = whole(directory / layout, 1, "optim.*")
        assert "optim.state.model.first.weight.momentum_buffer" not in found
        assert found["optim.param_groups.model.first.weight.lr"] == 0.7
        again.steps(1)
        load(directory / layout, again.state)
        assert_alike(directory / layout, again.state, "optim.*")


def what_was_cast_is_read_once_for_all(directory: Path) -> None:
    run, ours, theirs = given.Run("fsdp2"), given.Run("fsdp2"), given.Run("fsdp2")
    run.steps(2)
    with ckptstore.open_store(directory, durable=False) as store:
        store.save(1, run.state, dtype={"optim.*": "bfloat16"})
        store.load(ours.state)
        store.load(theirs.state, read_once="job")
    for parameter, own, other in zip(*(one.model.parameters() for one in (run, ours, theirs)), strict=True):
        for name, item in run.optimizer.state[parameter].items():
            expected = given.full(item) if name == "step" else given.full(item).bfloat16().float()
            assert torch.equal(given.full(ours.optimizer.state[own][name]), expected)
            assert torch.equal(given.full(theirs.optimizer.state[other][name]), expected)


class Average:
    """A moving average of a module's weights, in whatever form they are sharded."""

    def __init__(self, module: Any) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def averages_of_sharded_weights(directory: Path) -> None:
    average = Average(given.Run("fsdp2").model)
    save(directory, {"ema": average})
    for layout in ("fsdp2", "tensor-parallel", "plain"):
        model = given.Run(layout).model
        other = Average(model)
        for tensor in other.shadow.values():
            tensor.zero_()
        load(directory, {"ema": other})
        assert type(other.shadow["block.up.weight"]) is type(model.block.up.weight.data)
        for name, tensor in other.shadow.items():
            assert torch.equal(given.full(tensor), given.full(average.shadow[name]))


def a_mismatch_leaves_everything(directory: Path) -> None:
    run, other = given.Run("fsdp2"), given.Run("fsdp1", momentum)
    run.steps(1)
    save(directory, run.state)
    words = r"missing in the checkpoint: optim\.param_groups\.model\.block\.down\.bias\.dampening"

    def refused() -> None:
        with pytest.raises(StateMismatch, match=words):
            load(directory, other.state)

    unchanged_by(refused, *training(other.model, other.optimizer))
    assert not other.optimizer.state


def wrapped_state_under_fsdp1_is_refused_on_all_ranks(directory: Path) -> None:
    """Also on the rank whose parts are too small to be wrapped: torch would have it wait for the others."""
    run = given.Run("fsdp1", momentum)
    run.steps(1)
    if dist.get_rank() == 0:
        state = next(iter(run.optimizer.state.values()))
        state["momentum_buffer"] = TwoTensor(state["momentum_buffer"], state["momentum_buffer"])
    with pytest.raises(InvalidState, match=r"'optim' has state in tensors that wrap others \(TwoTensor\), and FSDP1"):
        save(directory, run.state)
    save(directory, {"model": run.model})


def stock_calls_of_torch_read_and_write_the_same_keys(directory: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def stock(run: given.Run, progress: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(run.model),
            "optim": get_optimizer_state_dict(run.model, run.optimizer, options=options),
            "sched": run.scheduler,
            "progress": progress,
        }

    run, other, again = given.Run("tensor-parallel"), given.Run("fsdp2"), given.Run("fsdp1")  # its buffers are alike
    run.steps(3)
    progress = {"epoch": 3, "log": [{"loss": 1.5}], "betas": (0.5, 0.25)}
    checkpoint = save(directory / "ours", {**run.state, "progress": progress})
    state = stock(other, {"epoch": 0, "log": [{"loss": 0.0}], "betas": ()})
    dcp.load(state, checkpoint_id=checkpoint.uri)
    set_model_state_dict(other.model, state["model"])
    set_optimizer_state_dict(other.model, other.optimizer, state["optim"], options=options)
    assert state["progress"] == progress
    assert other.scheduler.last_epoch == 3
    assert_alike(directory / "ours", {**other.state, "progress": progress})

    dcp.save(stock(run, progress), checkpoint_id=directory / "stock")
    fresh = {**again.state, "progress": {"epoch": 0, "log": [{"loss": 0.0}], "betas": ()}}
    report = ckptstore.Checkpoint.from_directory(directory / "stock").load(fresh)
    assert (report.missing, report.unexpected) == ((), ())
    save(directory / "ours", fresh, 3)
    assert bits(whole(directory / "ours", 3)) == bits(whole(directory / "ours", 1))


CASES = (
    what_ddp_keeps_the_same,
    unsharded_to_meta_fsdp2,
    an_empty_optimizer_resets,
    parameters_that_never_got_a_gradient,
    what_was_cast_is_read_once_for_all,
    averages_of_sharded_weights,
    a_mismatch_leaves_everything,
    wrapped_state_under_fsdp1_is_refused_on_all_ranks,
    stock_calls_of_torch_read_and_write_the_same_keys,
)


def in_ranks(directory: Path) -> None:
    """All in one group of processes, as these take long to start."""
    given.start()
    for case in CASES:
        case(directory / case.__name__)
    given.finish()


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, in_ranks, tmp_path, timeout_seconds=240, env={"PYTHONWARNINGS": "ignore"})
