"""What only shows with several ranks: which tensors are the same, the meta device, resets, and modules side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def what_ddp_keeps_the_same(directory: Path) -> None:
    """Only what all ranks of the job share, and not what DDP was told to ignore."""
    import torch
    import torch.distributed as dist
    from layouts import Block, Model
    from torch.nn.parallel import DistributedDataParallel

    from ckptstore.state.live.apply import collect

    def replicated(state: dict[str, Any]) -> set[str]:
        return {key for key, entry in collect(state).tensors.items() if entry.replicated}

    quiet = DistributedDataParallel(Block(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(quiet.parameters(), lr=0.1, momentum=0.9)
    quiet(torch.rand(3, 6)).sum().backward()
    optimizer.step()
    flat = collect({"model": quiet, "optim": optimizer})
    parameters = {f"{layer}.{kind}" for layer in ("up", "norm", "down") for kind in ("weight", "bias")}
    assert {key for key, entry in flat.tensors.items() if entry.replicated} == {
        *(f"model.{name}" for name in parameters),
        *(f"optim.state.model.{name}.momentum_buffer" for name in parameters),
    }
    assert not any(entry.lowest_rank_counts for entry in flat.tensors.values())

    ignoring = Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["block.up.weight", "block.scale"])
    names = replicated({"model": DistributedDataParallel(ignoring)})
    assert "model.block.up.bias" in names
    assert not {"model.block.up.weight", "model.block.scale"} & names

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = DistributedDataParallel(Block(), process_group=groups[dist.get_rank()])
    assert not replicated({"model": alone})
    assert not replicated({"model": Block()})
    assert replicated({"nested": {"inner": torch.nn.Sequential(DistributedDataParallel(Block()))}})


def unsharded_to_meta_fsdp2(directory: Path) -> None:
    import torch
    from carrier import bits, load_with_dcp, save_with_dcp
    from layouts import LAYOUTS, Model, Run, full

    from ckptstore.state.live.apply import collect

    run = Run("ddp")
    run.steps(2)
    flat = save_with_dcp(run.state, directory)
    with torch.device("meta"):
        model = LAYOUTS["fsdp2"](Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_with_dcp({"model": model, "optim": optimizer}, directory)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_meta] == ["block.cache"]
    loaded = collect({"model": model, "optim": optimizer})
    assert loaded.aliases == flat.aliases
    for key, entry in loaded.tensors.items():
        if "norm" not in key:  # buffers differ between the ranks
            assert bits(full(entry.tensor)) == bits(full(flat.tensors[key].tensor)), key
    model.block.cache = torch.ones(2)
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()


def an_empty_optimizer_resets(directory: Path) -> None:
    from carrier import load_with_dcp, save_with_dcp
    from layouts import Run

    for layout in ("fsdp1", "fsdp1-flat", "fsdp2", "tensor-parallel"):
        run = Run(layout)
        save_with_dcp(run.state, directory / layout)
        run.steps(2)
        assert run.optimizer.state
        load_with_dcp(run.state, directory / layout)
        assert not run.optimizer.state, layout
        run.steps(1)


def parameters_that_never_got_a_gradient(directory: Path) -> None:
    import torch
    from carrier import load_with_dcp, save_with_dcp
    from layouts import Run, full

    from ckptstore.state.live.apply import collect

    for layout in ("ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tensor-parallel"):
        run = Run(layout, lambda items: torch.optim.SGD(items, lr=0.1, momentum=0.9))
        run.steps(1)
        names = ("first.weight", "module._flat_param")  # the outer flat parameter holds that layer alone
        unused = next(item for name, item in run.model.named_parameters() if name.endswith(names))
        del run.optimizer.state[unused]
        flat = save_with_dcp(run.state, directory / layout)
        assert "optim.state.model.first.weight.momentum_buffer" not in flat.tensors
        assert "optim.param_groups.model.first.weight.lr" in flat.values
        again = Run(layout, lambda items: torch.optim.SGD(items, lr=0.7, momentum=0.9))
        again.steps(1)
        load_with_dcp(again.state, directory / layout)
        loaded = collect(again.state).tensors
        assert loaded.keys() == flat.tensors.keys()
        key = "optim.state.model.block.up.weight.momentum_buffer"
        assert torch.equal(full(loaded[key].tensor), full(flat.tensors[key].tensor))
        assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


class Average:
    """A moving average of a module's weights, in whatever form they are sharded."""

    def __init__(self, module: Any) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def averages_of_sharded_weights(directory: Path) -> None:
    import torch
    from carrier import load_with_dcp, save_with_dcp
    from layouts import Run, full

    run = Run("fsdp2")
    average = Average(run.model)
    save_with_dcp({"ema": average}, directory)
    for layout in ("fsdp2", "tensor-parallel", "plain"):
        other = Average(Run(layout).model)
        for tensor in other.shadow.values():
            tensor.zero_()
        load_with_dcp({"ema": other}, directory)
        assert type(other.shadow["block.up.weight"]) is type(Run(layout).model.block.up.weight.data)
        assert all(torch.equal(full(tensor), full(average.shadow[name])) for name, tensor in other.shadow.items())


