"""The header of a file of safetensors: its length, JSON, and behind it the bytes of the tensors. Pure, without torch.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ckptstore.errors import CheckpointDamaged, InvalidState
from ckptstore.format.encoding import as_list, as_number, as_text, parse_json

SUFFIX = ".safetensors"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
"""The names that Hugging Face libraries look for."""
ATTEMPT, BASE_ATTEMPT = "attempt", "base_attempt"
"""Fields of our own in the metadata of an index of published weights: its attempt, and the one it is a delta to."""
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Readers of the format refuse longer headers."""
_MAX_DIMS, _MAX_ELEMENTS = 255, 1 << 56
"""Limits that no tensor of torch exceeds; its strides overflow beyond them, even those of an empty one."""


class Located(NamedTuple):
    """A tensor in a file, or the bytes that stand for it in a delta."""

    dtype: str
    """The format's name."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file."""

    tensors: Mapping[str, Located]
    metadata: Mapping[str, str]
    size_bytes: int
    """The bytes of the header with its length; the tensors follow."""


def header_bytes(start: bytes, file: str) -> int:
    """Return how many bytes a header has with its length, from the first 8 of a file. Raises CheckpointDamaged."""
    length = int.from_bytes(start[: _LENGTH.size], "little")
    if len(start) < _LENGTH.size or length > _MAX_HEADER_BYTES:
        raise CheckpointDamaged(f"{file} is not a whole safetensors file: a header of {length} bytes", file=file)
    return _LENGTH.size + length


def parse_header(data: bytes, file: str, *, size_bytes: int) -> Header:
    """Parse the header of a file of that size, whose tensors have to lie in it. Raises CheckpointDamaged."""
    try:
        fields = parse_json(data[_LENGTH.size :])
        found = fields.pop(METADATA, None)  # null, too, is none
        metadata = {} if found is None else {key: as_text(value) for key, value in found.items()}
        tensors = {}
        for text in (*fields, *metadata, *metadata.values()):
            text.encode()  # fails for half a surrogate pair, which no file can hold
        for name, field in fields.items():
            first, last = (as_number(offset, 0, 1 << 63) for offset in as_list(field["data_offsets"]))
            shape = tuple(map(as_number, as_list(field["shape"])))
            if last < first:
                raise ValueError(f"{name} ends before it begins")
            if len(shape) > _MAX_DIMS or prod(max(1, number) for number in shape) >= _MAX_ELEMENTS:
                raise ValueError(f"{name} has a shape that cannot be")
            if len(data) + last > size_bytes:
                raise ValueError(f"{name} ends at byte {len(data) + last}, the file at {size_bytes}")
            tensors[name] = Located(as_text(field["dtype"]), shape, len(data) + first, last - first)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(f"{file} is not a whole safetensors file: {error}", file=file) from None
    return Header(tensors, metadata, len(data))


def headed(tensors: Mapping[str, Located], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Located]]:
    """Return the header of a file with these tensors in this order, and where each then lies. Raises InvalidState for
    a header that readers refuse."""
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.size_bytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise InvalidState(f"the header has {len(text)} bytes, safetensors allows {_MAX_HEADER_BYTES}")
    places, at = {}, _LENGTH.size + len(text)
    for name, tensor in tensors.items():
        places[name] = tensor._replace(offset=at)
        at += tensor.size_bytes
    return _LENGTH.pack(len(text)) + text, places
