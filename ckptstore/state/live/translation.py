"""Translation of stored names by the code of a module: hooks that rename entries, classes that take old ones or fill in
new ones.

It is tried before anything is read: the module's own `load_state_dict` runs on tensors without numbers, and all its
attributes are restored. So a load knows which stored names have a place, and which of the module's own names need none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckptstore.errors import StateMismatch
from ckptstore.runtime.torch_private import absent_children, translators_in
from ckptstore.state.live.contents import same_random_numbers
from ckptstore.state.live.flatten import Unit, find_references, join_path
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.modules import ModuleContents, passed, raw_name, uses_fsdp1
from ckptstore.state.tensors.placement import is_dtensor, is_fsdp1
from ckptstore.state.tensors.tensor_memory import obstacle_of
from ckptstore.state.tensors.wrapped import Wrapped

Wrap = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Translation:
    """The result of a trial: `load_state_dict` gets the stored names `extra`, and nothing under the names `absent`. The
    names `left` of `extra` find no place: hooks may still look at them."""

    extra: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    wrap: Wrap = lambda tensor: tensor
    """Makes of a tensor that was read what parameters of the module take."""


def translate(unit: Unit, contents: ModuleContents, matching: Matching, metadata: Any) -> Translation:
    """Let the code of a module translate the names that did not fit, and note those that it takes as placed.

    Call it when the module is matched by names. Nothing of the module changes.
    """
    start, mismatch = f"{unit.key}.", matching.mismatch
    missing = {key.removeprefix(start) for key in mismatch.missing if key.startswith(start)}
    differing = {key.removeprefix(start) for key in mismatch.differing if key.startswith(start)}
    reshaped = {name for name in differing if _has_other_shape(unit, name, contents, matching)}
    extra = _extra(unit, matching)
    if not (missing or extra or reshaped) or all(map(is_fsdp1, translators_in(unit.item))):
        return Translation()
    if uses_fsdp1(unit.item):
        mismatch.advice = (
            f"Code of the module at {unit.key!r} may know these names. Under FSDP1 it cannot be tried: load into the "
            "module before it is wrapped, and save it again"
        )
        return Translation()
    trial = _Trial(unit, contents, matching, metadata, missing | differing)
    error: Exception | None = None
    for names in [extra | reshaped, extra] if reshaped else [extra]:
        for wrap in _wraps(unit.item):
            try:
                lacking, unplaced = trial.run(sorted(names), wrap)
            except Exception as caught:  # the module's own code, which may need numbers
                error = error or caught
                continue
            mismatch.missing -= {f"{start}{name}" for name in missing - lacking}
            for name in names & reshaped:
                del mismatch.differing[f"{start}{name}"]
            return Translation(tuple(sorted(names)), frozenset(unplaced), frozenset(missing - names), wrap)
    mismatch.advice = (
        f"The module at {unit.key!r} has code that loads its entries. It was tried with the stored names, and failed: "
        f"{type(error).__name__}: {error}"
    )
    return Translation()


def _has_other_shape(unit: Unit, name: str, contents: ModuleContents, matching: Matching) -> bool:
    source, item = matching.source_of(f"{unit.key}.{name}"), contents.items.get(name)
    if source is None or not isinstance(item, torch.Tensor) or obstacle_of(item) is not None:
        return False
    return matching.saved.tensors[source].shape != tuple(item.shape)


def _extra(unit: Unit, matching: Matching) -> set[str]:
    """Return the names below a module that nothing took, without the tensors inside values."""
    values = matching.saved.values
    left = [key for key in matching.unplaced_below(unit.key) if not isinstance(values.get(key), Wrapped)]
    inside = {join_path(path) for key in left if key in values for path, _ in find_references(values[key], (key,))}
    return {key.removeprefix(f"{unit.key}.") for key in left if key not in inside}


class _Trial:
    """One module, its contents, and the names of them for which the checkpoint has nothing that fits."""

    def __init__(
        self, unit: Unit, contents: ModuleContents, matching: Matching, metadata: Any, unfit: set[str]
    ) -> None:
        self._unit, self._contents, self._matching = unit, contents, matching
        self._metadata = metadata
        self._unfit = unfit

    def run(self, extra: Sequence[str], wrap: Wrap) -> tuple[set[str], set[str]]:
        """Return the own names that are missing, and the stored names that find no place. Raises any error of the
        module's code."""
        contents = self._contents
        items = {name: _shadow(item) for name, item in contents.items.items() if name not in self._unfit}
        raw = {name: contents.raw.get(name) or raw_name(contents, name) for name in extra}
        state_dict = {contents.raw[name]: item for name, item in items.items()}
        state_dict |= {raw[name]: self._stored(name, wrap) for name in extra}
        module = self._unit.item
        with same_random_numbers(), warnings.catch_warnings(), _without_numbers(module), _left_by_torch(module) as left:
            warnings.simplefilter("ignore")  # torch warns of tensors without numbers
            result = passed(module, state_dict, self._metadata)
        lacking, unplaced = set(result.missing_keys), left.union(result.unexpected_keys)
        return (
            {name for name, own in contents.raw.items() if own in lacking},
            {name for name, own in raw.items() if own in unplaced},
        )

    def _stored(self, name: str, wrap: Wrap) -> Any:
        key = f"{self._unit.key}.{name}"
        saved = self._matching.saved
        source = self._matching.source_of(key)
        if source is None or key in saved.values:
            return saved.values[key]
        tensor = saved.tensors[source]
        return wrap(torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="meta"))


