"""Reading of pickles of stock torch without running anything in them: `.metadata`, and the pickle in a tensor's
frame."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.layout import DCP_METADATA_NAME
from ckptstore.runtime.torch_private import REBUILDERS, SHARDED_TENSOR_METADATA
from ckptstore.state.tensors.boxes import Box, strides_of

_ALLOWED: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        }
    ),
    SHARDED_TENSOR_METADATA: frozenset({"MEM_FORMAT_ENCODING", "TensorProperties"}),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "Path"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath", "Path"}),
}  # fmt: skip

_IMMUTABLE = frozenset({"Size", "OrderedDict"})


_Unpickler = pickle._Unpickler
"""The one in Python: that in C takes 64 GiB for one opcode with a large number, which a flipped bit may make."""


class _MetadataUnpickler(_Unpickler):
    """Builds the classes of `.metadata`, dtypes and layouts. Anything else is refused before it is looked up.

    A pickle may also set attributes of the objects it refers to. So it gets subclasses and functions that are made for
    this one load, and never torch's.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._own: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._own:
            self._own[module, name] = self._made(module, name)
        return self._own[module, name]

    def _made(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            found = _join_path if module.startswith("pathlib") else super().find_class(module, name)
            if name in _IMMUTABLE:
                return found
            if isinstance(found, type) and not issubclass(found, Enum):
                return type(name, (found,), {"__module__": module})
            return lambda *given: found(*given)
        if module == "torch" and name.isidentifier():
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype | torch.layout):
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which stock DCP does not write")


def _join_path(*parts: str) -> str:
    """Return a path of another machine as text."""
    return "/".join(map(str, parts))


def load_metadata(data: bytes, *, file: str = DCP_METADATA_NAME) -> Any:
    """Return the `Metadata` of a stock checkpoint. Code in it is never run.

    Raises CheckpointDamaged when it is torn, or refers to anything that stock DCP does not write.
    """
    try:
        metadata = _MetadataUnpickler(data).load()
        tensors, storage = metadata.state_dict_metadata, metadata.storage_data
        if not isinstance(tensors, dict) or not isinstance(storage, dict):
            raise TypeError("it holds no tensors")
    except Exception as error:  # a hostile pickle may raise anything, from opcodes and from constructors
        raise CheckpointDamaged(f"{file} cannot be read: {error}. Nothing in it was run", file=file) from None
    return metadata


_DTYPE_OF_STORAGE = {
    "BFloat16Storage": "bfloat16", "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64", "DoubleStorage": "float64",
    "FloatStorage": "float32", "HalfStorage": "float16", "IntStorage": "int32", "LongStorage": "int64",
    "ShortStorage": "int16",
}  # fmt: skip


class _TensorUnpickler(_Unpickler):
    """Reads the description of a tensor in its frame, and makes no tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in REBUILDERS:
            return _told
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name.isidentifier():
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _told(
    storage: Any, offset: int, sizes: Any, strides: Any, requires_grad: Any, hooks: Any, *rest: Any
) -> tuple[Any, ...]:
    """Return dtype, offset, sizes, strides, and what else torch applies to the elements: that they are conjugated or
    negated. The dtype is that of the storage's class, or the first argument of the rest."""
    named, *marks = rest if rest and isinstance(rest[0], str) else (_DTYPE_OF_STORAGE[storage[1]], *rest)
    return named.removeprefix("torch."), offset, tuple(sizes), tuple(strides), [mark for mark in marks if mark]


def is_contiguous_frame(head: bytes, box: Box, dtype: str) -> bool:
    """Return True if a frame holds a plain tensor of that dtype whose elements lie one after another as they are."""
    try:
        start = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        found = _TensorUnpickler(io.BytesIO(head[start:])).load()
    except Exception:  # torch may be able to read it all the same
        return False
    return bool(found == (dtype, 0, box.sizes, strides_of(box.sizes), []))
