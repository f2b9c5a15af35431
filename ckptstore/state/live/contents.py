"""Loading of plain values, tensors on their own and Stateful objects.

A value comes back as a whole, with the containers it was saved with: a list that has grown since has its length back.
Tensors that the state has in it are filled in place, and the checkpoint must have the same ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.runtime.torch_private import metadata_of, set_metadata
from ckptstore.state.index.packed_values import is_plain
from ckptstore.state.live.alike import alike
from ckptstore.state.live.flatten import (
    Kind,
    Path,
    Replicated,
    TensorRef,
    Unit,
    children,
    find_references,
    find_tensors,
    is_loader,
    join_path,
    map_tensors,
    marked_as,
    references_in,
    stock_leaves,
    unmarked,
    with_items,
)
from ckptstore.state.live.loader_state import go_on
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.modules import blaming
from ckptstore.state.live.values import ATOMS
from ckptstore.state.tensors.overlap import local_memory, overlaps_itself
from ckptstore.state.tensors.placement import is_dtensor, is_on_meta
from ckptstore.state.tensors.tensor_memory import obstacle_of


class StoredContents:
    """The contents of a checkpoint for one place that holds tensors and plain values.

    `current` is the present value of the place. With `fixed` its tensors are the caller's own, so that the checkpoint
    must have exactly those; otherwise the checkpoint decides, and fitting tensors are filled in place.
    """

    def __init__(
        self, path: Path, current: Any, matching: Matching, *, fixed: bool, device: torch.device | None
    ) -> None:
        self._path = path
        self._key = join_path(path)
        self._current = current
        self._matching = matching
        self._fixed = fixed
        self._device = device
        self._own = {join_path(inner): leaf for inner, leaf in find_tensors(current, path)}
        self._loaded: dict[str, Any] = {}
        self._made: dict[Any, torch.Tensor] = {}
        """New tensors by what fills them: one that was at several places is one again."""
        self._is_whole = False
        self.is_skipped = self._skips()
        is_wanted = matching.includes(self._key) and self._key not in matching.saved.skipped
        if self.is_skipped:
            matching.placed(self._key)
        elif is_wanted and self._key in matching.saved.values and (self._key not in self._own or not fixed):
            self._match_whole(matching.saved.values[self._key])
        elif is_wanted and matching.source_of(self._key) is not None and not (self._own and fixed):
            self._match_tensor(self._key, self._own.get(self._key))
            self._is_whole = True
        else:
            self._match_leaves()

    @property
    def changes(self) -> bool:
        """True if anything comes from the checkpoint."""
        return bool(self._is_whole or self._loaded)

    def result(self) -> Any:
        """Return the new value of the place, once the tensors have been filled."""
        moved = self._matching.moved
        loaded = {key: marked_as(leaf, moved[key]) if key in moved else leaf for key, leaf in self._loaded.items()}
        if not self._is_whole:
            return _with_leaves(self._current, self._path, loaded)
        if self._key not in self._matching.saved.values:
            return loaded[self._key]
        return map_tensors(self._matching.saved.values[self._key], self._path, lambda key, leaf: loaded.get(key, leaf))

    def _skips(self) -> bool:
        """Return True if a part that only the checkpoint could provide is left out; then so is the whole."""
        saved = self._matching.saved
        if self._fixed and self._own:
            return False
        return not saved.skipped.isdisjoint(_places_of_references(saved.values.get(self._key), self._path))

    def _match_whole(self, saved: Any) -> None:
        keys = _places_of_references(saved, self._path)
        self._matching.placed(self._key)
        free = not self._own or not self._fixed
        complete = True
        for key in sorted(keys if free else keys | self._own.keys()):
            leaf = self._own.get(key)
            if leaf is not None and (self._fixed or self._fits(key, leaf)):
                complete &= self._take(key, leaf) and key in keys
            elif free:
                self._match_tensor(key, leaf)
            else:
                complete = False
        self._is_whole = complete
        if not complete:
            self._match_leaves(tensors=False)

    def _match_tensor(self, key: str, leaf: Any) -> None:
        """Fill the tensor at a place if it fits, else a new one."""
        if leaf is None or not self._fits(key, leaf) or not self._take(key, leaf):
            where = self._device if leaf is None or is_on_meta(unmarked(leaf)) else unmarked(leaf).device
            place = self._matching.source_of(key), where
            if place not in self._made:
                self._made[place] = self._matching.make_tensor(key, where)
            self._matching.placed(key)
            self._loaded[key] = self._made[place]

    def _match_leaves(self, *, tensors: bool = True) -> None:
        """Fill everything that has a counterpart under its own key, as in checkpoints of stock DCP, and leave the
        rest."""
        values = self._matching.saved.values
        inside: Mapping[str, Any] = values
        if self._key in values:
            leaves = stock_leaves(values[self._key], self._path)
            inside = {join_path(path): leaf for path, leaf in leaves if not isinstance(leaf, TensorRef)}
        plain = map_tensors(self._current, self._path, lambda _, leaf: unmarked(leaf))
        wanted = [join_path(path) for path, _ in stock_leaves(plain, self._path)]
        in_one_piece = _held_by(wanted, self._own)
        pieces = set(in_one_piece.values())
        for key in wanted or ([] if self._own else [self._key]):
            if not self._matching.includes(key):
                continue
            if key in inside and key not in self._matching.saved.skipped:
                self._loaded[key] = inside[key]
                self._matching.placed(key)
            elif key not in pieces:
                self._matching.miss(key, "a plain value")
        for key, leaf in self._own.items() if tensors else ():
            if in_one_piece.get(key) not in self._loaded:
                self._take(key, leaf)

    def _take(self, key: str, leaf: Any) -> bool:
        tensor = unmarked(leaf)
        if is_on_meta(tensor):
            tensor = torch.empty_like(tensor, device=self._device or default_device())
            leaf = marked_as(leaf, tensor)
        if not self._matching.take_tensor([key], tensor, may_move=not self._fixed):
            return False
        self._loaded[key] = leaf
        return True

    def _fits(self, key: str, leaf: Any) -> bool:
        """Return True if the state's tensor can take the checkpoint's. A distributed one must, since none can be
        made."""
        tensor, source = unmarked(leaf), self._matching.source_of(key)
        if obstacle_of(tensor) is not None or any(map(overlaps_itself, local_memory(tensor))):
            return False
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or source is None:
            return is_dtensor(tensor) or source is not None
        saved = self._matching.saved.tensors[source]
        return (tensor.dtype, tuple(tensor.shape)) == (saved.torch_dtype, saved.shape)


def load_value(unit: Unit, matching: Matching, *, device: torch.device | None) -> Callable[[], None]:
    """Match a tensor or plain value of the state itself. Return the function that puts the value into its place; dicts
    and lists of the same type stay the same objects, and so do tuples and other fixed containers around a value that is
    the saved one already. A value that cannot be put into its place is noted as a mismatch."""
    contents = StoredContents(unit.path, unit.item, matching, fixed=True, device=device)
    if contents.changes and unit.is_in_fixed:
        result = contents.result()
        if alike(result, unit.item):
            return lambda: None
        if not _can_assign(unit.item, result):
            try:
                unit.check_replaceable(result)
            except InvalidState as error:
                matching.refuse(unit.key, StateMismatch(f"{error.message}; use a dict in its place"))

    def finish() -> None:
        for key, state_dict in _state_dicts_in(unit.item, unit.path):
            if key in matching.saved.modules and matching.includes_below(key):  # of a module that was saved itself
                set_metadata(state_dict, OrderedDict(matching.saved.modules[key]()))
        if contents.changes:
            result = contents.result()
            if result is not unit.item and not _assigned(unit.item, result):
                unit.replace(result)

    return finish


def load_stateful(unit: Unit, matching: Matching, *, device: torch.device | None) -> Callable[[], None]:
    """Match an object with state_dict and load_state_dict, which is loaded as a whole or not at all. Return the
    function that passes it its state, and raises StateMismatch when the object refuses it."""
    if not matching.includes(unit.key):
        return lambda: None
    saved, below = matching.saved.values.get(unit.key), matching.below(unit.key)
    matching.placed(*below)
    if unit.key in matching.saved.skipped:
        return lambda: None
    if unit.key not in matching.saved.values and not below:
        matching.miss(unit.key, "an object with a state_dict")
        return lambda: None
    if unit.kind is Kind.OPTIMIZER and not unit.item.state and _is_distributed(unit.item):
        reason = "it was saved as what state_dict() returned, and has no state yet in which its parts have a place: "
        reason += "save the optimizer itself"
        matching.refuse(unit.key, StateMismatch(reason))
        return lambda: None
    # Asking some objects (data loaders) for their state starts them, so it is done only where it is needed.
    needs_current = unit.key not in matching.saved.values or bool(references_in(saved))
    with same_random_numbers():
        current = unit.item.state_dict() if needs_current else None
    contents = StoredContents(unit.path, current, matching, fixed=False, device=device)

    def finish() -> None:
        if contents.is_skipped:
            return
        state = contents.result()
        pass_state(unit, unit.item.load_state_dict, state)
        if is_loader(unit.item):
            go_on(unit.key, unit.item, state)

    return finish


def pass_state(unit: Unit, load: Callable[[Any], Any], state: Any) -> None:
    """Pass an object its state by one of its methods. Raises StateMismatch, with its key, when it refuses it."""
    what = f"the {type(unit.item).__name__} at {unit.key!r}"
    try:
        with blaming(what, StateMismatch, did="refused its state"):
            load(state)
    except StateMismatch as error:
        if error.message.startswith(what):
            raise
        raise StateMismatch(f"{what} refused its state: {error.message}", hint=error.hint) from error


def _is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    return any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"])


def default_device() -> torch.device:
    """Return the device for memory without an explicit one: torch's default device, unless that has no memory."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Leave torch's random numbers as if nothing had been drawn inside."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=device.type):
            yield


