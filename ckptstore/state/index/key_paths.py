"""The paths in a state that its flat keys stand for: `a.b.c` may be one name, or three. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple

from ckptstore.format.encoding import as_list, as_number


class DictKey(NamedTuple):
    """A part of a path that is the key of a dict and no text. As text it is as the key itself."""

    value: bool | int | float | None

    def __str__(self) -> str:
        return str(self.value)


Part = str | int | DictKey
"""A key of a dict, or a position in a list."""
Path = tuple[Part, ...]


def key_of(path: Sequence[Any]) -> str:
    """Return the flat key of a path."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True)
class KeyPaths:
    """The containers of a state: dicts and lists, modules, optimizers.

    The path of a key is that of the longest container whose key it begins with, and the rest as one part.
    """

    containers: Mapping[str, Path] = field(default_factory=dict)
    """The paths of containers by their keys."""
    is_known: bool = True
    """False for a checkpoint that does not tell its paths: then each key is one part."""

    @staticmethod
    def of(paths: Iterable[Path]) -> KeyPaths:
        """Return the containers on these paths, which lead to values and tensors, and paths that end with no text."""
        found: set[Path] = set()
        for path in paths:
            if type(path[-1]) is not str:
                found.add(path)
            while len(path) > 1 and (path := path[:-1]) not in found:
                found.add(path)
        return KeyPaths({key_of(path): path for path in sorted(found, key=key_of)})

    @staticmethod
    def joined(every: Iterable[KeyPaths]) -> KeyPaths:
        """Return the containers of several ranks; of two with the same key that of the first."""
        containers: dict[str, Path] = {}
        for one in every:
            containers = {**one.containers, **containers}
        return KeyPaths(dict(sorted(containers.items())))

    def path_of(self, key: str) -> Path:
        """Return the path of a key."""
        head, rest = key, ""
        while head and head not in self.containers:
            head, _, part = head.rpartition(".")
            rest = f"{part}.{rest}" if rest else part
        above = self.containers.get(head, ())
        return (*above, rest) if rest else above

    def to_json(self) -> list[Any]:
        """Return a list of its parts for each container. A key that is no text is a list of one."""
        return [[_to_json(part) for part in path] for path in self.containers.values()]

    @staticmethod
    def from_json(rows: Any) -> KeyPaths:
        """Read the output of `to_json`. Raises ValueError or TypeError for anything else."""
        paths = [tuple(map(_from_json, as_list(row))) for row in as_list(rows)]
        if not all(paths):
            raise ValueError("a container has no path")
        return KeyPaths({key_of(path): path for path in paths})


def beginnings(paths: Iterable[Path]) -> KeyPaths:
    """Return the paths of stock DCP's metadata, and all their beginnings, as containers."""
    found = (path[:count] for path in paths for count in range(1, len(path) + 1))
    return KeyPaths({key_of(path): path for path in found})


def untyped(path: Path) -> tuple[str | int, ...]:
    """Return a path as torch's DCP has it, where each key of a dict is text."""
    return tuple(str(part) if isinstance(part, DictKey) else part for part in path)


def typed(path: Sequence[Any], containers: Sequence[Any]) -> Path:
    """Return a path with its keys of dicts that are no text marked as such. `containers` are those of its parts.

    A key that is no number, no bool and not None becomes text. A number of a class of its own, such as numpy's, becomes
    Python's own.
    """
    return tuple(
        part if type(part) is str or (type(part) is int and not isinstance(container, Mapping)) else _dict_key(part)
        for part, container in zip(path, containers, strict=True)
    )


def _dict_key(key: Any) -> Part:
    value = key.item() if isinstance(key, Number) and hasattr(key, "item") else key
    if isinstance(value, int) and type(value) is not bool:
        value = int(value)
    is_plain = type(value) in (bool, int, float, type(None))
    return DictKey(value) if is_plain and str(value) == str(key) else str(key)  # by which loads find it


def _to_json(part: Part) -> Any:
    return [part.value] if isinstance(part, DictKey) else part


def _from_json(value: Any) -> Part:
    if type(value) is str:
        return value
    if type(value) is int:
        return as_number(value)
    if type(value) is list and len(value) == 1 and type(value[0]) in (bool, int, float, type(None)):
        return DictKey(value[0])
    raise ValueError(f"{value!r} is no part of a path")
