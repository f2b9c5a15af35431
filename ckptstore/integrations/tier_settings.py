"""Read a fast tier from settings: environment variables, keys of a YAML file, options of a config.

The settings are `fast`, the path, and `fast_` with the name of another field of `FastTier`. Each integration puts its
own prefix before them, in the form of its other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.retention import Policy, parse_policy


def tier_of(settings: Mapping[str, Any], *, shown: Callable[[str], str] = str) -> FastTier | None:
    """Return the tier of the settings, None without any. A setting of None counts as absent.

    `shown` returns a setting's name for the user. Raises InvalidInput, with that name, for an unreadable value, and for
    settings of a tier without a path.
    """
    present = {name: settings[name] for name in FAST_SETTINGS if settings.get(name) is not None}
    if not present:
        return None
    if FAST not in present:
        raise InvalidInput(
            f"{shown(min(present))} is there, and {shown(FAST)} is not",
            hint=f"{shown(FAST)} is the directory for fast checkpoints, on a disk of each node",
        )
    read = {}
    for name, value in present.items():
        try:
            read[name.removeprefix(f"{FAST}_")] = _READ[name](value)
        except InvalidInput as error:
            raise InvalidInput(f"{shown(name)}: {error.message}") from error
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{shown(name)}={value!r} cannot be read: {error}") from error
    path = read.pop(FAST)
    try:
        return FastTier(path, **read)
    except InvalidInput as error:
        raise InvalidInput(f"{', '.join(map(shown, present))}: {error.message}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it must be text")
    return value


def _count(value: Any) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, str) or not value.isdecimal():
        raise ValueError("it must be a whole number")
    return int(value)


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it must be a number of bytes")
    return float(value)


def _rules(value: Any) -> Policy | None:
    """Parse rules as in `keep`: one text, or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("it must be rules such as every=1000")
    return parse_policy(texts)


FAST = "fast"
_READ: dict[str, Callable[[Any], Any]] = {
    FAST: _text,
    "fast_copies": _count,
    "fast_keep": _count,
    "fast_drain": _rules,
    "fast_drain_bytes_per_second": _rate,
    "fast_interface": _text,
    "fast_node": _text,
}
FAST_SETTINGS = tuple(_READ)
"""The names of all settings, without a prefix."""
