"""Bytes made hostile: mutations of valid samples, chosen by a seed. Pure; the same seed gives the same bytes."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

_RAW = "\x00raw%d\x00"
_DEEP = 100_000
_MOST_BYTES = 2 << 20
_TEXTS = [
    "",
    "x",
    "\0",
    "..",
    "/etc/passwd",
    "a/../../b",
    "é",
    "e\u0301",
    "\u202egnp",
    "\ud800",
    "\U0001f600",
    "٣",
    "9" * 5000,
    "a" * 1_000_000,
    "a/" * 600 + "a",
    "NaN",
    "Infinity",
    "pickle",
    "$t",
]
_NUMBER_TEXTS = [
    "1-9999999999",
    "1-999999999",
    "5*9999999999",
    "1*99999999",
    "9-1",
    "1-2-3",
    "1-9/0",
    "-1",
    "1--1",
    " ",
    "1  2",
    "٣",
    "3-٩",
    "1*0",
    "z",
    "z====",
    "z" + base64.b64encode(zlib.compress(bytes(50_000_000), 9)).decode(),
    "z" + base64.b64encode(zlib.compress(b"\x02" * 5_000_000, 9)).decode(),
    "z" + base64.b64encode(zlib.compress(b"\xff" * 100_000, 9)).decode(),
    "z" + base64.b64encode(zlib.compress(b"\x02" * 100, 9)).decode()[:-6],
]
_PLAIN: list[Any] = [None, True, False, 0, -1, 1, 2, 1.5, -0.0, 10**9, 10**10, 2**31, 2**63, -(2**63), 2**64, 10**400]
_PLAIN += [1e308, -1e308, 5e-324, [], {}, [[]], [None], {"": ""}, {"version": 1}, ["a", 1], [0] * 1000]
_PLAIN += [{"$t": "float", "v": value} for value in ("NaN", "-Infinity", "x", 1, None, [])]
_VALUES: list[Any] = [
    {"$t": kind, "v": content}
    for kind in (
        *("int", "float", "complex", "tuple", "set", "frozenset", "slice", "dict", "OrderedDict", "Counter", "bytes"),
        *("defaultdict", "bytearray", "ints", "floats", "range", "Ellipsis", "date", "time", "datetime", "timedelta"),
        *("BytesIO", "numpy", "ndarray", "torch.dtype", "torch.device", "torch.Size", "tensor", "pickle", "nothing"),
    )
    for content in (None, "", "x", 1, 10**30, [], [1, 2], [[]], [[1, 2]], {}, ["<f8", [2**40], "AAAA"], ["O", "AAAA"])
]
_RAW_TEXTS = [
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" * 4400,
    "1" * 4200,
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "[" * 900 + "]" * 900,
    "[" * 300 + "]" * 300,
    '"\\ud800"',
    "tru",
    "'x'",
    "",
    "0x10",
    "[1,]",
]


def mutated(samples: Sequence[bytes], seed: str) -> bytes:
    """One of the samples, with one to four mutations."""
    chance = random.Random(seed)
    data = chance.choice(samples)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        changes = _ON_JSON if data[:1] == b"{" and chance.random() < 0.7 else _ON_BYTES
        data = chance.choice(changes)(chance, data, samples)
    return data[:_MOST_BYTES]


def _flip(chance: random.Random, data: bytes, _samples: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _truncate(chance: random.Random, data: bytes, _samples: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(data) + 1)
    return chance.choice((data[:at], data[at:]))


def _repeat(chance: random.Random, data: bytes, _samples: Sequence[bytes]) -> bytes:
    first, last = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    return data[:last] + data[first:last] * chance.choice((1, 2, 10)) + data[last:]


def _cut_out(chance: random.Random, data: bytes, _samples: Sequence[bytes]) -> bytes:
    first = chance.randrange(len(data) + 1)
    return data[:first] + data[first + chance.choice((1, 2, 4, 8, 100)) :]


def _splice(chance: random.Random, data: bytes, samples: Sequence[bytes]) -> bytes:
    other = chance.choice(samples)
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _number(chance: random.Random, data: bytes, _samples: Sequence[bytes]) -> bytes:
    """A field of a fixed width with an extreme number in it."""
    width = chance.choice((1, 2, 4, 8))
    value = chance.choice(
        (0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63)
    )
    at = chance.randrange(max(1, len(data)))
    at = chance.choice((at, at // width * width))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, chance.choice(("little", "big"))) + data[at + width :]


def _noise(chance: random.Random, data: bytes, _samples: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice((1, 3, 64, 1000))) + data[at:]


def _in_json(chance: random.Random, data: bytes, samples: Sequence[bytes]) -> bytes:
    """A value of the JSON replaced, a key taken away, doubled or added; in JSON inside of a text as well."""
    try:
        head, newline, rest = data.partition(b"\n")  # a message has a payload behind its line
        value = json.loads(head)
    except (ValueError, RecursionError):
        return _flip(chance, data, samples)
    raw: list[str] = []
    try:
        text = json.dumps(_changed(chance, value, raw), ensure_ascii=chance.random() < 0.5)
    except (ValueError, RecursionError):
        return data
    for number, replacement in enumerate(raw):
        text = text.replace(json.dumps(_RAW % number), replacement)
    return text.encode("utf-8", "surrogatepass") + newline + rest


def _changed(chance: random.Random, value: Any, raw: list[str]) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        value = dict(value)
        key = chance.choice(list(value))
        what = chance.random()
        if what < 0.1:
            del value[key]
        elif what < 0.15:
            value[chance.choice(_TEXTS)] = value[key]
        elif what < 0.2:
            raw.append(f"{json.dumps(value[key])},{json.dumps(key)}:{json.dumps(chance.choice(_PLAIN))}")
            value[key] = _RAW % (len(raw) - 1)
        elif what < 0.25:
            other = chance.choice(list(value))
            value[key], value[other] = value[other], value[key]
        else:
            value[key] = _changed(chance, value[key], raw)
        return value
    if isinstance(value, list) and value and chance.random() < 0.85:
        value = list(value)
        at = chance.randrange(len(value))
        if chance.random() < 0.2:
            value[at:at] = [value[at]] * (chance.choice((1, 3, 1000)) if isinstance(value[at], int | str | None) else 1)
        else:
            value[at] = _changed(chance, value[at], raw)
        return value
    if isinstance(value, str) and value[:1] == "{" and chance.random() < 0.8:
        return _in_json(chance, value.encode("utf-8", "surrogatepass"), [b"{}"]).decode("utf-8", "replace")
    return _replacement(chance, raw)


def _replacement(chance: random.Random, raw: list[str]) -> Any:
    kind = chance.random()
    if kind < 0.15:
        raw.append(chance.choice(_RAW_TEXTS))
        return _RAW % (len(raw) - 1)
    if kind < 0.35:
        return chance.choice(_TEXTS)
    if kind < 0.55:
        return chance.choice(_NUMBER_TEXTS)
    return chance.choice(_PLAIN if kind < 0.85 else _VALUES)


_Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
_ON_BYTES: tuple[_Change, ...] = (_flip, _flip, _truncate, _repeat, _cut_out, _splice, _number, _number, _noise)
_ON_JSON: tuple[_Change, ...] = (_in_json,)
