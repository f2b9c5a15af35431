"""Scalars that JSON lacks, as JSON with a tag, and back (format-v1, "Plain values"). torch is imported only when a
value of torch is read."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.format.encoding import NON_FINITE


def _torch_dtype(name: str) -> Any:
    import torch

    prefix, _, short = name.partition(".")
    dtype = getattr(torch, short, None) if prefix == "torch" and short.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r}")
    return dtype


def _torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


def _torch_size(sizes: list[int]) -> Any:
    import torch

    return torch.Size(sizes)


def _fields_of_time(value: Any) -> list[Any]:
    zone = value.tzinfo
    if zone is not None and type(zone) is not datetime.timezone:
        raise ValueError("it has a time zone by name")
    offset = None if zone is None else zone.utcoffset(None) // datetime.timedelta(microseconds=1)
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, offset]


def _time_of_fields(fields: list[Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    *clock, fold, offset = fields
    zone = None if offset is None else datetime.timezone(datetime.timedelta(microseconds=offset))
    return tuple(clock), {"fold": fold, "tzinfo": zone}


def _decode_time(fields: list[Any]) -> datetime.time:
    clock, rest = _time_of_fields(fields)
    hour, minute, second, microsecond = clock
    return datetime.time(hour, minute, second, microsecond, **rest)


def _decode_datetime(fields: list[Any]) -> datetime.datetime:
    clock, rest = _time_of_fields(fields[3:])
    return datetime.datetime(*fields[:3], *clock, **rest)


ENCODED: Mapping[type, Callable[[Any], tuple[str, Any]]] = {
    complex: lambda value: ("complex", [value.real.hex(), value.imag.hex()]),
    range: lambda value: ("range", [hex(value.start), hex(value.stop), hex(value.step)]),
    type(...): lambda value: ("Ellipsis", None),
    datetime.date: lambda value: ("date", [value.year, value.month, value.day]),
    datetime.time: lambda value: ("time", _fields_of_time(value)),
    datetime.datetime: lambda value: ("datetime", [value.year, value.month, value.day, *_fields_of_time(value)]),
    datetime.timedelta: lambda value: ("timedelta", [value.days, value.seconds, value.microseconds]),
}
"""The function that returns the tag and the content of a value, for each type. Raises ValueError, with the reason, for
a value that cannot come back exactly."""

DECODED: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": lambda content: NON_FINITE[content],
    "complex": lambda content: complex(float.fromhex(content[0]), float.fromhex(content[1])),
    "range": lambda content: range(*(int(bound, 16) for bound in content)),
    "Ellipsis": lambda content: ...,
    "date": lambda content: datetime.date(*content),
    "time": _decode_time,
    "datetime": _decode_datetime,
    "timedelta": lambda content: datetime.timedelta(*content),
    "torch.dtype": _torch_dtype,
    "torch.device": _torch_device,
    "torch.Size": _torch_size,
}
"""The function that makes the value of a content, for each tag."""
