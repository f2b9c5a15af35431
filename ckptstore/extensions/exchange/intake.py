"""Collect the state of an import: the wanted keys, under new names, and optimizers by the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptstore.errors import InvalidInput, InvalidSource
from ckptstore.state.live.flatten import FlatState, Kind, Path, TensorEntry, join_path, units_of
from ckptstore.state.live.modules import name_below
from ckptstore.state.live.optimizers import EMPTY_GROUPS, GROUPS, MORE, STATE, scope_of, settings_of
from ckptstore.state.live.patterns import fits, patterns_of

EXPANDED_BYTES = 64 << 20
"""The most bytes of a tensor whose elements share memory, unless the caller allows more."""

Rename = Mapping[str, str] | Callable[[str], str]
"""New keys: a mapping of old beginnings to new ones, or a function from a key to its new one."""

_ADVICE = (
    "In Python give import_state the state that you will resume, state={...} with its module and optimizer; "
    'or leave the optimizer out, for instance with include "model.*"'
)


class Renaming:
    """Renames keys, and remembers which rules matched.

    A rule applies to the old key itself and to all keys below it; the longest one counts. "" stands above all keys.
    """

    def __init__(self, rename: Any) -> None:
        """Take the `Rename` of an import, or None. Raises InvalidInput for anything else."""
        self._function: Callable[[str], Any] | None = rename if callable(rename) else None
        rules: Any = {} if rename is None or self._function else rename
        if not isinstance(rules, Mapping) or not all(isinstance(text, str) for rule in rules.items() for text in rule):
            raise InvalidInput(
                f"rename is {rename!r}, it is a mapping of text to text or a function",
                hint='Such as {"model_state_dict": "model"}',
            )
        self._rules = sorted(
            ((old.rstrip("."), new.rstrip(".")) for old, new in rules.items()), key=lambda rule: -len(rule[0])
        )
        self._unused = {old for old, _ in self._rules}

    def __call__(self, key: str) -> str:
        """Return the new key. Raises InvalidInput if it is empty or no text."""
        new = self._renamed(key)
        if not isinstance(new, str) or not new:
            what = "The source has a key without text" if new == key else f"rename makes {new!r} of the key {key!r}"
            raise InvalidInput(what, hint="A key is text that is not empty")
        return new

    def path(self, path: Path) -> Path:
        """Return the path of the new key: unchanged parts at both ends, and the text between them as one part."""
        key = join_path(path)
        new = self(key)
        if new == key:
            return path
        num_equal = next(count for count in range(len(path), -1, -1) if _starts(new, join_path(path[:count])))
        rest = new[len(join_path(path[:num_equal])) :].removeprefix(".")
        tail = next(
            first for first in range(num_equal, len(path) + 1) if _starts(rest[::-1], join_path(path[first:])[::-1])
        )
        middle = rest.removesuffix(join_path(path[tail:])).removesuffix(".")
        return (*path[:num_equal], *([middle] if middle else []), *path[tail:])

    def check_used(self) -> None:
        """Raise InvalidInput if a rule matched no key."""
        if self._unused:
            raise InvalidInput(f"No key of the source is or lies below {min(self._unused)!r}, which rename names")

    def _renamed(self, key: str) -> Any:
        if self._function is not None:
            return self._function(key)
        for old, new in self._rules:
            if not old or key == old or key.startswith(f"{old}."):
                self._unused.discard(old)
                return ".".join(filter(None, [new, key[len(old) :].removeprefix(".")]))
        return key


def _starts(text: str, beginning: str) -> bool:
    return not beginning or text == beginning or text.startswith(f"{beginning}.")


class Intake:
    """The options of an import. Readers of sources add every item, under the source's key."""

    def __init__(
        self,
        *,
        include: str | Sequence[str] | None = None,
        rename: Rename | None = None,
        state: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        allow_bytes: int = EXPANDED_BYTES,
    ) -> None:
        """Take the options of `import_state`; the optimizers of the live `state` name the numbered parameters."""
        self.include, self.state, self.allow_pickle = include, state, allow_pickle
        self.allow_bytes = allow_bytes
        self._patterns = patterns_of(include)
        self._unused = set(self._patterns or ())
        self._renaming = Renaming(rename)
        self._flat = FlatState()

    def wants(self, key: str) -> bool:
        """Return True if the import includes a key of the source."""
        if self._patterns is None:
            return True
        found = {pattern for pattern in self._patterns if fits(key, pattern)}
        self._unused -= found
        return bool(found)

    def add_tensor(self, path: Path, tensor: torch.Tensor) -> None:
        """Add a tensor of the source, if included."""
        if self.wants(join_path(path)):
            self._flat.add_tensor(self._renaming.path(path), TensorEntry(tensor))

    def add_value(self, path: Path, value: Any) -> None:
        """Add a value of the source with the tensors in it, if included."""
        if self.wants(join_path(path)):
            self._flat.add_value(self._renaming.path(path), value)

    def add_metadata(self, path: Path, names: Iterable[str], metadata: Mapping[str, Any]) -> None:
        """Add what a module of the source, whose items have these names, and those inside it have noted beside them.

        Call it when the items are added. Modules are renamed as their items are.
        """
        places: dict[str, str] = {}
        for name in names:
            key = join_path((*path, name))
            new, parts = self._renaming(key) if self.wants(key) else "", name.split(".")
            for count in range(len(parts)):
                inner, rest = ".".join(parts[:count]), ".".join(parts[count:])
                if inner in metadata and f".{new}".endswith(f".{rest}"):
                    places.setdefault(inner, new.removesuffix(rest).removesuffix("."))
        found: dict[str, dict[str, Any]] = {key: {} for key in places.values() if key}
        for inner, notes in metadata.items():
            key = places[inner] if inner in places else name_below(places, inner)
            outermost = next((above for above in found if f"{key}.".startswith(f"{above}.")), None)
            if outermost is not None:
                found[outermost][key.removeprefix(outermost).removeprefix(".")] = notes
        self._flat.modules.update((key, held) for key, held in found.items() if held)

    def wants_optimizer(self, path: Path) -> bool:
        """True if the optimizer at a path is included; as a whole, since its numbers belong together."""
        key = join_path(path)
        wanted = [self.wants(name) for name in (key, join_path((*path, STATE, "")), join_path((*path, GROUPS, "")))]
        return any(wanted)

    def add_optimizer(self, path: Path, saved: Mapping[str, Any]) -> None:
        """Add the `state_dict` of an optimizer, if included, under the names of its parameters.

        Raises InvalidSource if nothing names the numbered parameters, InvalidInput if the live optimizer has others.
        """
        if not self.wants_optimizer(path):
            return
        renamed = self._renaming.path((*path, STATE))[:-1]
        names = self._names_of(join_path(path) or "the source", join_path(renamed), saved)
        for name, item in _by_name(join_path(path), saved, names):
            if isinstance(item, torch.Tensor):
                self._flat.add_tensor((*renamed, name), TensorEntry(item))
            else:
                self._flat.add_value((*renamed, name), item)

    def finish(self) -> FlatState:
        """Return the state. Raises InvalidInput if a pattern or a rule matched nothing."""
        if self._unused:
            raise InvalidInput(
                f"include={min(self._unused)!r} fits no key of the source",
                hint="Keys are like model.0.weight, and an optimizer is taken as a whole",
            )
        self._renaming.check_used()
        return self._flat

    def _names_of(self, source: str, key: str, saved: Mapping[str, Any]) -> list[list[str]]:
        """Return the names of each group's parameters, in the saved order."""
        groups = saved[GROUPS]
        if all(_are_text(group["params"]) for group in groups):
            return [list(group["params"]) for group in groups]
        live = self._live_names(source, key)
        if live is not None:
            found, wanted = [len(group["params"]) for group in groups], [len(names) for names in live]
            if found != wanted:
                raise InvalidInput(
                    f"The optimizer at {source} has groups of {found} parameters, the state's {key} of {wanted}",
                    hint="Make the optimizer as it was made when the source was saved",
                )
            return live
        names = [group.get("param_names") for group in groups]
        if not all(_are_text(each) for each in names):
            raise InvalidSource(f"The optimizer at {source} numbers its parameters, and has no names", hint=_ADVICE)
        return [list(each or ()) for each in names]

    def _live_names(self, source: str, key: str) -> list[list[str]] | None:
        if self.state is None:
            return None
        units = units_of(self.state)
        optimizers = {unit.key: unit.item for unit in units if unit.kind is Kind.OPTIMIZER}
        if key not in optimizers:
            raise InvalidInput(
                f"The source has an optimizer that is called {key}, the state has {', '.join(optimizers) or 'none'}",
                hint=f'Give it its name in the state, such as rename={{"{source}": "optimizer"}}, or leave it out',
            )
        modules = [(unit.key, unit.item) for unit in units if unit.kind is Kind.MODULE]
        scope = scope_of(key, optimizers[key], modules)
        names = [[scope.of(parameter) for parameter in group["params"]] for group in optimizers[key].param_groups]
        if any(len(each) != 1 for group in names for each in group):
            hint = "Give the state of one process, before it is wrapped"
            raise InvalidInput(f"A parameter of the state's {key} is made of several, as FSDP1 does", hint=hint)
        return [[each[0] for each in group] for group in names]