def _places_of_references(value: Any, path: Path) -> set[str]:
    """Return the keys of the places of references. A reference's own key may be that of another place."""
    return {join_path(inner) for inner, _ in find_references(value, path)}


def _held_by(wholes: Iterable[str], keys: Iterable[str]) -> dict[str, str]:
    """Return, for each key below one of some others, that other key: tensors in tuples, which stock DCP keeps in one
    piece."""
    found, present = {}, set(wholes)
    for key in keys:
        above = key.rpartition(".")[0]
        while above and above not in present:
            above = above.rpartition(".")[0]
        if above:
            found[key] = above
    return found


def _with_leaves(value: Any, path: Path, loaded: dict[str, Any]) -> Any:
    """Return the value with the leaves that were loaded; containers are copied if something in them changes."""
    key = join_path(path)
    if key in loaded:
        return loaded[key]
    if isinstance(value, torch.Tensor | Replicated):
        return value
    new = {part: _with_leaves(item, (*path, part), loaded) for part, item in children(value)}
    changed = {part: item for part, item in new.items() if item is not value[part]}
    return with_items(value, changed) if changed else value


def _state_dicts_in(value: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what modules' `state_dict()` returned, with the keys."""
    if type(value) in ATOMS or is_plain(value):
        return
    if metadata_of(value) is not None:
        yield join_path(path), value
    for part, item in children(value):
        yield from _state_dicts_in(item, (*path, part))


def _assigned(current: Any, result: Any) -> bool:
    """Replace the contents of a dict or list, in place, by those of another of the same type. Return False if that is
    not possible."""
    if not _can_assign(current, result):
        return False
    if isinstance(current, MutableMapping):
        if set(map(type, result.values())) <= ATOMS:
            items = dict(result)
        else:
            items = {part: _kept(current.get(part), item) for part, item in result.items()}
        current.clear()
        for part, item in items.items():
            current[part] = item
        if metadata_of(current) is not None or metadata_of(result) is not None:
            set_metadata(current, metadata_of(result))
        return True
    current[:] = result
    return True


def _can_assign(current: Any, result: Any) -> bool:
    return type(current) is type(result) and isinstance(current, MutableMapping | list)


def _kept(current: Any, item: Any) -> Any:
    return current if _assigned(current, item) else item
