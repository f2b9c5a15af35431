"""Export one file of `torch.save`, which `torch.load(weights_only=True)` reads without ckptstore.

Its tensors are not in memory at first: their bytes come later, one after another. Such a file is a zip archive of
stored entries: a pickle in which every tensor names the entry of its storage, the byte order, a version mark, and one
entry for each storage. Unlike a frame it has the CRC-32 of everything, so that any zip tool can check it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from ckptstore.errors import InvalidState
from ckptstore.extensions.exchange.selection import Selection
from ckptstore.extensions.exchange.streaming import close_off, stream_tensors
from ckptstore.loading.nesting import nested_state
from ckptstore.runtime.torch_private import own_safe_globals, tensor_rebuilders
from ckptstore.state.index.key_paths import Path as KeyPath
from ckptstore.state.live.flatten import map_tensors
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.boxes import strides_of

FILE_NAME = "state.pt"
ROOT = "archive"
_ALIGN_BYTES = 64
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_FIELD = b"FB"
_LARGE_BYTES = 1 << 30
_JANUARY_1980 = (1980, 1, 1, 0, 0, 0)

_HARMLESS = frozenset({int, float, str, bool, type(None)})

_LEGACY_STORAGES = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage, torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}  # fmt: skip
"""The classes that name these dtypes in files of all releases of torch; other dtypes are written out."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Stands in a value for a contiguous tensor whose bytes come later. Equal ones are one tensor in two places."""

    number: int
    """The number of its storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Storage:
    pending: Pending


class _Pickler(pickle.Pickler):
    """Pickles pending tensors as `torch.save` pickles tensors, and so the tensors that modules have noted."""

    def __init__(self, file: IO[bytes], first_number: int) -> None:
        super().__init__(file, protocol=2)
        self._first_number = first_number
        self.noted: list[tuple[Pending, bytes]] = []
        """Those of the latter, with their bytes."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            pending = Pending(self._first_number + len(self.noted), obj.dtype, tuple(obj.shape))
            self.noted.append((pending, obj.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()))
            obj = pending
        if not isinstance(obj, Pending):
            return NotImplemented
        with_class, with_dtype = tensor_rebuilders()
        place: tuple[Any, ...] = (_Storage(obj), 0, obj.shape, strides_of(obj.shape), False, OrderedDict())
        return (with_class, place) if obj.dtype in _LEGACY_STORAGES else (with_dtype, (*place, obj.dtype))

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        pending = obj.pending
        kind: Any = _LEGACY_STORAGES.get(pending.dtype)
        if kind is None:
            return "storage", torch.UntypedStorage, str(pending.number), "cpu", pending.size_bytes
        return "storage", kind, str(pending.number), "cpu", prod(pending.shape)


def _objection(value: Any) -> str | None:
    """Return why `torch.load(weights_only=True)` refuses a value without pending tensors, None if it does not."""
    if type(value) in _HARMLESS:
        return None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        with zipfile.ZipFile(buffer) as archive:
            operations = pickletools.genops(archive.read(f"{ROOT}/data.pkl"))
            needed = {str(name).replace(" ", ".") for operation, name, _ in operations if operation.name == "GLOBAL"}
    except Exception as error:  # torch and pickle raise many kinds here
        found = re.search(r"GLOBAL (\S+)", str(error))
        return f"it needs {found[1] if found else type(value).__name__}"
    refused = needed & own_safe_globals()
    return f"it needs {min(refused)}, which only this process allows" if refused else None


