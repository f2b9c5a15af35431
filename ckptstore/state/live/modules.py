"""What a module contributes to a state, under names that do not depend on how it is wrapped.

DDP, FSDP1, FSDP2, tensor parallelism, torch.compile and activation checkpointing give the same names for the same
architecture. Everything goes through torch.distributed.checkpoint.state_dict; `Module.state_dict` alone would keep the
prefixes of wrappers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptstore.errors import InvalidState
from ckptstore.runtime.torch_private import canonical_names
from ckptstore.state.live.flatten import FlatState, Path, TensorEntry, join_path
from ckptstore.state.tensors.overlap import identity_of
from ckptstore.state.tensors.placement import is_wrapped, wrapped_in
from ckptstore.state.tensors.wrapped import Wrapped


@dataclass(frozen=True, slots=True)
class ModuleContents:
    """A module's parameters, persistent buffers and extra state by canonical name.

    `items` is what torch's helper gives: live memory, except under FSDP1. `live` has the parameter or buffer object
    of each name, where one object has it (FSDP1's flat parameters have several names each).
    """

    items: dict[str, Any]
    live: dict[str, torch.Tensor]


@dataclass(slots=True)
class Sameness:
    """Which live tensors, by id, are the same on all ranks because DDP keeps them so, and which of them are buffers."""

    parameters: set[int] = field(default_factory=set)
    buffers: set[int] = field(default_factory=set)

    def entry(self, tensor: torch.Tensor, live: torch.Tensor | None) -> TensorEntry:
        """The entry of a tensor that shows `live`."""
        is_buffer = id(live) in self.buffers
        return TensorEntry(tensor, is_buffer or id(live) in self.parameters, lowest_rank_counts=is_buffer)


def read_module(key: str, module: torch.nn.Module) -> ModuleContents:
    """The contents of a module. Collective under FSDP1. Raises InvalidState when torch cannot give them."""
    with quiet_torch(), blaming(f"the module at {key!r}"):
        items = get_model_state_dict(module, options=StateDictOptions(strict=False))
    return ModuleContents(items, _live_tensors(module))


def write_module(key: str, module: torch.nn.Module, contents: ModuleContents, loaded: Mapping[str, Any]) -> None:
    """Put loaded contents into a module, which runs its hooks. Collective under FSDP1.

    Tensors that were read straight into the module's memory cost nothing: the module is handed its own parameter, and
    copying a tensor to itself does nothing.
    """
    items = {**contents.items, **loaded}
    for name, live in contents.live.items():
        item = items.get(name)
        if isinstance(item, torch.Tensor) and shows(item, live):
            items[name] = live
    if items:
        with quiet_torch(), blaming(f"the module at {key!r}"):
            set_model_state_dict(module, items, options=StateDictOptions(strict=True))


def collect_module(flat: FlatState, path: Path, module: torch.nn.Module, same: Sameness) -> None:
    """Take a module into a flat state."""
    contents = read_module(join_path(path), module)
    for name, item in contents.items.items():
        if isinstance(item, torch.Tensor):
            live = contents.live.get(name)
            flat.add_tensor((*path, name), same.entry(item, live), live=live)
        else:
            flat.add_value((*path, name), item)


def same_on_all_ranks(modules: Iterable[torch.nn.Module]) -> Sameness:
    """What DDP keeps equal on all ranks of the job: its parameters, and its buffers if it broadcasts them."""
    same = Sameness()
    for wrapper in (inner for module in modules for inner in module.modules()):
        if not isinstance(wrapper, DistributedDataParallel) or wrapper.process_group.size() != dist.get_world_size():
            continue
        ignored = set(wrapper.parameters_to_ignore)
        same.parameters |= {id(item) for name, item in wrapper.module.named_parameters() if name not in ignored}
        if wrapper.broadcast_buffers:
            same.buffers |= {id(item) for name, item in wrapper.module.named_buffers() if name not in ignored}
    return same


def uses_fsdp1(module: torch.nn.Module) -> bool:
    """Whether FSDP1 is in a module, so that what torch shows of it is a copy."""
    return any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Without the notices that FSDP1 and its ShardedTensors draw wherever torch touches them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="Multiple backends are registered with this ProcessGroup")
        yield


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Name the object whose contents torch refused."""
    try:
        yield
    except (RuntimeError, AssertionError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise InvalidState(f"{what} cannot be saved or loaded: {type(error).__name__}: {error}") from error


def _live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    live = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        names = canonical_names(module, name)
        if len(names) == 1:
            live[names[0]] = tensor
    return live


def shows(item: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether a tensor is a view of all of `live`, so that what was read into it is there already."""
    if is_wrapped(item) and is_wrapped(live):
        shown, held = wrapped_in(item, ""), wrapped_in(live, "")
        return shown.keys() == held.keys() and all(_wraps_same(shown[key], held[key]) for key in shown)
    if isinstance(item, DTensor) and isinstance(live, DTensor):
        return identity_of(item._local_tensor) == identity_of(live._local_tensor)
    is_plain = type(item) in (torch.Tensor, torch.nn.Parameter) and not isinstance(live, DTensor)
    return is_plain and identity_of(item) == identity_of(live)


def _wraps_same(shown: Wrapped, held: Wrapped) -> bool:
    return shown.label == held.label and all(
        _wraps_same(inner, held[name]) if isinstance(inner, Wrapped) else identity_of(inner) == identity_of(held[name])
        for name, inner in shown.items()
    )
