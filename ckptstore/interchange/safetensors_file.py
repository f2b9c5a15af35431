"""Write and read the safetensors format: the length of a JSON header, the header, the tensors' bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ckptstore.errors import CheckpointDamaged, InvalidInput, InvalidState
from ckptstore.state.index.part import total_bytes

NAMES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
"""Maps torch's names of dtypes to those of the format."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}

METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Readers of the format refuse longer headers."""


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor in a file."""

    name: str
    dtype: str
    """torch's name without the module."""
    shape: tuple[int, ...]
    offset: int = 0
    """From the start of the file."""

    @property
    def size_bytes(self) -> int:
        """The bytes of its elements."""
        return total_bytes(self.dtype, self.shape)


def check_storable(entries: Sequence[SafetensorsEntry]) -> None:
    """Raise InvalidState, naming the tensors, for dtypes and names that the format cannot hold."""
    bad = [f"{entry.name} ({entry.dtype})" for entry in entries if entry.dtype not in NAMES]
    if bad:
        shown = ", ".join(bad[:10]) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        raise InvalidState(f"safetensors has no such dtype: {shown}", hint="Leave them out with include, or use torch")
    if any(entry.name == METADATA for entry in entries):
        raise InvalidState(f"a tensor cannot be called {METADATA} in safetensors")


def header(entries: Sequence[SafetensorsEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the tensors, which follow in this order."""
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        end = at + entry.size_bytes
        fields[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise InvalidState(f"the header has {len(text)} bytes, safetensors allows {_MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(text)) + text


def read_header(path: Path) -> tuple[list[SafetensorsEntry], dict[str, str]]:
    """Read the tensors of a file, in their order, and its metadata.

    Raises CheckpointDamaged when it is torn or not in the format, InvalidInput for a dtype that torch lacks.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(_MAX_HEADER_BYTES, size_bytes - _LENGTH.size):
                raise ValueError(f"a header of {length} bytes")
            fields = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in fields.pop(METADATA, {}).items()}
        start = _LENGTH.size + length
        entries = [_entry(name, field, start, path) for name, field in fields.items()]
        entries.sort(key=lambda entry: (entry.offset, entry.size_bytes))
        at = start
        for entry in entries:
            if entry.offset != at:
                raise ValueError(f"{entry.name} begins at byte {entry.offset}, not {at}")
            at += entry.size_bytes
        if at != size_bytes:
            raise ValueError(f"{size_bytes} bytes, the header says {at}")
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        if isinstance(error, InvalidInput):
            raise
        raise CheckpointDamaged(f"{path} is not a whole safetensors file: {error}", file=path.name) from None
    return entries, metadata


def _entry(name: str, field: Mapping[str, Any], start: int, path: Path) -> SafetensorsEntry:
    dtype = _DTYPES.get(field["dtype"])
    if dtype is None:
        raise InvalidInput(f"{name} in {path} has the dtype {field['dtype']}, which torch has no name for")
    first, last = field["data_offsets"]
    shape = tuple(field["shape"])
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError(f"{name} has numbers that are none")
    if last - first != total_bytes(dtype, shape):
        raise ValueError(f"{name} has {last - first} bytes for {dtype} {list(shape)}, {prod(shape)} elements")
    return SafetensorsEntry(name, dtype, shape, start + first)
