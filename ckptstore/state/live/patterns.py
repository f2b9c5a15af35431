"""Patterns of keys, as callers give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptstore.errors import InvalidInput


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