def write_torch_file(
    file: IO[bytes], value: Any, pending: Collection[Pending], data: Iterable[tuple[int, Any]]
) -> None:
    """Write a value, and then the bytes of each pending tensor: `data` has (number, bytes) in the order of `pending`,
    which are numbered from 0.

    Raises ValueError when the bytes do not match the tensors.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, len(pending))
    pickler.dump(value)
    data = chain(data, ((tensor.number, content) for tensor, content in pickler.noted))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr(_entry("data.pkl"), buffer.getvalue())
        archive.writestr(_entry("byteorder"), b"little")
        pieces = groupby(data, key=lambda piece: piece[0])
        for tensor in (*pending, *(noted for noted, _ in pickler.noted)):
            number, parts = next(pieces, (None, ()))
            if number != tensor.number:
                raise ValueError(f"the bytes of storage {number} came in place of {tensor.number}")
            _write_storage(archive, file, tensor, (part for _, part in parts))
        archive.writestr(_entry("version"), b"3\n")


def _write_storage(archive: zipfile.ZipFile, file: IO[bytes], tensor: Pending, parts: Iterable[Any]) -> None:
    entry = _entry(f"data/{tensor.number}")
    is_large = tensor.size_bytes >= _LARGE_BYTES
    entry.file_size = tensor.size_bytes
    header_bytes = _LOCAL_HEADER_BYTES + len(entry.filename) + is_large * _ZIP64_EXTRA_BYTES
    padding_bytes = -(file.tell() + header_bytes + 4) % _ALIGN_BYTES  # so that a mapped file has aligned tensors
    entry.extra = _PADDING_FIELD + padding_bytes.to_bytes(2, "little") + b"Z" * padding_bytes
    written = 0
    with archive.open(entry, "w", force_zip64=is_large) as stored:
        for part in parts:
            stored.write(part)
            written += len(part)
    if written != tensor.size_bytes:
        raise ValueError(f"storage {tensor.number} got {written} bytes of {tensor.size_bytes}")


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{ROOT}/{name}", date_time=_JANUARY_1980)


@dataclass(frozen=True, slots=True)
class Tree:
    """The state to write, with pending tensors."""

    state: Any
    pending: Mapping[str, Pending]
    """By stored key."""
    left_out: Mapping[str, str]
    """Maps keys of values that stock readers refuse to the reasons."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.pending.values())


def build_tree(stored: StoredState, selection: Selection) -> Tree:
    """Put tensors and values at their places in the state."""
    pending = {}
    for number, source in enumerate(dict.fromkeys(selection.sources.values())):
        entry = stored.entry(source)
        pending[source] = Pending(number, entry.torch_dtype, entry.shape)
    items: dict[KeyPath, Any] = {}
    left_out, placed = dict[str, str](), set[str]()
    for key, value in selection.values.items():
        path = selection.path_of(key)
        without_tensors, inside = _without_tensors(value, key)
        if _is_taken(without_tensors, key, left_out):
            placed |= inside
            items[path] = map_tensors(value, path, lambda _key, reference: pending[selection.sources[reference.key]])
    for key, source in selection.sources.items():
        if key not in placed:
            items[selection.path_of(key)] = pending[source]
    modules: dict[str, Any] = {}
    for key, metadata in selection.modules.items():
        path, start = selection.module_at(key)
        modules[key] = path, partial(_taken_notes, key, metadata, start, left_out)
    state = nested_state(items, [*selection.values, *selection.sources], modules, selection.is_included)
    return Tree(state, pending, left_out)


def _is_taken(value: Any, what: str, left_out: dict[str, str]) -> bool:
    """Return True if stock readers take a value, else note why they refuse it."""
    objection = _objection(value)
    if objection is not None:
        left_out[what] = objection
    return objection is None


def _taken_notes(
    key: str, metadata: Callable[[], Mapping[str, Any]], start: str, left_out: dict[str, str]
) -> dict[str, Any]:
    """Return the metadata of a module, or of those inside it whose names begin with `start`, as far as stock readers
    take it."""
    try:
        found = metadata()
    except InvalidState as error:  # of a pickle
        left_out[f"the metadata of {key}"] = error.message
        return {}
    taken, what = dict[str, Any](), f"in the metadata of {key}"
    for name, notes in found.items():
        if f"{name}.".startswith(start) and isinstance(notes, dict):  # torch can load no module that notes another type
            left = {item: note for item, note in notes.items() if _is_taken(note, f"{item} {what}", left_out)}
            taken[f"{name}."[len(start) :].removesuffix(".")] = left
    return taken


def _without_tensors(value: Any, key: str) -> tuple[Any, set[str]]:
    """Return a value with small tensors in it, and the keys of their places."""
    places: set[str] = set()

    def replace(place: str, _reference: Any) -> torch.Tensor:
        places.add(place)
        return torch.zeros(())

    return map_tensors(value, (key,), replace), places


def write_torch(stored: StoredState, tree: Tree, directory: Path, *, durable: bool) -> list[str]:
    """Write the file, and return its name. Raises CheckpointDamaged."""
    pieces = stream_tensors(stored, tree.pending)
    with (directory / FILE_NAME).open("xb") as file:
        numbered = ((tree.pending[key].number, data) for key, data in pieces)
        write_torch_file(file, tree.state, tree.pending.values(), numbered)
        close_off(file, durable=durable)
    return [FILE_NAME]
