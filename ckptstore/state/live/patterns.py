"""Patterns of keys, as callers give them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.runtime.near import meant, nearest_key

Include = str | Iterable[Any] | None
"""One or several patterns, or None for all keys."""


def fits(key: str, pattern: str) -> bool:
    """Return True if a pattern matches a key, or everything below it."""
    return fnmatchcase(key, pattern) or fnmatchcase(f"{key}.", pattern)


def patterns_of(include: Include, *, name: str = "include") -> tuple[str, ...] | None:
    """Return the patterns, None for None. Raises InvalidInput for none at all and for an empty one: they fit nothing,
    and nobody asks for that. `name` is that of the argument."""
    if include is None:
        return None
    patterns: Any = include
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else ()
    if not found or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise InvalidInput(
            f"{name} is {include!r}, it must be one or several patterns of keys",
            hint=f'Such as "model.*"{"; leave it out for all keys" if name == "include" else ""}',
        )
    return found


def fitting(include: Include) -> Callable[[str], bool]:
    """Return a function that is True for keys that fit a pattern: themselves, or everything below them. `*` crosses
    dots. Raises InvalidInput as `patterns_of` does."""
    patterns = patterns_of(include)
    return lambda key: patterns is None or any(fits(key, pattern) for pattern in patterns)


def check_used(include: Include, keys: Collection[str], *, name: str = "include") -> None:
    """Raise InvalidInput for a pattern that fits no key. `name` is that of the argument."""
    for pattern in patterns_of(include) or ():
        if not any(fits(key, pattern) for key in keys):
            raise InvalidInput(
                f"{name}={pattern!r} fits no key of the checkpoint{meant(nearest_key(pattern, keys))}",
                hint="Keys are like model.0.weight, and `*` stands for anything in them",
            )
