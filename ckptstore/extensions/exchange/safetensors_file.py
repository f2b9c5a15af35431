"""The safetensors format: the length of a JSON header, the header, the tensors' bytes; and the files of a model, with
the names that Hugging Face libraries look for. Pure, but for `read_header`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptstore.errors import CheckpointDamaged, InvalidInput, InvalidState
from ckptstore.extensions.exchange.safetensors import METADATA, SINGLE_NAME, Located, headed, header_bytes, parse_header
from ckptstore.extensions.exchange.selection import Selection
from ckptstore.extensions.exchange.streaming import ReadableState
from ckptstore.state.index.part import DTYPES, total_bytes
from ckptstore.state.read.read_plan import grouped

NAMES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
"""Maps torch's names of dtypes to those of the format. Its F4 is not one of them: it counts elements, and torch pairs
of them."""
_NO_TEXT = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which UTF-8 does not have."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


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
        raise InvalidState(
            f"An export to safetensors has no place for {shown}", hint="Leave them out with include, or use torch"
        )
    for entry in entries:
        if entry.name == METADATA or _NO_TEXT.search(entry.name):
            raise InvalidState(f"a tensor cannot be called {entry.name!r} in safetensors")


def header(entries: Sequence[SafetensorsEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the tensors, which follow in this order."""
    located = {entry.name: Located(NAMES[entry.dtype], entry.shape, 0, entry.size_bytes) for entry in entries}
    return headed(located, metadata)[0]


def read_header(path: Path) -> tuple[list[SafetensorsEntry], dict[str, str]]:
    """Read the tensors of a file, in their order, and its metadata.

    Raises CheckpointDamaged when it is torn or not in the format, InvalidInput for a dtype that torch lacks.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        data = start + file.read(header_bytes(start, str(path)) - len(start))
    found = parse_header(data, str(path), size_bytes=size_bytes)
    entries = [_entry(name, tensor, path) for name, tensor in found.tensors.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size_bytes))
    at = found.size_bytes
    for entry in entries:
        if entry.offset != at:
            raise _not_whole(path, f"{entry.name} begins at byte {entry.offset}, not {at}")
        at += entry.size_bytes
    if at != size_bytes:
        raise _not_whole(path, f"{size_bytes} bytes, the header says {at}")
    return entries, dict(found.metadata)


def _entry(name: str, tensor: Located, path: Path) -> SafetensorsEntry:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidInput(f"{name} in {path} has the dtype {tensor.dtype}, which imports do not read")
    if tensor.size_bytes != total_bytes(dtype, tensor.shape):
        elements = prod(tensor.shape)
        raise _not_whole(
            path, f"{name} has {tensor.size_bytes} bytes for {dtype} {list(tensor.shape)}, {elements} elements"
        )
    return SafetensorsEntry(name, dtype, tensor.shape, tensor.offset)


def _not_whole(path: Path, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} is not a whole safetensors file: {why}", file=str(path))


LaidOut = tuple[str, tuple[SafetensorsEntry, ...]]
"""A file's name and tensors."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of each file."""

    files: tuple[LaidOut, ...]
    keys: dict[str, str]
    """Maps names of tensors to their keys in the checkpoint."""
    tied: dict[str, str]
    """Maps each omitted name to the name that has its values."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.size_bytes for _, entries in self.files for entry in entries)

    def head(self, file: LaidOut) -> bytes:
        """Return the bytes before the tensors in one of the files."""
        names = {entry.name for entry in file[1]}
        tied = {other: name for other, name in self.tied.items() if name in names}
        return header(file[1], {"format": "pt", **tied})

    def digest(self, identity: bytes) -> str:
        """Return a digest that distinguishes this layout, and the identity of the bytes, from every other one."""
        hasher = hashlib.sha256(identity)
        for file in self.files:
            head = self.head(file)
            hasher.update(b"%d %s %d " % (len(file[0]), file[0].encode(), len(head)))
            hasher.update(head)
        return hasher.hexdigest()

    def index(self) -> bytes:
        """Return the index of several files."""
        weights = {entry.name: name for name, entries in self.files for entry in entries}
        metadata = {"total_size": self.size_bytes, **self.tied}
        return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weights.items()))}, indent=2).encode()


def check_shard_size(shard_size_bytes: int) -> None:
    """Raise InvalidInput unless a file can have that size."""
    if type(shard_size_bytes) is not int or shard_size_bytes <= 0:
        raise InvalidInput(f"shard_size_bytes is {shard_size_bytes!r}, it is a whole number of at least 1")


def lay_out(stored: ReadableState, selection: Selection, *, shard_size_bytes: int) -> Layout:
    """Deal the tensors to files of at most so many bytes; a larger tensor has a file of its own.

    Raises InvalidState for tensors that the format cannot hold, InvalidInput when there is no tensor.
    """
    groups: dict[str, list[str]] = {}
    for key, source in selection.sources.items():
        groups.setdefault(source, []).append(selection.name_of(key))
    keys: dict[str, str] = {}
    tied: dict[str, str] = {}
    for source, names in groups.items():
        # Of tied weights the input embedding: transformers makes the output head from it, not the reverse.
        chosen = min(names, key=lambda name: ("embed" not in name and "wte" not in name, name))
        keys[chosen] = source
        tied.update((name, chosen) for name in names if name != chosen)
    if not keys:
        raise InvalidInput("There is no tensor to export")
    entries = [
        SafetensorsEntry(name, stored.entry(source).dtype, tuple(stored.entry(source).shape))
        for name, source in sorted(keys.items())
    ]
    check_storable(entries)
    # Large elements first, so that every tensor begins at a multiple of its element size.
    dealt = [
        tuple(sorted(group, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name)))
        for group in grouped(entries, lambda entry: entry.size_bytes, shard_size_bytes)
    ]
    count = len(dealt)
    names_of_files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return Layout(tuple(zip([SINGLE_NAME] if count == 1 else names_of_files, dealt, strict=True)), keys, tied)
