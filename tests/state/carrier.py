"""Carries flat states without the project's own files: in memory for one process, through stock DCP for several."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ckptstore.state.index.part import Tensor
from ckptstore.state.live.apply import begin_load, collect
from ckptstore.state.live.flatten import FlatState, TensorRef, map_tensors
from ckptstore.state.live.matching import Mismatch, Saved, Target
from ckptstore.state.tensors.placement import name_of


def apply(
    state: Mapping[str, Any],
    saved: Saved,
    read: Callable[[Mapping[str, Target]], None],
    *,
    strict: bool = True,
    include: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
) -> Mismatch:
    """Load in one go, for one process: `read` fills the targets. Gives what did not fit."""
    loading = begin_load(state, saved, include=include, device=device)
    try:
        loading.mismatch.check(strict=strict)
    except BaseException:
        loading.abandon()
        raise
    read(loading.targets)
    loading.finish(read)
    return loading.mismatch


class Carried:
    """A copy of what one process would have stored."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        flat = collect(state)
        self.flat = flat
        self.tensors = {key: entry.tensor.detach().clone() for key, entry in flat.tensors.items()}
        self.saved = Saved(
            {key: Tensor(key, name_of(tensor.dtype), tuple(tensor.shape)) for key, tensor in self.tensors.items()},
            values_of(flat),
            dict(flat.aliases),
            modules={key: partial(copy.deepcopy, metadata) for key, metadata in flat.modules.items()},
        )

    def read(self, targets: Mapping[str, Target]) -> None:
        for target in targets.values():
            with torch.no_grad():
                target.tensor.copy_(self.tensors[target.source])

    def load(self, state: Mapping[str, Any], **keywords: Any) -> Mismatch:
        return apply(state, copy.deepcopy(self.saved), self.read, **keywords)


def values_of(flat: FlatState) -> dict[str, Any]:
    """The values as a checkpoint gives them back: copies, with references where tensors were."""
    return {
        key: copy.deepcopy(map_tensors(value, flat.paths[key], lambda _, tensor: TensorRef(flat.key_of(tensor))))
        for key, value in flat.values.items()
    }


def save_with_dcp(state: Mapping[str, Any], directory: Path) -> FlatState:
    """Save from all ranks; each rank keeps its own values."""
    flat = collect(state)
    dcp.save({key: entry.tensor for key, entry in flat.tensors.items()}, checkpoint_id=directory)
    rank = torch.distributed.get_rank()
    (directory / f"values-{rank}").write_bytes(pickle.dumps((values_of(flat), flat.aliases, flat.modules)))
    torch.distributed.barrier()
    return flat


def load_with_dcp(state: Mapping[str, Any], directory: Path, **keywords: Any) -> Mismatch:
    """Load on all ranks, also another number of them; values that are missing for a rank are those of rank 0."""
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    own = directory / f"values-{torch.distributed.get_rank()}"
    values, aliases, modules = pickle.loads((own if own.exists() else directory / "values-0").read_bytes())
    tensors = {key: Tensor(key, name_of(item.properties.dtype), tuple(item.size)) for key, item in metadata.items()}

    def read(targets: Mapping[str, Target]) -> None:
        waiting = list(targets.values())
        while waiting:  # one source may have several targets
            turn = {target.source: target.tensor for target in waiting}
            dcp.load(turn, checkpoint_id=directory)
            waiting = [target for target in waiting if turn[target.source] is not target.tensor]

    noted = {key: partial(copy.deepcopy, metadata) for key, metadata in modules.items()}
    return apply(state, Saved(tensors, values, aliases, modules=noted), read, **keywords)


def unchanged_by(action: Callable[[], Any], *things: Callable[[], Any]) -> Any:
    """Run an action between two looks at things, and hold that they are the same bit for bit."""
    before = [bits(thing()) for thing in things]
    result = action()
    assert [bits(thing()) for thing in things] == before
    return result


def bits(value: Any) -> Any:
    """A value in which every tensor is its bytes, for comparing."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        data = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0)
        return str(value.dtype), tuple(local.shape), bytes(data.tolist()) if local.numel() else b""
    if isinstance(value, Mapping):
        return type(value).__name__, [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return value


def training(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Callable[[], Any]]:
    """Looks at everything that a save must not change."""
    return [
        lambda: [(name, parameter, parameter.grad) for name, parameter in model.named_parameters()],
        lambda: list(model.named_buffers()),
        lambda: [dict(state) for state in optimizer.state.values()],
        lambda: [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
        torch.get_rng_state,
    ]
