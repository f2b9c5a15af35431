"""Loading of a module: its own memory is filled; extra state and hooks follow. A module on the meta device gets memory
for everything that a checkpoint fills, and contents for buffers that it does not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any

import torch

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.runtime.torch_private import (
    canonical_names,
    convert_tensors,
    fsdp1_ties,
    loads_its_own_way,
    non_persistent_buffers,
)
from ckptstore.state.live.contents import StoredContents, default_device, same_random_numbers
from ckptstore.state.live.flatten import Unit
from ckptstore.state.live.matching import Matching, Saved
from ckptstore.state.live.modules import (
    ModuleContents,
    canonical_metadata,
    read_module,
    shows,
    uses_fsdp1,
    with_new_memory,
    write_module,
)
from ckptstore.state.live.translation import translate
from ckptstore.state.tensors.overlap import identity_of
from ckptstore.state.tensors.placement import is_dtensor
from ckptstore.state.tensors.tensor_memory import obstacle_of

EXTRA_STATE = "_extra_state"
"""The name that torch uses for the entry of a module's `get_extra_state`."""


def load_module(
    unit: Unit, matching: Matching, *, device: torch.device | None
) -> tuple[Materialised, Callable[[], None]]:
    """Match a module of the state. Parts of it that are on the meta device get memory first: return how that went, and
    the function that passes the module its state, which runs its hooks. Both are collective under FSDP1."""
    if not matching.includes_below(unit.key):
        return Materialised(lambda: None), lambda: None
    # FSDP1 shows nothing that is on the meta device; all others show the part of it that is in the state.
    is_fsdp1 = uses_fsdp1(unit.item)
    before = None if is_fsdp1 else read_module(unit.key, unit.item)
    materialised = materialise(unit.key, unit.item, device, None if before is None else before.items)
    try:
        contents = read_module(unit.key, unit.item) if before is None else with_new_memory(unit.key, unit.item, before)
        free = {name for name in contents.items if _is_decided_by_module(unit, name, contents, matching)}
        ties = _match_tensors(unit, contents, fsdp1_ties(unit.item) if is_fsdp1 else {}, matching, free)
        others = {
            name: StoredContents((*unit.path, name), item, matching, fixed=False, device=device)
            for name, item in contents.items.items()
            if name in free
        }
        metadata = _metadata_for(unit, matching.saved)
        translation = translate(unit, contents, matching, metadata)
        extra = {
            name: StoredContents((*unit.path, name), None, matching, fixed=False, device=device)
            for name in translation.extra
        }
        matching.left(*(f"{unit.key}.{name}" for name in translation.left))
        absent = {f"{unit.key}.{name}" for name in translation.absent}
        matching.translated |= absent - matching.mismatch.missing  # the others stay as they are
    except BaseException:
        materialised.release()
        raise

    def finish() -> None:
        loaded: dict[str, Any] = {name: stored.result() for name, stored in others.items()}
        for names in ties:  # FSDP1 shows a copy under each name, of which the first was filled
            loaded.update(dict.fromkeys(names[1:], contents.items[names[0]]))
        for name, stored in extra.items():
            item = stored.result()
            loaded[name] = translation.wrap(item) if isinstance(item, torch.Tensor) else item
        write_module(unit.key, unit.item, contents, loaded, metadata=metadata, absent=translation.absent)

    return materialised, finish


def _metadata_for(unit: Unit, saved: Saved) -> Mapping[str, Any] | None:
    """Return the metadata that was stored for a module, by canonical name; None if it was saved without, as stock DCP
    does: then modules treat their entries as those of their oldest version."""
    if unit.key in saved.modules:
        return saved.modules[unit.key]()
    return canonical_metadata(unit.item, saved.values.get(unit.key))


