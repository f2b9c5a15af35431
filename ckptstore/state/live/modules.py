"""The contents that a module contributes to a state, under names that do not depend on how it is wrapped.

DDP, FSDP1, FSDP2, tensor parallelism, torch.compile and activation checkpointing yield the same names for the same
architecture. The contents of a module are those of its own `state_dict`, and they are loaded through its own
`load_state_dict`, under the names that it used: so its hooks and methods take part.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptstore.errors import CkptstoreError, InvalidState, StateMismatch
from ckptstore.runtime.torch_private import canonical_names, state_dict_like
from ckptstore.state.live.flatten import FlatState, Path, TensorEntry, join_path
from ckptstore.state.tensors.overlap import identity_of
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_dtensor, is_fsdp1, is_on_meta, is_wrapped, wrapped_in
from ckptstore.state.tensors.wrapped import Wrapped


@dataclass(frozen=True, slots=True)
class ModuleContents:
    """A module's parameters, persistent buffers and extra state by canonical name.

    `items` are those of its `state_dict`: live memory, except under FSDP1 and if hooks make something else. `live` has
    the parameter or buffer object of each name, if one object has it (FSDP1's flat parameters have several names each),
    also of those that are in no item. `raw` has the module's own name of each item, `given` is the state dict.
    """

    items: dict[str, Any]
    live: dict[str, torch.Tensor]
    raw: dict[str, str]
    given: Any


def read_module(key: str, module: torch.nn.Module) -> ModuleContents:
    """Return the contents of a module. Calls its `state_dict` once. Collective under FSDP1.

    Raises InvalidState when that fails, or returns something that cannot be loaded again.
    """
    what = f"the module at {key!r}"
    with quiet_torch(), blaming(what), torch.no_grad(), in_shards(module):
        given = module.state_dict()
    items: dict[str, Any] = {}
    raw: dict[str, str] = {}
    for name, item in given.items():
        (canonical, *_) = canonical_names(module, str(name))
        if canonical in raw:
            raise InvalidState(f"{what} has both {raw[canonical]!r} and {name!r} in its state_dict, which are one name")
        raw[canonical], items[canonical] = name, item
    return ModuleContents(items, _live_tensors(module), raw, given)


def with_new_memory(key: str, module: torch.nn.Module, contents: ModuleContents) -> ModuleContents:
    """Return the same contents after parameters and buffers on the meta device got memory.

    Calls `state_dict` once more only if hooks have made something else of tensors on the meta device.
    """
    live = _live_tensors(module)
    stale = [name for name, item in contents.items.items() if isinstance(item, torch.Tensor) and is_on_meta(item)]
    if any(name not in live for name in stale):
        return read_module(key, module)
    return replace(contents, items={**contents.items, **{name: live[name].detach() for name in stale}}, live=live)


def write_module(key: str, module: torch.nn.Module, contents: ModuleContents, loaded: Mapping[str, Any]) -> None:
    """Put loaded contents into a module by one call of its `load_state_dict`, with its hooks. Collective under FSDP1.

    Tensors that were read straight into the module's memory cost nothing: the module receives its own parameter, and
    copying a tensor to itself does nothing. Anything that its `state_dict` leaves out stays as it is. Raises
    StateMismatch when the module refuses its state, or leaves out a part of it.
    """
    items = {**contents.items, **loaded}
    for name, live in contents.live.items():
        item = items.get(name)
        if isinstance(item, torch.Tensor) and shows(item, live):
            items[name] = live
    if not items:
        return
    what = f"the module at {key!r}"
    given = state_dict_like(contents.given, {contents.raw[name]: item for name, item in items.items()})
    not_strict = {"strict": False} if _takes_strict(module) else {}
    is_inference = any(live.is_inference() for live in contents.live.values())
    mode = torch.inference_mode() if is_inference else nullcontext()  # outside it such tensors cannot be written to
    with quiet_torch(), blaming(what, StateMismatch), in_shards(module), mode:
        result = module.load_state_dict(given, **not_strict)
    left = set(getattr(result, "unexpected_keys", ()))
    lost = [name for name, raw in contents.raw.items() if raw in left and not _is_live(items[name], contents)]
    if lost:
        raise StateMismatch(
            f"{what} has {', '.join(lost)} in its state_dict, and its load_state_dict does not take it back",
            hint="Have a hook of the module take it, or leave it out of its state_dict",
        )


def _takes_strict(module: torch.nn.Module) -> bool:
    """Return True if `load_state_dict` takes `strict`, so that entries can be left out: a module's own may not."""
    parameters = inspect.signature(module.load_state_dict).parameters.values()
    return any(item.name == "strict" or item.kind is item.VAR_KEYWORD for item in parameters)


def _is_live(item: Any, contents: ModuleContents) -> bool:
    """Return True if an item is memory of the module, so that reading into it was enough."""
    return isinstance(item, torch.Tensor) and any(item is live or shows(item, live) for live in contents.live.values())


@contextmanager
def in_shards(module: torch.nn.Module) -> Iterator[None]:
    """Make FSDP1 show and take each rank's shards, if it is in a module."""
    if not uses_fsdp1(module):
        yield
        return
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    with state_dict_type_kept(module):
        FullyShardedDataParallel.set_state_dict_type(
            module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        )
        yield


@contextmanager
def state_dict_type_kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore the kind of state dict that FSDP1 had. torch's own functions leave theirs when something raises."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    before = FullyShardedDataParallel.get_state_dict_type(module)
    try:
        yield
    finally:
        FullyShardedDataParallel.set_state_dict_type(
            module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
        )


def collect_module(flat: FlatState, path: Path, module: torch.nn.Module, same: Mapping[int, bool]) -> None:
    contents = read_module(join_path(path), module)
    for name, item in contents.items.items():
        if isinstance(item, torch.Tensor):
            live = contents.live.get(name)
            is_buffer = same.get(id(live))
            entry = TensorEntry(item, is_buffer is not None, lowest_rank_counts=is_buffer is True)
            flat.add_tensor((*path, name), entry, live=live)
        else:
            flat.add_value((*path, name), item)


def same_on_all_ranks(modules: Iterable[torch.nn.Module]) -> dict[int, bool]:
    """Return the tensors, by id, that DDP keeps equal on all ranks of the job: its parameters, with False, and its
    buffers if it broadcasts them, with True."""
    parameters, buffers = set[int](), set[int]()
    for wrapper in (inner for module in modules for inner in module.modules()):
        if not isinstance(wrapper, DistributedDataParallel) or wrapper.process_group.size() != dist.get_world_size():
            continue
        ignored = set(wrapper.parameters_to_ignore)
        parameters |= {id(item) for name, item in wrapper.module.named_parameters() if name not in ignored}
        if wrapper.broadcast_buffers:
            buffers |= {id(item) for name, item in wrapper.module.named_buffers() if name not in ignored}
    return {**dict.fromkeys(parameters, False), **dict.fromkeys(buffers, True)}


def uses_fsdp1(module: torch.nn.Module) -> bool:
    """Return True if FSDP1 is in a module, so that torch shows copies of its tensors."""
    return any(is_fsdp1(inner) for inner in module.modules())


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence the warnings that FSDP1 and its ShardedTensors raise wherever torch touches them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="Multiple backends are registered with this ProcessGroup")
        yield


