"""Save and restore a state as torch itself does, and compare two states bit by bit."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ckptstore.runtime.torch_private import metadata_of, set_metadata
from ckptstore.state.live.flatten import OwnOfRank

Path = tuple[Any, ...]
_EXACT = frozenset({int, str, bool, bytes, type(None)})
"""Types whose equal values are the same."""
_ATOMS = _EXACT | {float, torch.Tensor}


class WritesAtLoad:
    """An object whose `load_state_dict` writes to others. A program that uses torch.save loads it before them."""


def plain_name(name: str) -> str:
    """Return the name of a module's tensor without the parts that wrappers add."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def is_lazy(tensor: Any) -> bool:
    """True if a parameter or buffer has no shape yet."""
    return isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)


def is_object(item: Any) -> bool:
    """True if torch saves an item by its state_dict and load_state_dict."""
    return not isinstance(item, type) and hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _objects_and_values(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield (path, item, container) for every object with a state_dict, and for every other item as a whole."""
    for key, entry in state.items() if isinstance(state, Mapping) else enumerate(state):
        item = entry.item if isinstance(entry, OwnOfRank) else entry
        if isinstance(item, dict | list) and _holds_object(item):
            yield from _objects_and_values(item, (*path, key))
        else:
            yield (*path, key), item, state


def _holds_object(item: Any) -> bool:
    inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return any(is_object(each) or _holds_object(each) for each in inner if type(each) not in _ATOMS)


def keep(state: Mapping[str, Any]) -> bytes:
    """Return torch.save's bytes of a state: state_dicts of its objects, everything else as it is."""
    contents = {path: _state_dict_of(item) if is_object(item) else item for path, item, _ in _objects_and_values(state)}
    memory = io.BytesIO()
    torch.save(contents, memory)
    return memory.getvalue()


def _state_dict_of(item: Any) -> Any:
    """Return the state_dict of an object. ZeroRedundancyOptimizer first gathers its parts, for each rank."""
    if not hasattr(item, "consolidate_state_dict"):
        return item.state_dict()
    found = None
    for rank in range(item.world_size):
        item.consolidate_state_dict(to=rank)
        found = item.state_dict() if item.rank == rank else found
    return found


def kept_in(data: bytes) -> dict[Path, Any]:
    """Return the state_dicts and values in the result of `keep`."""
    return torch.load(io.BytesIO(data), weights_only=False)  # type: ignore[no-any-return]


def give_back(state: Any, kept: Mapping[Path, Any], *, strict: bool = True, names: Any = None) -> None:
    """Load the result of `keep` into a state as torch does: each object by its load_state_dict, each tensor by copy_.

    `names` is (saved ones, those of this state) of the optimizer's parameters, by group, where they differ: its state
    is then loaded by name. Raises any error of torch.
    """
    order = sorted(_objects_and_values(state), key=lambda each: _rank_of(each[1]))
    for path, item, container in order:
        if path not in kept:
            continue
        saved = kept[path]
        if isinstance(item, nn.Module):
            _load_module(item, saved, strict=strict)
        elif isinstance(item, torch.optim.Optimizer):
            if hasattr(item, "consolidate_state_dict"):
                item.optim.state.clear()  # type: ignore[attr-defined]  # it keeps state of parameters that were saved without any
            own_state = saved if names is None else _by_name(item, saved, *names)
            item.load_state_dict(own_state)
            _uncast(item, own_state["state"])
        elif is_object(item):
            item.load_state_dict(saved)
        else:
            result = _filled(item, saved)
            if result is not item:
                container[path[-1]] = result


def without_wrappers(item: Any) -> Any:
    """Return what the `state_dict()` of a module gave, under names without wrappers; anything else as it is."""
    if (metadata := metadata_of(item)) is None:
        return item
    notes = OrderedDict((plain_name(f"{name}.").removesuffix("."), note) for name, note in metadata.items())
    return set_metadata(OrderedDict((plain_name(name), value) for name, value in item.items()), notes)


def _rank_of(item: Any) -> int:
    if isinstance(item, WritesAtLoad):
        return -1  # before all that it may write to
    kinds = (nn.Module, torch.optim.Optimizer, LRScheduler)
    return next((at for at, kind in enumerate(kinds) if isinstance(item, kind)), 3 + (not is_object(item)))


def _load_module(module: nn.Module, saved: dict[str, Any], *, strict: bool) -> None:
    own = {plain_name(name): name for name in module.state_dict()}
    renamed = OrderedDict((own.get(plain_name(name), _renamed(name, own)), value) for name, value in saved.items())
    noted = {plain_name(f"{name}."): notes for name, notes in (metadata_of(saved) or {}).items()}
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    set_metadata(
        renamed, {name: noted[plain] for name in names if (plain := plain_name(f"{name}.")) in noted} if noted else None
    )
    result: Any = module.load_state_dict(renamed, strict=False)  # a module may leave weights out of its own state_dict
    if strict and renamed.keys() != set(own.values()):
        lost = {*result.missing_keys, *result.unexpected_keys}
        if lost:
            raise RuntimeError(f"keys differ: {sorted(lost)}")


def _renamed(name: str, own: Mapping[str, str]) -> str:
    """Return the name that a module gives to an entry that it no longer has: with the wrappers of those beside it."""
    if not own:
        return name
    plain, first = next(iter(own.items()))
    wrapped = first.removesuffix(plain) if first.endswith(plain) else ""
    return f"{wrapped}{plain_name(name)}"


def _by_name(optimizer: torch.optim.Optimizer, saved: dict[str, Any], old: Any, new: Any) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(name for group in old for name in group)}
    names = [name for group in new for name in group]
    own_state = _state_dict_of(optimizer)
    state = {key: value for key, value in own_state["state"].items() if names[key] not in numbers}
    state |= {at: saved["state"][numbers[name]] for at, name in enumerate(names) if numbers.get(name) in saved["state"]}
    rest = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    groups = []
    for at, own in enumerate(own_state["param_groups"]):
        group = saved["param_groups"][at] if at < len(saved["param_groups"]) else own
        groups.append({**group, **{key: own[key] for key in ("params", "param_names") if key in own}})
    return {**saved, "state": {**state, **rest}, "param_groups": groups}


