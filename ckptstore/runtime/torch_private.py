"""All uses of private names of torch; no other file has any. Importing this file does not load torch.

`TRIED_VERSIONS` are the releases on which the tests passed; a test refuses any other until it has been tried.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

TRIED_VERSIONS = ("2.8.0", "2.10.0", "2.13.0", "2.15.0")


def default_store() -> Any:
    """Return the key-value store through which the processes of this job met, None if there is none.

    None without `init_process_group`, and with back-ends that meet by other means (MPI).
    """
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:
        return None
    try:
        return _get_default_store()
    except (ValueError, KeyError, RuntimeError):
        return None


def cloned(store: Any) -> Any:
    """Return a client of the same store with a connection of its own, so that waiting in one does not block the other.

    Return the store itself where torch cannot clone it.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


@contextmanager
def uncounted_group(number: int) -> Iterator[None]:
    """Make a process group of some ranks without a trace for the others. `number` is the same for these ranks, and new.

    torch 2.15 counts the groups that each rank has made, and names the next one of all ranks by that: after a group of
    some ranks, the others would wait under another name.
    """
    from torch.distributed.distributed_c10d import _world

    before, _world.group_count = _world.group_count, number
    try:
        yield
    finally:
        _world.group_count = before


def canonical_names(root: Any, name: str) -> tuple[str, ...]:
    """Return the names, without the parts that wrappers add, of a parameter, buffer or entry that `root` calls `name`.

    Wrappers are DDP, FSDP1, torch.compile and activation checkpointing, nested in any way; a submodule of the user's
    own that is called `module` keeps its name. A name that leads to no module below some point is kept from that point
    on. The flat parameter of FSDP1 has several names, sorted.
    """
    found: list[str] = []
    parts = name.split(".")
    at, place = root, 0
    while place < len(parts):
        kind: Any = type(at)
        attribute = _wrapper_attribute(kind)
        if attribute is not None:
            inner = at._modules[attribute]
            if parts[place:] == [attribute, _FLAT_PARAMETER]:
                flat = getattr(at, _FLAT_PARAMETER)
                below = [own for raw in flat._fqns for own in canonical_names(inner, raw)]
                return tuple(sorted(".".join([*found, own]) for own in below))
            place += parts[place] == attribute  # a name from a wrapper may lack its own prefix
            at = inner
            continue
        part = parts[place]
        if at is not None and hasattr(type(at), "_fqn_modifiers"):  # torch's way to name the parts a hook leaves out
            at = _child(at, at._fqn_modifiers().get(part)) or at
        found.append(part)
        at, place = _child(at, part), place + 1
    return (".".join(found),)


def fsdp1_names(root: Any) -> dict[str, str]:
    """Map the canonical names of the parameters of `root` to those of FSDP1, which keep the parts that `torch.compile`
    adds."""
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns

    return {canonical_names(root, name)[0]: name for names in _get_param_to_fqns(root).values() for name in names}


def fsdp1_ties(root: Any) -> dict[str, str]:
    """Map the canonical names of tied parameters in FSDP1's flat ones to the canonical name of the one that has their
    memory: FSDP1's state dict shows a copy under each name."""
    found: dict[str, str] = {}
    for path, module in root.named_modules():
        kind: Any = type(module)
        flat = getattr(module, _FLAT_PARAMETER, None) if _wrapper_attribute(kind) == _FSDP1 else None
        for tied in getattr(flat, "_shared_param_infos", None) or ():
            names = ((tied.module_name, tied.param_name), (tied.prim_module_name, tied.prim_param_name))
            one, first = (canonical_names(root, ".".join(filter(None, (path, _FSDP1, *name))))[0] for name in names)
            found[one] = first
    return found


_FLAT_PARAMETER = "_flat_param"
_FSDP1 = "_fsdp_wrapped_module"


def may_be_wrapped(name: str) -> bool:
    """Return True if a module's own name of itself or of one inside it may have parts that wrappers add."""
    return any(attribute in name for _, _, attribute in _WRAPPERS)


_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", _FSDP1),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
"""The module and name of each wrapper class, and its attribute that has the wrapped module."""


@cache
def _wrapper_attribute(kind: Any) -> str | None:
    for module, name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module), name, None)  # if it is not imported, no object is of that class
        if wrapper is not None and issubclass(kind, wrapper):
            return attribute
    return None


def _child(module: Any, name: str | None) -> Any:
    if module is None or name not in module._modules:  # TorchScript's knows `in` and `[]` alone
        return None
    return module._modules[name]


def absent_children(module: Any) -> list[str]:
    """Return the names of modules that would be inside a module and are None."""
    return [name for name, child in module._modules.items() if child is None]


def metadata_of(state_dict: Any) -> Any:
    """Return what modules have noted in a state dict beside its items, by the names of the modules, as their versions;
    None if it is no state dict that a module made."""
    found = getattr(state_dict, "__dict__", {}).get("_metadata")
    return found if isinstance(found, dict) else None


