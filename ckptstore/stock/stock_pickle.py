"""The pickle of a `.metadata`, put together opcode by opcode.

A `Metadata` has four objects for each chunk. To make them and to pickle them one by one takes longer than all other
work for a small tensor. This module makes parts that are the same for many chunks once. The result is the same as
`pickle` writes for such objects; `pickletools` of the standard library describes each opcode.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ckptstore.state.tensors.boxes import Box, Sizes

StockPlace = tuple[str, int, int]
"""File, offset and length of a tensor or value that stock readers take in one piece."""

_PROTOCOL, _STOP, _NONE = b"\x80\x04", b".", b"N"
_TEXT, _PUT, _GET, _POP, _INT = b"X", b"r", b"j", b"0", b"J"
_DICT, _ITEMS_END = b"}(", b"u"
_LIST, _APPENDS = b"](", b"e"
_TUPLE, _TUPLE_END = b"(", b"t"
_NEW, _STATE_END = b")\x81", b"ub"
"""An object of the class that was fetched before, without arguments; the end of its fields."""
_REDUCE, _FALSE = b"\x85R", b"\x89"
"""A call with the argument that was put last."""
_number, _int = struct.Struct("<I").pack, struct.Struct("<i").pack


def _named(module: str, name: str) -> bytes:
    """Return the opcode that fetches a class or function of a module."""
    return f"c{module}\n{name}\n".encode()


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    name: _named(_METADATA, name)
    for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorStorageMetadata")
} | {"_StorageInfo": _named("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


class MetadataPickle:
    """Takes in tensors and plain values, each key once, and becomes the pickle of a `Metadata`."""

    def __init__(self) -> None:
        self._num_known = 0
        self._constants: dict[Hashable, bytes] = {}
        self._first: list[bytes] = []
        """The opcodes that are written before all others, and define the objects that later ones fetch."""
        self._items: list[bytes] = []
        self._paths: list[bytes] = []
        self._storage: list[bytes] = []
        self._tensors: dict[tuple[torch.dtype, Sizes, tuple[Box, ...]], bytes] = {}
        self._chunks: dict[tuple[int | None, Sizes | None, str, int], tuple[bytes, bytes]] = {}
        self._index = self._begun("MetadataIndex") + self._constant("fqn")
        self._value = self._class("BytesStorageMetadata") + _NEW

    def add_tensor(
        self,
        key: str,
        path: Sequence[str | int],
        dtype: torch.dtype,
        shape: Sizes,
        chunks: Sequence[tuple[Box, StockPlace]],
    ) -> None:
        """Add a tensor with the box and the frame of each of its chunks."""
        form = dtype, shape, tuple([box for box, _ in chunks])
        item = self._tensors.get(form)
        if item is None:
            item = self._tensors[form] = self._tensor(*form)
        fetched = self._add(key, path, item)
        for number, (box, (file, offset, size_bytes)) in enumerate(chunks):
            before, after = self._chunk(number, box.offsets, file, size_bytes)
            self._storage += (self._index, fetched, before, _of_int(offset), after)

    def add_value(self, key: str, path: Sequence[str | int], place: StockPlace) -> None:
        """Add a plain value that lies at that place."""
        fetched = self._add(key, path, self._value)
        file, offset, size_bytes = place
        before, after = self._chunk(None, None, file, size_bytes)
        self._storage += (self._index, fetched, before, _of_int(offset), after)

    def encode(self) -> bytes:
        """Return the pickle."""
        fields = {"state_dict_metadata": self._items, "planner_data": self._paths, "storage_data": self._storage}
        whole = [self._begun("Metadata")]
        for name, content in fields.items():
            whole += (self._constant(name), _DICT, *content, _ITEMS_END)
        whole += (self._constant("storage_meta"), _NONE, self._constant("version"), self._constant("1.0.0"), _STATE_END)
        return b"".join([_PROTOCOL, *self._first, *whole, _STOP])

    def _add(self, key: str, path: Sequence[str | int], item: bytes) -> bytes:
        """Take in the item of a key; return the opcode that fetches the key."""
        number = self._next()
        fetched = _GET + number
        self._items += (_of_text(key), _PUT, number, item)
        if len(path) == 1 and path[0] == key:
            self._paths += (fetched, _TUPLE, fetched, _TUPLE_END)
        else:
            above = [self._constant(part) if type(part) is str else _plain(part) for part in path[:-1]]
            last = path[-1]
            self._paths += (fetched, _TUPLE, *above, _of_text(last) if type(last) is str else _plain(last), _TUPLE_END)
        return fetched

    def _tensor(self, dtype: torch.dtype, shape: Sizes, boxes: Sequence[Box]) -> bytes:
        """Return a `TensorStorageMetadata`."""
        chunks = [
            self._object("ChunkStorageMetadata", offsets=self._size(box.offsets), sizes=self._size(box.sizes))
            for box in boxes
        ]
        properties = self._fetched((dtype, "properties"), lambda: _properties(dtype))
        listed = b"".join([_LIST, *chunks, _APPENDS])
        return self._object("TensorStorageMetadata", properties=properties, size=self._size(shape), chunks=listed)

    def _chunk(self, number: int | None, offsets: Sizes | None, file: str, size_bytes: int) -> tuple[bytes, bytes]:
        """Return the opcodes between the key and the offset in the place of a chunk or value, and those behind the
        offset."""
        known = number, offsets, file, size_bytes
        if known not in self._chunks:
            index = self._constant("index") + _plain(number)
            if offsets is not None:
                index += self._constant("offset") + self._size(offsets)
            begun = self._begun("_StorageInfo") + self._constant("relative_path") + self._constant(file)
            length = self._constant("length") + _of_int(size_bytes)
            self._chunks[known] = index + _STATE_END + begun + self._constant("offset"), length + _STATE_END
        return self._chunks[known]

    def _class(self, name: str) -> bytes:
        return self._fetched((name, "class"), lambda: _CLASSES[name])

    def _begun(self, kind: str) -> bytes:
        """Return a new object that waits for its fields."""
        return self._class(kind) + _NEW + _DICT

    def _object(self, kind: str, **fields: bytes) -> bytes:
        """Return an object with these fields."""
        named = [self._constant(name) + value for name, value in fields.items()]
        return b"".join([self._begun(kind), *named, _STATE_END])

    def _size(self, sizes: Sizes) -> bytes:
        return self._constant((sizes, "size"), torch.Size(sizes))

    def _constant(self, name: Hashable, value: Any = None) -> bytes:
        """Return the opcode that fetches a shared value: `value`, or the text that is its own name."""
        return self._fetched(name, lambda: _plain(name if value is None else value))

    def _fetched(self, name: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return the opcode that fetches the output of `make`, which is written once."""
        found = self._constants.get(name)
        if found is None:
            number = self._next()
            self._first += (make(), _PUT, number, _POP)
            found = self._constants[name] = _GET + number
        return found

    def _next(self) -> bytes:
        self._num_known += 1
        return _number(self._num_known - 1)


def _properties(dtype: torch.dtype) -> bytes:
    """Return a `TensorProperties` with the defaults of all fields but the dtype."""
    layout = [_named("torch.serialization", "_get_layout"), _of_text("torch.strided"), _REDUCE]
    memory_format = [_named(_METADATA, "_MEM_FORMAT_ENCODING"), _plain(0), _REDUCE]
    state = b"".join([_TUPLE, _plain(dtype), *layout, _FALSE, *memory_format, _FALSE, _TUPLE_END])
    return b"".join([_named(_METADATA, "TensorProperties"), _NEW, state, b"b"])


def _of_text(value: str) -> bytes:
    text = value.encode("utf-8", "surrogatepass")
    return b"".join([_TEXT, _number(len(text)), text])


def _of_int(value: int) -> bytes:
    return _INT + _int(value) if value < 1 << 31 else _plain(value)


def _plain(value: Any) -> bytes:
    """Return the opcodes of a value that is not referred to from elsewhere."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2, fix_imports=False)
    pickler.fast = True  # it numbers nothing
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