def _match_tensors(
    unit: Unit, contents: ModuleContents, named: Mapping[str, str], matching: Matching, free: Collection[str]
) -> list[list[str]]:
    """Match the tensors of a module but for those that are `free`, and return the names of each that has several."""
    ties: dict[Any, list[str]] = {}
    for name, item in contents.items.items():
        if name not in free:
            known = contents.items.get(named.get(name, name), item)
            ties.setdefault(identity_of(contents.live.get(name, known)), []).append(name)
    for names in ties.values():
        item, live = contents.items[names[0]], contents.live.get(names[0])
        is_copy = live is not None and not shows(item, live)
        keys = [f"{unit.key}.{name}" for name in names]
        matching.take_tensor(keys, item, live=live if is_copy else None)
    return [names for names in ties.values() if len(names) > 1]


def _is_decided_by_module(unit: Unit, name: str, contents: ModuleContents, matching: Matching) -> bool:
    """Return True if code of the module decides what becomes of an item: its `set_extra_state`, or for a buffer of
    another shape than the saved one the code by which its class loads entries. Observers of torch.ao take any shape."""
    item, live = contents.items[name], contents.live.get(name)
    if not isinstance(item, torch.Tensor) or name.rpartition(".")[2] == EXTRA_STATE:
        return True
    source = matching.source_of(f"{unit.key}.{name}")
    if source is None or type(live) is not torch.Tensor or obstacle_of(live) is not None:
        return False
    if matching.saved.tensors[source].shape == tuple(live.shape):
        return False
    return loads_its_own_way(unit.item, contents.raw[name])


def on_meta(build: Callable[[], Any], name: str) -> Mapping[str, Any]:
    """Return the state that a function builds, whose tensors are made on the meta device unless it says otherwise; for
    a module, a state that has it under a name. Raises InvalidInput for anything else, and for a function that fails."""
    if isinstance(build, torch.nn.Module):
        raise InvalidInput(f"A {type(build).__name__} was given", hint="Give a function that builds it")
    try:
        with torch.device("meta"):
            built = build()
    except CkptstoreError:
        raise
    except (Exception, SystemExit) as error:
        of_torch = os.path.dirname(torch.__file__)
        frames = [frame for frame in extract_tb(error.__traceback__)[1:] if not frame.filename.startswith(of_torch)]
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise InvalidInput(
            f"The function failed{where}: {type(error).__name__}: {error}",
            hint='It is called on the meta device, where tensors have no numbers. Those that it needs get device="cpu"',
        ) from error
    if isinstance(built, torch.nn.Module):
        return {name: built}
    if not isinstance(built, Mapping):
        raise InvalidInput(
            f"The function returned a {type(built).__name__}",
            hint="It returns a module, or the state as it is given to save",
        )
    return built


_UNTOUCHED = 0xA5
"""Every byte of a buffer before a module fills it; real contents are never only these."""


@dataclass(frozen=True, slots=True)
class Materialised:
    """The result for a module that was on the meta device."""

    release: Callable[[], None]
    """The function that takes the memory away again."""
    remade: tuple[str, ...] = ()
    """The keys of buffers outside of the state that the module has filled itself."""
    left: tuple[str, ...] = ()
    """The keys of those outside of the state that nobody can fill: they stay on the meta device."""