@contextmanager
def blaming(
    what: str, error_class: type[CkptstoreError] = InvalidState, did: str = "cannot be saved or loaded"
) -> Iterator[None]:
    """Name the object whose contents torch, or its own code, refused."""
    try:
        yield
    except CkptstoreError:
        raise
    except Exception as error:  # objects are the user's, and so are their errors
        raise error_class(f"{what} {did}: {type(error).__name__}: {error}") from error


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
    """Return True if a tensor is a view of all of `live`, so that reading into it fills `live`."""
    if is_wrapped(item) and is_wrapped(live):
        shown, held = wrapped_in(item, ""), wrapped_in(live, "")
        return shown.keys() == held.keys() and all(_wraps_same(shown[key], held[key]) for key in shown)
    if is_dtensor(item) and is_dtensor(live):
        return identity_of(item._local_tensor) == identity_of(live._local_tensor)
    is_plain = type(item) in PLAIN_TYPES and not is_dtensor(live)
    return is_plain and identity_of(item) == identity_of(live)


def _wraps_same(shown: Wrapped, held: Wrapped) -> bool:
    return shown.label == held.label and all(
        _wraps_same(inner, held[name]) if isinstance(inner, Wrapped) else identity_of(inner) == identity_of(held[name])
        for name, inner in shown.items()
    )
