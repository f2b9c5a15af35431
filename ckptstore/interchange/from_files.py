"""Files of other tools as flat states: `torch.save`, safetensors, stock DCP. Nothing in them is ever run.

Tensors of the first two are the mapped file itself, read as they are written to the checkpoint; those of DCP are read
into memory, since they may lie in pieces.
"""

from __future__ import annotations

import json
import mmap
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidSource
from ckptstore.format.layout import check_name
from ckptstore.interchange.safetensors_file import SafetensorsEntry, read_header
from ckptstore.interchange.to_safetensors import INDEX_NAME
from ckptstore.state.live.flatten import FlatState, TensorEntry, join_path
from ckptstore.state.read.stock_read import StockState, load_metadata
from ckptstore.transfer import RangeRead


def read_torch_file(path: Path) -> FlatState:
    """The state in a file of `torch.save`: a dict, nested as you like, which falls apart down to tensors and values.

    Raises FileMissing, InvalidSource for what `torch.load(weights_only=True)` refuses or what is no dict.
    """
    _check_file(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidSource(
            f"{path} cannot be read: {reason}", hint="It must load with torch.load(path, weights_only=True)"
        ) from None
    if not isinstance(loaded, Mapping) or not loaded or not _has_text_keys(loaded):
        raise InvalidSource(f"{path} holds a {type(loaded).__name__}, and not a dict with text as keys")
    flat = FlatState()
    _add(flat, (), loaded)
    return flat


def _add(flat: FlatState, path: tuple[Any, ...], item: Any) -> None:
    if isinstance(item, torch.Tensor):
        flat.add_tensor(path, TensorEntry(item))
    elif isinstance(item, Mapping) and item and _has_text_keys(item):
        for part, inner in item.items():
            _add(flat, (*path, part), inner)
    else:
        flat.add_value(path, item)


def _has_text_keys(mapping: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) and key for key in mapping)


def read_safetensors(path: Path) -> FlatState:
    """The tensors of a safetensors file, or of a directory of them, under their names; tied ones under all of theirs.

    In a directory an index counts, where there is one; else all its safetensors files. Raises FileMissing,
    InvalidSource, CheckpointDamaged.
    """
    flat = FlatState()
    tied: dict[str, str] = {}
    for file, names in _safetensors_files(path).items():
        entries, metadata = read_header(file)
        missing = names - {entry.name for entry in entries}
        if missing:
            raise CheckpointDamaged(f"{file} has no tensor {min(missing)}, the index says that it has", file=file.name)
        mapped = _mapped(file)
        for entry in entries:
            if not names or entry.name in names:
                flat.add_tensor((entry.name,), TensorEntry(_tensor(entry, mapped)))
        tied |= metadata
    for name, kept in tied.items():
        if kept in flat.tensors and name not in flat.paths:
            flat.add_tensor((name,), flat.tensors[kept])
    if not flat.tensors:
        raise InvalidSource(f"{path} holds no tensors")
    return flat


def _safetensors_files(path: Path) -> dict[Path, set[str]]:
    """The files, and which of their tensors count; all where there is no index."""
    if not path.is_dir():
        _check_file(path)
        return {path: set()}
    indexes = sorted(path.glob(f"*{INDEX_NAME.partition('.')[2]}"))
    if len(indexes) > 1:
        raise InvalidSource(f"{path} has {len(indexes)} indexes, {indexes[0].name} and {indexes[1].name}")
    if not indexes:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise InvalidSource(f"{path} has no safetensors files")
        return {file: set() for file in files}
    try:
        weights = json.loads(indexes[0].read_bytes())["weight_map"]
        found: dict[Path, set[str]] = {}
        for name, file in weights.items():
            found.setdefault(path / check_name(file), set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSource(f"{indexes[0]} is no index of safetensors: {error!r}") from None
    for each in found:
        _check_file(each)
    return found


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def _tensor(entry: SafetensorsEntry, mapped: mmap.mmap) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.size_bytes, offset=entry.offset)
    aligned = data if entry.offset % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(entry.shape)


def _check_file(path: Path) -> None:
    if not path.exists():
        raise FileMissing(f"{path} does not exist", file=path.name)
    if not path.is_file():
        raise InvalidSource(f"{path} is not a file")


def read_dcp(metadata: bytes, read: Callable[[Sequence[RangeRead]], None], sizes_bytes: Mapping[str, int]) -> FlatState:
    """The state of a stock DCP directory: tensors, and values leaf by leaf, under their keys and paths.

    Raises CheckpointDamaged, InvalidState for values that need code to be read.
    """
    stock = StockState(load_metadata(metadata), read, "", sizes_bytes)
    flat = FlatState()
    aliases = stock.index.aliases
    tensors = {
        key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for key, entry in stock.index.tensors.items()
        if key not in aliases
    }
    stock.fill({key: (tensor, key) for key, tensor in tensors.items()})
    for key, tensor in tensors.items():
        flat.add_tensor(_path_of(stock, key), TensorEntry(tensor))
    for key, source in aliases.items():
        flat.add_tensor(_path_of(stock, key), flat.tensors[source])
    for key, value in stock.values().items():
        flat.add_value(_path_of(stock, key), value)
    return flat


def _path_of(stock: StockState, key: str) -> tuple[Any, ...]:
    path = stock.paths.get(key, (key,))
    is_sound = all(isinstance(part, str | int) for part in path) and join_path(path) == key
    return path if is_sound else (key,)