def set_metadata(state_dict: Any, metadata: Any) -> Any:
    """Give a state dict the metadata of modules, or take it away for None: without it modules treat the items as those
    of their oldest version. Return the state dict."""
    vars(state_dict).pop("_metadata", None)
    if metadata is not None:
        vars(state_dict).update(_metadata=metadata)
    return state_dict


def loads_its_own_way(root: Any, name: str) -> bool:
    """Return True if the class of the module that has an entry, which `root` calls `name`, has code of its own to load
    it. That of torch.nn's classes changes no shape, and does not count."""
    try:
        owner = root.get_submodule(name.rpartition(".")[0])
    except AttributeError:  # a name that a hook made up
        return False
    kind: Any = type(owner)
    while (attribute := _wrapper_attribute(kind)) is not None:
        owner = owner._modules[attribute]
        kind = type(owner)
    return not kind._load_from_state_dict.__module__.startswith("torch.nn.")


def translators_in(root: Any) -> list[Any]:
    """Return the modules that have code which may change entries or their names when they are loaded: hooks, or methods
    of their own class."""
    from torch.nn import Module

    found = [
        module
        for module in root.modules()
        if getattr(module, "_load_state_dict_pre_hooks", None)
        or getattr(type(module), "_load_from_state_dict", None) is not Module._load_from_state_dict
    ]
    is_own = getattr(type(root), "load_state_dict", None) is not Module.load_state_dict
    return [root, *found] if is_own else found


def convert_tensors(module: Any, chosen: Any, convert: Any) -> None:
    """Replace the parameters and buffers of a module that `chosen` picks by the results of `convert`.

    Parameters stay the same objects, so that an optimizer goes on with them and tied ones stay tied; plain
    `Module.to_empty` breaks both. Inner modules come first, since FSDP2 looks at its parameters after each one. Modules
    of which none is chosen are left alone: tensors in use cannot always be swapped.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for inner in reversed(list(module.modules())):
            own = [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]
            if any(map(chosen, own)) or isinstance(inner, FSDPModule):
                inner._apply(lambda tensor: convert(tensor) if chosen(tensor) else tensor, recurse=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def non_persistent_buffers(module: Any) -> list[str]:
    """Return the names of the buffers that are not part of a state."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules()
        for name in sorted(inner._non_persistent_buffers_set)
        if inner._buffers.get(name) is not None
    ]


def has_state_dict_hooks(optimizer: Any) -> bool:
    """Return True if an optimizer has hooks for its state dict, when it is made or loaded."""
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(optimizer, f"_optimizer_{kind}_hooks", None) for kind in kinds)


def hooks_of_load(module: Any) -> list[Any]:
    """Return the hooks that run when a module, without its children, is loaded."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    return [getattr(hook, "hook", hook) for hook in hooks]  # torch wraps those before a load


def is_wrapper(tensor: Any) -> bool:
    """Return True if a tensor is a subclass that keeps its numbers in other tensors (such as quantised weights)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def cached_plans(plans: Any) -> list[Any]:
    """Return the full plans of all ranks, where a caching planner passed on only the changed ones as `plans`.

    Return none if no planner of this process keeps a list of as many plans in which all usable ones of `plans` are.
    """
    from torch.distributed.checkpoint.planner import SavePlanner

    for known in SavePlanner._cached_global_plan.values():
        if len(known) == len(plans) and all(
            mine is plan for mine, plan in zip(known, plans, strict=True) if plan.usable
        ):
            return list(known)
    return []


def save_planner_with_cache(name: str) -> Any:
    """Return DCP's save planner with plan caching on. The plans are kept in the class, by this name: under DCP's own
    name, that of the class, savers of one process with different plans would find each other's."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = name
    return planner


def is_tensor_parallel_fsdp1(module: Any) -> bool:
    """Return True if FSDP1 has flattened parameters that were distributed already, by tensor parallelism."""
    handle = getattr(module, "_handle", None)
    extensions = getattr(getattr(handle, "flat_param", None), "_param_extensions", None)
    return any(extension is not None for extension in extensions or ())


def storage_info_class() -> Any:
    """Return the class by which stock DCP's `.metadata` locates an item, made from file, offset and length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


REBUILDERS = frozenset({("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")})
"""The functions that the pickle of a tensor names for making it; they are recognised, not called."""


SHARDED_TENSOR_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of the TensorProperties in the `.metadata` of older torch."""


def own_safe_globals() -> set[str]:
    """Return the names of what `torch.load(weights_only=True)` takes in this process, and in no other by default."""
    from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals

    return set(_get_user_allowed_globals()) - set(_get_allowed_globals())  # type: ignore[no-untyped-call]


def tensor_rebuilders() -> tuple[Any, Any]:
    """Return the functions that a file of `torch.save` names for making a tensor from a storage: one takes the dtype
    from the storage's class, the other as an argument."""
    from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

    return _rebuild_tensor_v2, _rebuild_tensor_v3


def checkpoint_wrapper(module: Any) -> Any:
    """Wrap a module so that its activations are computed again in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrap

    return wrap(module)


def fsspec_classes() -> tuple[Any, Any]:
    """Return DCP's FsspecWriter and FsspecReader, which torch documents but keeps in a private module."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return FsspecWriter, FsspecReader