@contextmanager
def _left_by_torch(module: torch.nn.Module) -> Iterator[set[str]]:
    """Collect the names that hooks leave below a module that is None: torch drops these in silence."""
    left = set[str]()

    def look(inner: torch.nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        gone = [f"{prefix}{name}." for name in absent_children(inner)]
        left.update(key for key in state if any(map(key.startswith, gone)))

    handles = [inner.register_load_state_dict_pre_hook(look) for inner in module.modules()]  # type: ignore[no-untyped-call]
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_numbers(module: torch.nn.Module) -> Iterator[None]:
    """Let parameters and buffers be tensors without numbers; restore all attributes of all modules in the end."""
    before = {inner: dict(vars(inner)) for inner in module.modules()}
    shadows: dict[int, Any] = {}
    try:
        for inner in before:
            for kind in ("_parameters", "_buffers"):
                held = vars(inner)[kind]
                vars(inner)[kind] = type(held)(
                    (name, shadows.setdefault(id(item), _shadow(item))) for name, item in held.items()
                )
            vars(inner)["set_extra_state"] = lambda state: None
        yield
    finally:
        for inner, attributes in before.items():
            vars(inner).clear()
            vars(inner).update(attributes)


def _shadow(item: Any) -> Any:
    """Return a tensor of the same kind on the meta device, and anything else as it is."""
    if not isinstance(item, torch.Tensor):
        return item
    obstacle = obstacle_of(item)
    if obstacle is not None:
        raise StateMismatch(f"it has {obstacle[0]}")
    made = torch.empty_like(item, device="meta", requires_grad=False)
    return torch.nn.Parameter(made, item.requires_grad) if isinstance(item, torch.nn.Parameter) else made


def _wraps(module: torch.nn.Module) -> list[Wrap]:
    """Return the ways to pass a whole tensor to a module: as it is, and where parameters are distributed also as one
    that every rank has."""
    meshes: Mapping[Any, Any] = {item.device_mesh: item.device_mesh for item in module.parameters() if is_dtensor(item)}
    if len(meshes) != 1:
        return [lambda tensor: tensor]
    from torch.distributed.tensor import DTensor, Replicate

    (mesh,) = meshes

    def replicate(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor if tensor.is_meta else tensor.to(mesh.device_type)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return [replicate, lambda tensor: tensor]