def a_mismatch_leaves_everything(directory: Path) -> None:
    import pytest
    import torch
    from carrier import load_with_dcp, save_with_dcp, training, unchanged_by
    from layouts import Run

    from ckptstore.errors import StateMismatch

    run = Run("fsdp2")
    run.steps(1)
    save_with_dcp(run.state, directory)
    other = Run("fsdp1", lambda items: torch.optim.SGD(items, momentum=0.9))

    def refused() -> None:
        with pytest.raises(
            StateMismatch, match=r"missing in the checkpoint: optim\.param_groups\.model\.block\.down\.bias\.dampening"
        ):
            load_with_dcp(other.state, directory)

    unchanged_by(refused, *training(other.model, other.optimizer))
    assert not other.optimizer.state


def wrapped_state_under_fsdp1_is_refused_on_all_ranks(directory: Path) -> None:
    """Also on the rank whose parts are too small to be wrapped: torch would have it wait for the others."""
    import pytest
    import torch
    import torch.distributed as dist
    from layouts import Run
    from torch.testing._internal.two_tensor import TwoTensor

    from ckptstore.errors import InvalidState
    from ckptstore.state.live.apply import collect

    run = Run("fsdp1", lambda items: torch.optim.SGD(items, lr=0.1, momentum=0.9))
    run.steps(1)
    if dist.get_rank() == 0:
        state = next(iter(run.optimizer.state.values()))
        state["momentum_buffer"] = TwoTensor(state["momentum_buffer"], state["momentum_buffer"])
    with pytest.raises(InvalidState, match=r"'optim' has state in tensors that wrap others \(TwoTensor\), and FSDP1"):
        collect(run.state)
    collect({"model": run.model})


def stock_calls_of_torch_read_and_write_the_same_keys(directory: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from carrier import apply
    from layouts import Run, full
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    from ckptstore.dcp.stock.stock_write import stock_names
    from ckptstore.state.index.part import Tensor
    from ckptstore.state.live.apply import collect
    from ckptstore.state.live.flatten import join_path, stock_leaves
    from ckptstore.state.live.matching import Mismatch, Saved
    from ckptstore.state.tensors.placement import name_of

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def stock(run: Run, progress: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(run.model),
            "optim": get_optimizer_state_dict(run.model, run.optimizer, options=options),
            "sched": run.scheduler,
            "progress": progress,
        }

    run = Run("fsdp2")
    run.steps(3)
    progress = {"epoch": 3, "log": [{"loss": 1.5}], "betas": (0.5, 0.25)}
    flat = collect({**run.state, "progress": progress})
    items: dict[str, Any] = {key: entry.tensor for key, entry in flat.tensors.items()}
    items |= {key: flat.tensors[to].tensor for key, to in flat.aliases.items()}
    for key, value in flat.values.items():
        items |= {join_path(path): leaf for path, leaf in stock_leaves(value, flat.paths[key])}
    names = stock_names(items)
    items = {names.get(key, key): item for key, item in items.items()}
    dcp.save(items, checkpoint_id=directory / "ours")

    other = Run("tensor-parallel")
    seen: dict[str, Any] = {"epoch": 0, "log": [{"loss": 0.0}], "betas": ()}
    state = stock(other, seen)
    dcp.load(state, checkpoint_id=directory / "ours")
    set_model_state_dict(other.model, state["model"])
    set_optimizer_state_dict(other.model, other.optimizer, state["optim"], options=options)
    assert state["progress"] == progress
    assert other.scheduler.last_epoch == 3
    loaded = collect(other.state).tensors
    assert all(
        torch.equal(full(loaded[key].tensor), full(flat.tensors[key].tensor)) for key in loaded if "norm" not in key
    )

    dcp.save(stock(run, progress), checkpoint_id=directory / "stock")
    metadata = dcp.FileSystemReader(directory / "stock").read_metadata().state_dict_metadata
    tensors = {
        key: Tensor(key, name_of(item.properties.dtype), tuple(item.size))
        for key, item in metadata.items()
        if hasattr(item, "size")
    }
    values = dict.fromkeys(metadata.keys() - tensors.keys())
    dcp.load(values, checkpoint_id=directory / "stock")
    again = Run("fsdp1")
    fresh = {**again.state, "progress": {"epoch": 0, "log": [{"loss": 0.0}], "betas": ()}}
    filled = apply(
        fresh,
        Saved(tensors, values),
        lambda targets: dcp.load(
            {target.source: target.tensor for target in targets.values()}, checkpoint_id=directory / "stock"
        ),
    )
    assert filled == Mismatch()
    assert fresh["progress"] == progress
    loaded = collect(again.state).tensors
    assert all(
        torch.equal(full(loaded[key].tensor), full(flat.tensors[key].tensor)) for key in loaded if "norm" not in key
    )
    assert again.scheduler.last_epoch == 3


CASES = (
    what_ddp_keeps_the_same,
    unsharded_to_meta_fsdp2,
    an_empty_optimizer_resets,
    parameters_that_never_got_a_gradient,
    averages_of_sharded_weights,
    a_mismatch_leaves_everything,
    wrapped_state_under_fsdp1_is_refused_on_all_ranks,
    stock_calls_of_torch_read_and_write_the_same_keys,
)
