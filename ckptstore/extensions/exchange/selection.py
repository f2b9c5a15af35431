"""Select the part of a stored state to export, and name it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckptstore.errors import InvalidInput
from ckptstore.state.index.key_paths import KeyPaths, Path, key_of
from ckptstore.state.live.flatten import references_in
from ckptstore.state.live.matching import Saved
from ckptstore.state.live.patterns import check_used, fitting

Kind = Literal["safetensors", "torch", "dcp"]
"""Formats of other tools."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected tensors and values."""

    sources: Mapping[str, str]
    """Maps each tensor's key to the key under which its bytes are stored: its own, or that of a tied one."""
    values: Mapping[str, Any]
    """The plain values, with references to tensors in them."""
    strip_prefix: str
    paths: KeyPaths
    """The paths in the saved state, as far as the checkpoint has them."""
    modules: Mapping[str, Callable[[], Mapping[str, Any]]]
    """As `Saved.modules`."""
    is_included: Callable[[str], bool]

    def name_of(self, key: str) -> str:
        """Return a key's name in the export."""
        return key.removeprefix(self.strip_prefix) or key

    def path_of(self, key: str) -> Path:
        """Return the path of a key, without the prefix."""
        path = self.paths.path_of(key)
        for count in range(1, len(path)):
            if f"{key_of(path[:count])}." == self.strip_prefix:
                return path[count:]
        return path if self.name_of(key) == key else (self.name_of(key),)

    def module_at(self, key: str) -> tuple[Path, str]:
        """Return the path of a module, without the prefix, and the beginning of the names of those inside it that are
        exported: the prefix may lead into it."""
        is_inside = self.strip_prefix.startswith(f"{key}.")
        return ((), self.strip_prefix[len(key) + 1 :]) if is_inside else (self.path_of(key), "")


def select(
    saved: Saved,
    *,
    all_keys: Collection[str],
    include: str | Sequence[str] | None,
    strip_prefix: str,
    paths: KeyPaths,
) -> Selection:
    """Select the keys that fit a pattern, and the tensors in such values. `all_keys` has those of left out values too.

    Raises InvalidInput for a pattern or a prefix that fits nothing, or when two keys would have the same name.
    """
    check_used(include, {*all_keys, *saved.tensors, *saved.aliases})
    is_included = fitting(include)
    values = {key: value for key, value in saved.values.items() if is_included(key)}
    inside = {key for value in values.values() for key in references_in(value)}
    keys = [key for key in (*saved.tensors, *saved.aliases) if is_included(key) or key in inside]
    sources = {key: saved.aliases.get(key, key) for key in sorted(keys)}
    if strip_prefix and not any(key.startswith(strip_prefix) for key in (*sources, *values)):
        raise InvalidInput(f"strip_prefix={strip_prefix!r} is the beginning of no key", hint='Such as "model."')
    selection = Selection(sources, values, strip_prefix, paths, saved.modules, is_included)
    names: dict[str, str] = {}
    for key in (*sources, *values):
        name = selection.name_of(key)
        if name.startswith(".") and name != key:
            raise InvalidInput(f"{key} would be called {name!r}", hint=f"Strip {strip_prefix + '.'!r}")
        other = names.setdefault(name, key)
        if other != key:
            raise InvalidInput(f"{other} and {key} would both be called {name!r}")
    return selection