def _uncast(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Restore the saved dtype of state, which torch rounds to that of its parameter; ckptstore does not."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in (saved.get(number) or {}).items():  # None: of a parameter of another rank
            now = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.clone()


def _filled(item: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        if not isinstance(item, torch.Tensor) or item.is_meta or item.layout is not torch.strided or item.is_nested:
            return saved.detach().cpu()  # a stored tensor does not record its device, nor if it was a parameter
        with torch.no_grad():
            item.copy_(saved)
        return item
    if isinstance(item, dict) and isinstance(saved, dict) and item.keys() == saved.keys():
        for key, value in list(item.items()):
            item[key] = _filled(value, saved[key])
        if metadata_of(saved) is not None:
            set_metadata(item, metadata_of(saved))
        return item
    return saved


def holds(state: Any, kept: Mapping[Path, Any], *, is_upgraded: bool = False) -> str | None:
    """Return None when modules and raw tensors of a state have the values loaded into them, else the difference.

    A difference means that one memory would have to hold two numbers. Modules that were upgraded hold other ones.
    """
    for path, item, _ in _objects_and_values(state):
        if isinstance(item, nn.Module) and path in kept and not is_upgraded:
            own = {plain_name(name): value for name, value in item.state_dict().items()}
            saved = {plain_name(name): value for name, value in kept[path].items()}
            for name in sorted(own.keys() & saved.keys()):
                one, other = own[name], saved[name]
                if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                    found = difference(one, other, (*path, name), marks=False)
                    if found:
                        return found
        elif path == ("raw",) and path in kept and (found := difference(item, kept[path], path, marks=False)):
            return found
    return None


def gives_other_sizes(state: Mapping[str, Any]) -> bool:
    """True if torch has loaded state of the wrong size into a flat parameter of FSDP1.

    `load_state_dict` goes by position and does not check sizes. Then its result proves nothing.
    """
    return any(
        isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape
        for _, item, _ in _objects_and_values(state)
        if isinstance(item, torch.optim.Optimizer)
        for parameter, items in item.state.items()
        if hasattr(parameter, "_shard_numel_padded")
        for value in items.values()
    )


def observed(state: Mapping[str, Any]) -> dict[Path, Any]:
    """Return everything visible of a state: state_dicts, and of modules every parameter and buffer too."""
    found: dict[Path, Any] = {}
    for path, item, _ in _objects_and_values(state):
        if isinstance(item, nn.Module):
            everything = [*item.named_parameters(remove_duplicate=False), *item.named_buffers(remove_duplicate=False)]
            shared: dict[int, int] = {}
            found[path] = {
                "state": _plain_keys(item.state_dict()),
                "tensors": {plain_name(name): tensor for name, tensor in everything},
                "ties": [shared.setdefault(id(tensor), len(shared)) for _, tensor in everything],
            }
        elif isinstance(item, torch.optim.Optimizer):
            own_state = _state_dict_of(item)
            parameters = [parameter for group in item.param_groups for parameter in group["params"]]
            state_of = {
                key: _of_parameter(value, parameters[key])
                if isinstance(key, int) and isinstance(value, dict)
                else value
                for key, value in own_state["state"].items()
                if not _is_empty(value)
            }
            steps = getattr(item, "steps", None)
            found[path] = {
                **own_state,
                "state": dict(sorted(state_of.items(), key=lambda each: str(each[0]))),
                "own": steps,
            }
        else:
            found[path] = item.state_dict() if is_object(item) else item
    return found


def _plain_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in state.items()}


def _of_parameter(items: dict[Any, Any], parameter: torch.Tensor) -> dict[Any, Any]:
    """Return the state of a parameter as it is compared: without padding, and with single numbers on the host."""
    # torch fills the padding of a flat parameter of FSDP1 with zeros, and moves some numbers made on the host.
    padding = getattr(parameter, "_shard_numel_padded", 0)
    found = dict(items)
    for name, item in items.items():
        if isinstance(item, torch.Tensor) and not item.dim():
            found[name] = item.cpu()
        elif padding and isinstance(item, torch.Tensor) and item.shape == parameter.shape:
            found[name] = item[:-padding]
    return found


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def frozen(value: Any) -> Any:
    """Return a copy of the result of `observed` that no later change reaches."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not is_lazy(value)
        return value.detach().clone().requires_grad_(value.requires_grad) if is_plain and not value.is_meta else value
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: frozen(each) for key, each in value.items()}
        return type(value)(frozen(each) for each in value)
    return value


def difference(one: Any, other: Any, path: Path = (), *, marks: bool = True) -> str | None:
    """Return the place and kind of a difference, None when the values are the same bit by bit and type by type.

    Memory formats are not compared. Without `marks`, requires_grad, inference mode and the device of tensors are
    ignored.
    """
    if type(one) is type(other) and type(one) in _EXACT and one == other:
        return None
    where = ".".join(map(str, path))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        how = _tensors_differ(one, other, marks=marks)
        return f"{where}: {how}" if how else None
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} in place of {type(other).__name__}"
    if isinstance(one, dict):
        return _dicts_differ(one, other, path, marks=marks)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where}: {len(one)} items in place of {len(other)}"
        if all(type(each) in _EXACT for each in one) and one == other and [*map(type, one)] == [*map(type, other)]:
            return None
        pairs = enumerate(zip(one, other, strict=True))
        found = (difference(*pair, (*path, at), marks=marks) for at, pair in pairs)
        return next((each for each in found if each), None)
    if isinstance(one, np.ndarray | np.generic):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return None if same else f"{where}: another array"
    if isinstance(one, float | complex):
        return None if repr(one) == repr(other) else f"{where}: {one!r} in place of {other!r}"
    same = bool(one == other) or (hasattr(one, "__dict__") and vars(one) == vars(other))
    return None if same else f"{where}: {ascii(one)[:60]} in place of {ascii(other)[:60]}"


def _dicts_differ(one: dict[Any, Any], other: dict[Any, Any], path: Path, *, marks: bool) -> str | None:
    where = ".".join(map(str, path))
    if one.keys() != other.keys():
        fewer, more = [key for key in other if key not in one], [key for key in one if key not in other]
        return f"{where}: without {fewer[:4]}, with {more[:4]}"
    if path and path[0] == "values" and list(one) != list(other):
        return f"{where}: in another order"
    found = (difference(one[key], other[key], (*path, key), marks=marks) for key in one)
    notes = metadata_of(one), metadata_of(other)
    noted = None if notes == (None, None) else difference(*notes, (*path, "notes"), marks=marks)
    return next((each for each in found if each), noted)


def _tensors_differ(one: torch.Tensor, other: torch.Tensor, *, marks: bool) -> str | None:
    lazy = [is_lazy(each) for each in (one, other)]
    if any(lazy):
        return None if all(lazy) else "a tensor without a shape in place of one, or the other way"
    one, other = (getattr(each, "_local_tensor", each) for each in (one, other))
    if not marks and not one.is_meta and not other.is_meta:
        one, other = one.cpu(), other.cpu()
    if (one.dtype, one.device, one.layout) != (other.dtype, other.device, other.layout):
        return f"{one.dtype} {one.device} {one.layout} in place of {other.dtype} {other.device} {other.layout}"
    if one.is_nested:
        parts = zip(one.unbind(), other.unbind(), strict=False)
        return next((how for pair in parts if (how := _tensors_differ(*pair, marks=marks))), None)
    if one.shape != other.shape:
        return f"{list(one.shape)} in place of {list(other.shape)}"
    if marks and one.requires_grad != other.requires_grad:
        return f"requires_grad {one.requires_grad} in place of {other.requires_grad}"
    if marks and one.is_inference() != other.is_inference():
        return f"a tensor of inference mode: {one.is_inference()} in place of {other.is_inference()}"
    if one.is_meta:
        return None
    if one.is_quantized:
        same = one.qscheme() == other.qscheme() and torch.equal(one.int_repr(), other.int_repr())
        return None if same and torch.equal(one.dequantize(), other.dequantize()) else "other bits"
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return None if torch.equal(_bits(one), _bits(other)) else "other bits"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        dense = tensor.detach().resolve_conj().resolve_neg()
        return dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
