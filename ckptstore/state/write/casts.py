"""Casts of a save: which tensors are stored in a smaller dtype than they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptstore.errors import InvalidInput, InvalidState
from ckptstore.runtime.near import meant, nearest_key
from ckptstore.state.index.items import Structure
from ckptstore.state.index.part import DTYPES
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.live.patterns import fits
from ckptstore.state.tensors.overlap import PlacedTensor, conflicts_of, local_memory, overlaps_itself
from ckptstore.state.tensors.placement import dtype_and_shape, name_of
from ckptstore.state.tensors.wrapped import Wrapped

Rules = tuple[tuple[str, torch.dtype], ...]
"""The dtypes to store tensors in, each with the pattern that their keys fit."""
_WITHOUT_SIGN = ("float8_e8m0fnu", "float4_e2m1fn_x2")


def rules_of(dtype: Any) -> Rules:
    """Return the checked casts of a save, in their order. Raises InvalidInput."""
    if dtype is None:
        return ()
    if not isinstance(dtype, Mapping):
        raise InvalidInput(f"dtype is {dtype!r}, it is a dict of patterns", hint='As in {"optimizer.*": "bfloat16"}')
    for pattern in dtype:
        if not isinstance(pattern, str) or not pattern:
            raise InvalidInput(f"dtype has the pattern {pattern!r}, a pattern is text", hint='As in "optimizer.*"')
    return tuple((pattern, _target(pattern, name)) for pattern, name in dtype.items())


def _target(pattern: str, name: Any) -> torch.dtype:
    """Return the dtype of a rule. Raises InvalidInput for one that cannot hold what it is for."""
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if (
        not isinstance(found, torch.dtype)
        or not found.is_floating_point
        or name_of(found) not in DTYPES
        or name_of(found) in _WITHOUT_SIGN
    ):
        raise InvalidInput(
            f"{name!r}, for {pattern!r}, is no dtype to cast to",
            hint="Give bfloat16, float16, float32, float8_e4m3fn or float8_e5m2",
        )
    try:
        torch.zeros(1, device="cpu").to(found)
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidInput(f"torch {torch.__version__} cannot cast to {name_of(found)}: {error}") from None
    return found


def casts_of(flat: FlatState, rules: Rules) -> dict[str, torch.dtype]:
    """Return the dtypes that tensors are stored in, for the keys of tensors that are cast, tied ones included.

    The first pattern that fits any key of a tensor counts. A pattern with `*`, `?` or `[` leaves alone tensors that
    cannot be cast: whole numbers, booleans, complex ones, those as small as the target or smaller, parts of tensors
    that wrap others, and scalars, in which steps are counted. Raises InvalidState for a pattern that is the key of such
    a tensor, though scalars are cast then.
    """
    if not rules:
        return {}
    names: dict[str, list[str]] = {key: [key] for key in flat.tensors}
    for alias, first in flat.aliases.items():
        names.setdefault(first, []).append(alias)
    wrapped = tuple(f"{key}." for key, value in flat.values.items() if isinstance(value, Wrapped))
    found: dict[str, torch.dtype] = {}
    for key, entry in flat.tensors.items():
        rule = next((rule for rule in rules if any(fits(name, rule[0]) for name in names[key])), None)
        if rule is None:
            continue
        pattern, dtype = rule
        live, shape = dtype_and_shape(entry.tensor)
        reason = _obstacle(live, dtype, is_part=bool(wrapped) and key.startswith(wrapped))
        if reason and pattern in names[key]:
            raise InvalidState(f"{key} cannot be stored as {name_of(dtype)}: it {reason}", hint="Take it out of dtype")
        if not reason and (shape or pattern in names[key]):
            found |= dict.fromkeys(names[key], dtype)
    _refuse_shared(flat, found)
    return found


def _refuse_shared(flat: FlatState, found: Mapping[str, torch.dtype]) -> None:
    """Raise InvalidState for two tensors with memory in common that would come back with different numbers."""
    places = [
        PlacedTensor(key, entry.tensor, key, dtype_and_shape(entry.tensor)[0])
        for key, entry in flat.tensors.items()
        if not any(map(overlaps_itself, local_memory(entry.tensor)))
    ]
    for conflict in conflicts_of(places)[0] if found else ():
        first, second = conflict.first.place.key, conflict.second.place.key
        if found.get(first) != found.get(second):
            raise InvalidState(
                f"{first} and {second} have memory in common, and dtype casts them differently: no load could fill it",
                hint="Give a pattern that fits both",
            )


def _obstacle(live: torch.dtype, dtype: torch.dtype, *, is_part: bool) -> str:
    """Return why a tensor of a dtype cannot be stored in another one; "" if it can."""
    if is_part:
        return "is a part of a tensor that wraps others"
    if not live.is_floating_point:
        return f"is {name_of(live)}, which has no fractions to round"
    if live.itemsize <= dtype.itemsize:
        return f"is {name_of(live)}, which is no larger"
    return ""


def check_rules(rules: Rules, *structures: Structure) -> None:
    """Leader: raise InvalidInput for a pattern that fits no tensor that is cast, on any rank.

    A pattern that only fits plain values so far is accepted: an optimizer that has not stepped has no tensors yet.
    """
    if not rules:
        return
    values = {row.key for structure in structures for row in structure.rows if not row.dtype}
    keys = list(dict.fromkeys(row.key for structure in structures for row in structure.rows if row.dtype))
    cast = {row.key for structure in structures for row in structure.rows if row.live}
    for pattern, dtype in rules:
        if any(fits(key, pattern) for key in cast):
            continue
        shown = f"dtype={{{pattern!r}: {name_of(dtype)!r}}}"
        if fitting := [key for key in keys if fits(key, pattern)]:
            raise InvalidInput(
                f"{shown} casts nothing: of the {len(fitting)} tensors that it fits, such as {fitting[0]}, none is a "
                "larger floating-point tensor, or they are scalars",
                hint="Take it out of dtype",
            )
        if any(fits(key, pattern) for key in values - {pattern}):
            continue
        raise InvalidInput(
            f"{shown} fits no tensor{meant(nearest_key(pattern, keys))}",
            hint="Keys are like model.0.weight, and `*` stands for anything in them",
        )