def is_optimizer(item: Any) -> bool:
    """True if a value of a source is the `state_dict` of an optimizer."""
    if not isinstance(item, Mapping) or not {STATE, GROUPS} <= item.keys():
        return False
    groups = item[GROUPS]
    are_groups = isinstance(groups, list) and bool(groups) and all(isinstance(group, Mapping) for group in groups)
    return are_groups and isinstance(item[STATE], Mapping) and all("params" in group for group in groups)


def _are_text(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)


def _by_name(key: str, saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Iterator[tuple[str, Any]]:
    """Yield the flat contents, named as in `optimizers.collect_optimizer`."""
    name_of: dict[Any, str] = {}
    for group, group_names in zip(saved[GROUPS], names, strict=True):
        if len(group["params"]) != len(group_names):
            raise InvalidSource(f"The optimizer at {key} has {len(group_names)} names for {len(group['params'])}")
        name_of |= {str(number): name for number, name in zip(group["params"], group_names, strict=True)}
        for name in group_names:
            for item, value in settings_of(group).items():
                yield f"{GROUPS}.{name}.{item}", value
    for number, items in saved[STATE].items():
        if str(number) not in name_of or not isinstance(items, Mapping):
            raise InvalidSource(f"The optimizer at {key} has state of {number!r}, which is no parameter of its groups")
        yield from ((f"{STATE}.{name_of[str(number)]}.{name}", item) for name, item in _flattened(items))
    if empty := [settings_of(group) for group in saved[GROUPS] if not group["params"]]:
        yield EMPTY_GROUPS, empty
    if more := {name: item for name, item in saved.items() if name not in (STATE, GROUPS)}:
        yield MORE, more


def _flattened(items: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in items.items():
        if isinstance(item, Mapping) and item:
            yield from _flattened(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
