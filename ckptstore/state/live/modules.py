"""The contents that a module contributes to a state, under names that do not depend on how it is wrapped.

DDP, FSDP1, FSDP2, tensor parallelism, torch.compile and activation checkpointing yield the same names for the same
architecture. The contents of a module are those of its own `state_dict`, and they are loaded through its own
`load_state_dict`, under the names that it used: so its hooks and methods take part.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptstore.errors import CkptstoreError, InvalidState, StateMismatch
from ckptstore.runtime.torch_private import canonical_names, may_be_wrapped, metadata_of, set_metadata, translators_in
from ckptstore.state.live.flatten import FlatState, Path, TensorEntry, join_path
from ckptstore.state.tensors.overlap import identity_of
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_dtensor, is_fsdp1, is_on_meta, is_wrapped, wrapped_in
from ckptstore.state.tensors.wrapped import Wrapped


@dataclass(frozen=True, slots=True)
class ModuleContents:
    """A module's parameters, persistent buffers and extra state by canonical name.

    `items` are those of its `state_dict`: live memory, except under FSDP1 and if hooks make something else. `live` has
    the parameter or buffer object of each name, if one object has it (FSDP1's flat parameters have several names each),
    also of those that are in no item. `raw` has the module's own name of each item, `state_dict` is what it returned.
    """

    items: dict[str, Any]
    live: dict[str, torch.Tensor]
    raw: dict[str, str]
    state_dict: Any


def read_module(key: str, module: torch.nn.Module) -> ModuleContents:
    """Return the contents of a module. Calls its `state_dict` once. Collective under FSDP1.

    Raises InvalidState when that fails, or returns something that cannot be loaded again.
    """
    what = f"the module at {key!r}"
    with quiet_torch(), blaming(what), torch.no_grad(), in_shards(module):
        state_dict = module.state_dict()
    items: dict[str, Any] = {}
    raw: dict[str, str] = {}
    for name, item in state_dict.items():
        (canonical, *_) = canonical_names(module, str(name))
        if canonical in raw:
            raise InvalidState(f"{what} has both {raw[canonical]!r} and {name!r} in its state_dict, which are one name")
        raw[canonical], items[canonical] = name, item
    return ModuleContents(items, _live_tensors(module), raw, state_dict)


def with_new_memory(key: str, module: torch.nn.Module, contents: ModuleContents) -> ModuleContents:
    """Return the same contents after parameters and buffers on the meta device got memory.

    Calls `state_dict` once more only if hooks have made something else of tensors on the meta device.
    """
    live = _live_tensors(module)
    stale = [name for name, item in contents.items.items() if isinstance(item, torch.Tensor) and is_on_meta(item)]
    if any(name not in live for name in stale):
        return read_module(key, module)
    return replace(contents, items={**contents.items, **{name: live[name].detach() for name in stale}}, live=live)


def write_module(
    key: str,
    module: torch.nn.Module,
    contents: ModuleContents,
    loaded: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any] | None,
    absent: Collection[str] = (),
) -> None:
    """Put loaded contents into a module by one call of its `load_state_dict`, with its hooks and the stored metadata.
    Collective under FSDP1.

    Tensors that were read straight into the module's memory cost nothing: the module receives its own parameter, and
    copying a tensor to itself does nothing. Anything that its `state_dict` leaves out stays as it is. Names of `loaded`
    that the module does not have, as its hooks may, are passed on; names that are `absent` are left out. Raises
    StateMismatch when the module refuses its state, or leaves out a part of it.
    """
    items = {name: item for name, item in {**contents.items, **loaded}.items() if name not in absent}
    for name, live in contents.live.items():
        item = items.get(name)
        if isinstance(item, torch.Tensor) and shows(item, live):
            items[name] = live
    if not items:
        return
    what = f"the module at {key!r}"
    state_dict = {contents.raw.get(name) or raw_name(contents, name): item for name, item in items.items()}
    is_inference = any(live.is_inference() for live in contents.live.values())
    mode = torch.inference_mode() if is_inference else nullcontext()  # outside it such tensors cannot be written to
    with quiet_torch(), blaming(what, StateMismatch), in_shards(module), mode, _overlaps_copied(module, contents):
        result = passed(module, state_dict, metadata)
    left = set(getattr(result, "unexpected_keys", ()))
    lost = [
        name
        for name, raw in contents.raw.items()
        if raw in left and name in items and not _is_live(items[name], contents)
    ]
    if lost:
        raise StateMismatch(
            f"{what} has {', '.join(lost)} in its state_dict, and its load_state_dict does not take it back",
            hint="Have a hook of the module take it, or leave it out of its state_dict",
        )


def passed(module: torch.nn.Module, state_dict: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> Any:
    """Pass a module a state dict under its own names, and return the result. `metadata` is by canonical name."""
    raw = None if metadata is None else _with_raw_names(module, metadata)
    not_strict = {"strict": False} if _takes_strict(module) else {}
    return module.load_state_dict(set_metadata(OrderedDict(state_dict), raw), **not_strict)


def _with_raw_names(module: torch.nn.Module, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the metadata of modules under the names that they have now. Those that are gone keep theirs, below the
    present names of what is around them: a hook may look for them."""
    names = {
        raw: canonical_names(module, raw)[0] if raw else "" for raw, _ in module.named_modules(remove_duplicate=False)
    }
    found = OrderedDict((raw, metadata[name]) for raw, name in names.items() if name in metadata)
    innermost = {name: raw for raw, name in names.items()}
    found.update((name_below(innermost, name), metadata[name]) for name in metadata.keys() - innermost.keys())
    return found


def raw_name(contents: ModuleContents, name: str) -> str:
    """Return the module's own name for an entry that it does not have, by the names of those around it."""
    prefixes: dict[str, str] = {}
    for canonical, raw in contents.raw.items():
        ours, its = canonical.split("."), raw.split(".")
        while ours and its and ours[-1] == its[-1]:
            ours.pop()
            its.pop()
        prefixes[".".join(ours)] = ".".join(its)
    if any(f"{name}.".startswith(f"{raw}.") for prefix, raw in prefixes.items() if raw and raw != prefix):
        return name  # it was saved with the names of a wrapper
    return name_below(prefixes, name)


def name_below(prefixes: Mapping[str, str], name: str) -> str:
    """Return a name with the longest known beginning replaced."""
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        prefix = prefixes.get(".".join(parts[:count]))
        if prefix is not None:
            return ".".join([*filter(None, [prefix]), *parts[count:]])
    return name


@contextmanager
def _overlaps_copied(module: torch.nn.Module, contents: ModuleContents) -> Iterator[None]:
    """Copy what code of the module takes from one parameter for another, before either is overwritten: each entry is
    passed as the live memory that it was read into."""
    own = {contents.raw[name]: live for name, live in contents.live.items() if name in contents.raw}
    places = {place for live in own.values() for place in _storages(live)}

    def copy_shared(_: Any, state: dict[str, Any], *rest: Any) -> None:
        for name, item in state.items():
            if not isinstance(item, torch.Tensor) or item is own.get(name) or places.isdisjoint(_storages(item)):
                continue
            if name not in own or not shows(item, own[name]):
                state[name] = item.detach().clone()

    handles = []
    if not uses_fsdp1(module):
        handles = [inner.register_load_state_dict_pre_hook(copy_shared) for inner in translators_in(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _storages(tensor: torch.Tensor) -> list[int]:
    """Return the addresses of the memory of a tensor, none if it has no memory."""
    if type(tensor) not in PLAIN_TYPES and not is_dtensor(tensor):
        return []
    local = getattr(tensor, "_local_tensor", tensor)
    return [local.untyped_storage().data_ptr()] if local.layout is torch.strided and local.numel() else []


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
    if (metadata := canonical_metadata(module, contents.state_dict)) is not None:
        flat.modules[join_path(path)] = metadata
    if not contents.items:
        flat.typed[join_path((*path, ""))] = (*path, "")  # a place that no key of an item tells
    for name, item in contents.items.items():
        if isinstance(item, torch.Tensor):
            live = contents.live.get(name)
            is_buffer = same.get(id(live))
            entry = TensorEntry(item, is_buffer is not None, lowest_rank_counts=is_buffer is True)
            flat.add_tensor((*path, name), entry, live=live)
        else:
            flat.add_value((*path, name), item)


def canonical_metadata(module: torch.nn.Module, state_dict: Any) -> dict[str, Any] | None:
    """Return the metadata in a state dict of a module by canonical name, None if it has none. What a wrapper wraps
    counts, not the wrapper."""
    metadata = metadata_of(state_dict)  # in which inner modules come last
    return metadata and {
        canonical_names(module, name)[0] if may_be_wrapped(name) else name: value for name, value in metadata.items()
    }


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
