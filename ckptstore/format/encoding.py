"""JSON as the store format has it: UTF-8, sorted keys, no bare NaN, an integer version in every object.

A float that JSON cannot hold is `{"$t": "float", "v": "NaN" | "Infinity" | "-Infinity"}` (format-v1, "JSON").
Code that reads an object and writes it again keeps unknown fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ckptstore.errors import CheckpointDamaged, InvalidMetadata, UnsupportedVersion

FORMAT_VERSION = 1

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def float_name(value: float) -> str:
    """Return the name of a float that JSON lacks."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_ATOMS = frozenset({str, int, bool, type(None)})
"""The types that JSON holds as they are: most of a manifest, and not worth a call each."""


def _encode(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$t": "float", "v": float_name(value)}
    if isinstance(value, list | tuple):
        items = list(value)
        for index, item in enumerate(items):
            if type(item) not in _ATOMS:
                items[index] = _encode(item, f"{path}[{index}]")
        return items
    if isinstance(value, dict):
        fields = dict(value)
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidMetadata(f"{path} has the key {key!r}, and JSON keys are strings")
            if key == "$t":
                raise InvalidMetadata(f"{path} has the key '$t', which the format reserves")
            if type(item) not in _ATOMS:
                fields[key] = _encode(item, f"{path}.{key}")
        return fields
    raise InvalidMetadata(f"{path} is a {type(value).__name__}, which JSON cannot hold")


def _decode(value: dict[str, Any]) -> Any:
    if value.get("$t") == "float" and isinstance(value.get("v"), str):
        return NON_FINITE.get(value["v"], value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"bare {name}")


_dump = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False, check_circular=False
).encode


def dump_json(value: Any, *, what: str = "metadata", plain: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Encode a value of None, bool, int, float, str, lists and dicts.

    `plain` are further fields of an object, which are not checked: they must hold no float, and no key that JSON or the
    format lacks. Raises InvalidMetadata, with the path inside `value`, for anything else.
    """
    try:
        encoded = _encode(value, what)
        return _dump({**encoded, **plain} if plain else encoded).encode()
    except InvalidMetadata:
        raise
    except UnicodeEncodeError as error:
        raise InvalidMetadata(f"{what} has text that is not valid Unicode: {error}") from None
    except ValueError as error:  # an integer that Python would not read again
        raise InvalidMetadata(f"{what} cannot be written as JSON: {error}") from None
    except RecursionError:
        raise InvalidMetadata(f"{what} is nested too deeply, or refers to itself") from None


_MOST_SECONDS = 250_000_000_000.0
"""A limit for times, in the year 9892."""
_SHOWN_CHARS = 300


def shortened(text: str) -> str:
    """Return the beginning of a text of any length, for an error."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def check_seconds(value: Any) -> float:
    """Return the value if it is a time in seconds since the epoch, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_SECONDS:
        raise ValueError(f"not a time: {shortened(repr(value))}")
    return float(value)


def as_text(value: Any) -> str:
    """Return a value of JSON that is a text. Raises ValueError."""
    if type(value) is not str:
        raise ValueError(f"{shortened(repr(value))} is not text")
    return value


def as_number(value: Any, low: int = 0, below: float = math.inf) -> int:
    """Return a value of JSON that is a whole number from `low` on, below `below`. Raises ValueError."""
    if type(value) is not int or not low <= value < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise ValueError(f"{shortened(repr(value))} is not a whole number of at least {low}{limit}")
    return value


def as_list(value: Any) -> list[Any]:
    """Return a value of JSON that is a list, and not a text or an object, which can be iterated too. Raises
    ValueError."""
    if type(value) is not list:
        raise ValueError(f"{shortened(repr(value))} is not a list")
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Return a value of JSON that is an object. Raises ValueError."""
    if type(value) is not dict:
        raise ValueError(f"{shortened(repr(value))} is not an object")
    return value


_SHA256 = re.compile("[0-9a-f]{64}")


def is_sha256(value: object) -> bool:
    """Return True for the text of a SHA-256: 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of half a character: with its other half, as it should be, or without."""


def load_json(data: bytes, *, file: str) -> Any:
    """Decode the output of `dump_json`. Raises CheckpointDamaged, naming `file`, for anything that it cannot be."""
    try:
        text = str(data, "utf-8").removeprefix("\ufeff")  # a codec for that may not be readable to this user
        value = json.loads(text, object_hook=_decode, parse_constant=_refuse_constant)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # whoever carries it on could not write it
        return value
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{file} is not valid JSON: {error}", file=file) from None


def parse_json(data: str | bytes | bytearray, *, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Decode JSON as `json.loads` does. Raises ValueError, also for JSON that nests too deeply to be read."""
    try:
        return json.loads(data, object_hook=object_hook)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def load_object(data: bytes, *, file: str) -> dict[str, Any]:
    """Decode a versioned object of the format.

    Raises CheckpointDamaged when it is not one, UnsupportedVersion when its major version is unknown.
    """
    value = load_json(data, file=file)
    if not isinstance(value, dict) or type(value.get("version")) is not int or value["version"] < 1:
        raise CheckpointDamaged(f"{file} is not an object of the store format", file=file)
    if value["version"] > FORMAT_VERSION:
        found = shortened(str(value["version"]))
        raise UnsupportedVersion(
            f"{file} has format version {found}, this ckptstore reads up to {FORMAT_VERSION}",
            file=file,
            hint="Upgrade ckptstore to read it",
        )
    return value
