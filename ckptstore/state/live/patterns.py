"""Patterns of keys, as callers give them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.runtime.near import meant, nearest_key
from ckptstore.state.live.matching import fits


def patterns_of(option: str, value: str | Iterable[Any] | None) -> tuple[str, ...] | None:
    """Return the patterns of an option that takes one or several, None for None, which stands for all keys.

    Raises InvalidInput for none at all and for an empty one: they fit nothing, and nobody asks for that.
    """
    if value is None:
        return None
    found = (value,) if isinstance(value, str) else tuple(value)
    if not found or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise InvalidInput(
            f"{option} is {value!r}, it must be one or several patterns of keys",
            hint='Such as "model.*"; leave it out for all keys',
        )
    return found


def check_used(patterns: Collection[str], keys: Collection[str]) -> None:
    """Raise InvalidInput for a pattern that fits no key."""
    for pattern in patterns:
        if not any(fits(key, pattern) for key in keys):
            raise InvalidInput(
                f"include={pattern!r} fits no key of the checkpoint{meant(nearest_key(pattern, keys))}",
                hint="Keys are like model.0.weight, and `*` stands for anything in them",
            )