def materialise(
    key: str, module: torch.nn.Module, device: torch.device | None, names: Collection[str] | None = None
) -> Materialised:
    """Allocate the parameters and buffers that are on the meta device and are part of the state.

    `names` are the canonical names of that part; None means all parameters and persistent buffers. The memory is not
    initialised. Parameters stay the same objects. A buffer outside of the state, such as the frequencies of a rotary
    embedding, is filled by the module's own `reset_parameters`, or by `_init_weights` of a module around it, as in
    Hugging Face's models. A buffer that this leaves as it was stays on meta, with a warning, and so do tensors that the
    module's own `state_dict` leaves out. Neither function is called if parameters beside the buffer have contents
    already. If `device` is the meta device, all stays there: nothing is to be filled.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    is_to_stay = device is not None and device.type == "meta"
    if is_to_stay or not any(tensor.is_meta for _, tensor in named):
        return Materialised(lambda: None)
    outside = [name for name in non_persistent_buffers(module) if module.get_buffer(name).is_meta]
    makers = {name: maker for name in outside if (maker := _maker_of(module, name)) is not None}
    left_out = _left_out(module, names, {id(module.get_buffer(name)) for name in outside})
    stays = {id(module.get_buffer(name)) for name in outside if name not in makers} | set(left_out)
    kept = {id(tensor) for _, tensor in named if not tensor.is_meta}

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device or _device_of(tensor))

    convert_tensors(module, lambda tensor: tensor.is_meta and id(tensor) not in stays, allocate)
    remade = _remake(module, makers)
    left = [*(name for name in outside if name not in remade), *left_out.values()]
    made = [tensor for tensor in [*module.parameters(), *module.buffers()] if id(tensor) not in kept]

    def release() -> None:
        ids = set(map(id, made))
        convert_tensors(
            module, lambda tensor: id(tensor) in ids, lambda tensor: torch.empty_like(tensor, device="meta")
        )

    def keys(names: list[str]) -> tuple[str, ...]:
        return tuple(sorted(f"{key}.{(canonical_names(module, name) or [name])[0]}" for name in names))

    if left:
        warnings.warn(
            f"the module at {key!r} was on the meta device; these tensors are not part of its state and stay there "
            f"until you set them: {', '.join(left)}",
            stacklevel=2,
        )
    return Materialised(release, keys(sorted(remade)), keys(left))


def _left_out(module: torch.nn.Module, names: Collection[str] | None, outside: set[int]) -> dict[int, str]:
    """Return, by id, the names of the tensors on the meta device that a module's own `state_dict` leaves out under all
    their names, but for buffers that are `outside` of it by torch's rules."""
    if names is None:
        return {}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    inside = {id(tensor) for name, tensor in every if not set(canonical_names(module, name)).isdisjoint(names)}
    skipped = inside | outside
    return {id(tensor): name for name, tensor in every if tensor.is_meta and id(tensor) not in skipped}


def _maker_of(module: torch.nn.Module, name: str) -> Callable[[], object] | None:
    """Return the function that fills the buffers of the module that holds this one, None if there is none."""
    path, holder = name.split(".")[:-1], module.get_submodule(name.rpartition(".")[0])
    if type(holder.get_buffer(name.split(".")[-1])) not in (torch.Tensor, torch.nn.Buffer):
        return None
    if not all(parameter.is_meta for parameter in holder.parameters(recurse=False)):
        return None
    own = getattr(holder, "reset_parameters", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    for count in range(len(path), -1, -1):
        around = getattr(module.get_submodule(".".join(path[:count])), "_init_weights", None)
        if callable(around):
            return lambda: around(holder)
    return None


def _remake(module: torch.nn.Module, makers: dict[str, Callable[[], object]]) -> set[str]:
    """Let the makers fill buffers that have new memory; move those that were not filled back to meta. Return the filled
    ones."""
    for name in makers:
        _stored_bytes(module.get_buffer(name)).fill_(_UNTOUCHED)
    devices = {name: module.get_buffer(name).device for name in makers}
    with torch.no_grad(), same_random_numbers():
        for maker in makers.values():
            maker()
    remade = set()
    for name, device in devices.items():
        holder, own_name = module.get_submodule(name.rpartition(".")[0]), name.split(".")[-1]
        buffer = holder.get_buffer(own_name)
        if buffer.is_meta or bool((_stored_bytes(buffer) == _UNTOUCHED).all()):
            setattr(holder, own_name, torch.empty_like(buffer, device="meta"))
        else:
            remade.add(name)
            if buffer.device != device:
                setattr(holder, own_name, buffer.to(device))
    return remade


def _stored_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device for a meta tensor without an explicit one: that of a DTensor's mesh, else torch's default."""
    if not is_dtensor(tensor):
        return default_device()
    kind = tensor.device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
