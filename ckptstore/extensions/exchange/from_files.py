"""Read files of other tools as flat states: `torch.save`, safetensors, stock DCP. No code in them runs unless allowed.

Tensors of the first two map the file itself, and are read as they are written to the checkpoint; those of DCP are read
into memory, since they may lie in pieces.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidSource
from ckptstore.extensions.exchange.intake import Intake, is_optimizer
from ckptstore.extensions.exchange.safetensors import INDEX_NAME
from ckptstore.extensions.exchange.safetensors_file import SafetensorsEntry, read_header
from ckptstore.format.encoding import parse_json
from ckptstore.format.layout import check_name
from ckptstore.loading.nesting import nested
from ckptstore.runtime.torch_private import metadata_of
from ckptstore.state.live.flatten import FlatState, join_path
from ckptstore.state.live.optimizers import GROUPS, STATE
from ckptstore.state.read.stored import read_whole
from ckptstore.stock.stock_pickles import load_metadata
from ckptstore.stock.stock_read import StockState
from ckptstore.transfer import RangeRead

_REFUSED_CLASS = re.compile(r"GLOBAL (\w[\w.]*)")
_PART = re.compile(r"(.*-)(\d{4,})(-of-)(\d{4,})(\..*)")
"""Names of the files among which tools divide one state."""


def read_torch_file(path: Path, intake: Intake) -> FlatState:
    """Read a file of `torch.save`: a dict of any nesting, flattened to tensors and values.

    Raises FileMissing, and InvalidSource for a file that is no dict, or that `torch.load(weights_only=True)` refuses
    unless pickles are allowed.
    """
    _check_single(path, intake)
    try:
        mapped = zipfile.is_zipfile(path)
        if mapped:
            _check_stored(path)
        loaded = torch.load(path, map_location="cpu", weights_only=not intake.allow_pickle, mmap=mapped)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOVERFLOW):  # of memory that is mapped: the file is shorter than it says
            raise CheckpointDamaged(f"{path} has been cut off, or is not whole", file=path.name) from None
        raise  # of the disk
    except InvalidSource:
        raise
    except Exception as error:  # torch raises many kinds here
        raise _unreadable(path, str(error) or type(error).__name__) from None
    if not isinstance(loaded, Mapping) or not loaded or not _has_text_keys(loaded):
        raise InvalidSource(f"{path} holds a {type(loaded).__name__}, and not a dict with text as keys")
    try:
        _check_inside((), loaded, intake.allow_bytes)
        _add(intake, (), loaded)
    except RecursionError:
        raise InvalidSource(
            f"{path} holds a value that contains itself, or that is nested very deep", hint="Save it without that value"
        ) from None
    return intake.finish()


def _check_stored(path: Path) -> None:
    """Raise InvalidSource for entries that are packed: torch.save makes none, and a small one may become very large."""
    with zipfile.ZipFile(path) as archive:
        packed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise InvalidSource(
            f"{path} has packed entries, such as {packed[0].filename} of {packed[0].file_size:,} bytes",
            hint="It is no file of torch.save. If you trust it, load it, and save it again with torch.save",
        )


def _unreadable(path: Path, reason: str) -> InvalidSource:
    """Create the error for a file that `torch.load` refused, naming the classes that it needs."""
    classes = set(_REFUSED_CLASS.findall(reason))
    if classes and zipfile.is_zipfile(path):  # torch's error names the first one only
        with contextlib.suppress(Exception):
            classes |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    if not classes:
        return InvalidSource(f"{path} cannot be read: {reason.splitlines()[0]}", hint="It is no file of torch.save")
    return InvalidSource(
        f"{path} cannot be read without running code: it holds {', '.join(sorted(classes))}",
        hint="If you trust who wrote it, pass allow_pickle=True (--allow-pickle), or allow these classes alone with "
        "torch.serialization.add_safe_globals",
    )


def _add(intake: Intake, path: tuple[Any, ...], item: Any) -> None:
    if isinstance(item, torch.Tensor):
        intake.add_tensor(path, item)
    elif is_optimizer(item):
        intake.add_optimizer(path, item)
    elif isinstance(item, Mapping) and item and _has_text_keys(item):
        for part, inner in item.items():
            _add(intake, (*path, part), inner)
        if (metadata := metadata_of(item)) is not None:
            intake.add_metadata(path, item, metadata)
    elif isinstance(item, list) and any(map(is_optimizer, item)):
        for index, inner in enumerate(item):
            _add(intake, (*path, index), inner)
    else:
        intake.add_value(path, item)


def _check_inside(path: tuple[Any, ...], item: Any, allow_bytes: int) -> None:
    """Look at all tensors of a value. Raises RecursionError for one that contains itself."""
    if isinstance(item, torch.Tensor):
        _check_expanded(path, item, allow_bytes)
    elif isinstance(item, Mapping):
        for part, inner in item.items():
            _check_inside((*path, part), inner, allow_bytes)
    elif isinstance(item, list | tuple):
        for index, inner in enumerate(item):
            _check_inside((*path, index), inner, allow_bytes)


def _check_expanded(path: tuple[Any, ...], tensor: torch.Tensor, allow_bytes: int) -> None:
    """Raise InvalidSource for a large tensor whose elements share memory: a file of a few bytes may say that it has
    many GiB, all of which an import would write."""
    if tensor.layout != torch.strided or tensor.numel() * tensor.element_size() <= allow_bytes:
        return
    size_bytes, held_bytes = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    _check_size(".".join(map(str, path)), size_bytes, held_bytes, allow_bytes)


def _check_size(key: str, size_bytes: int, held_bytes: int, allow_bytes: int) -> None:
    if size_bytes > max(held_bytes, allow_bytes):
        raise InvalidSource(
            f"{key} has {size_bytes:,} bytes in {held_bytes:,} bytes of the source, for its elements share memory",
            hint=f"If that is meant, pass allow_bytes={size_bytes} (--allow-bytes {size_bytes})",
        )


def _has_text_keys(mapping: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) and key for key in mapping)


def read_safetensors(path: Path, intake: Intake) -> FlatState:
    """Read the tensors of a safetensors file, or of a directory of them, under all their names, tied ones included.

    In a directory the index decides if there is one; else all its safetensors files are read, none of which may be
    missing by their names. Raises FileMissing, InvalidSource, CheckpointDamaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for file, names in _safetensors_files(path, intake).items():
        entries, metadata = read_header(file)
        missing = names - {entry.name for entry in entries}
        if missing:
            raise CheckpointDamaged(f"{file} has no tensor {min(missing)}, the index says that it has", file=file.name)
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        for entry in entries:
            if not names or entry.name in names:
                if entry.name in tensors:
                    raise InvalidSource(f"{path} has {entry.name} in two files, and no index that says which counts")
                tensors[entry.name] = _tensor(entry, mapped)
        tied |= metadata
    tensors |= {name: tensors[source] for name, source in tied.items() if source in tensors and name not in tensors}
    if not tensors:
        raise InvalidSource(f"{path} holds no tensors")
    for name, tensor in tensors.items():
        intake.add_tensor((name,), tensor)
    return intake.finish()


def _safetensors_files(path: Path, intake: Intake) -> dict[Path, set[str]]:
    """Return the files and the wanted tensors in each; an empty set means all."""
    if not path.is_dir():
        _check_single(path, intake)
        return {path: set()}
    indexes = sorted(path.glob(f"*{INDEX_NAME.partition('.')[2]}"))
    if len(indexes) > 1:
        raise InvalidSource(f"{path} has {len(indexes)} indexes, {indexes[0].name} and {indexes[1].name}")
    if not indexes:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise InvalidSource(f"{path} has no safetensors files")
        if intake.include is None:
            _check_parts(path, files)
        return {file: set() for file in files}
    try:
        weights = parse_json(indexes[0].read_bytes())["weight_map"]
        found: dict[Path, set[str]] = {}
        for name, file in weights.items():
            found.setdefault(path / check_name(file), set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSource(f"{indexes[0]} is no index of safetensors: {error!r}") from None
    for each in found:
        _check_file(each)
    return found


def _check_parts(path: Path, files: Sequence[Path]) -> None:
    """Raise FileMissing unless all the files are there that the names of some promise."""
    present: dict[tuple[str, ...], dict[int, str]] = {}
    for file in files:
        if part := _PART.fullmatch(file.name):
            head, number, *rest = part.groups()
            present.setdefault((head, *rest), {})[int(number)] = file.name
    for (head, of, count, tail), names in present.items():
        start = min(1, *names)  # some tools begin at 0
        missing = next((number for number in range(start, start + int(count)) if number not in names), None)
        if missing is not None:
            name = f"{head}{missing:0{len(count)}}{of}{count}{tail}"
            raise FileMissing(f"{path} has {min(names.values())}, and no {name}", file=name)


def _tensor(entry: SafetensorsEntry, mapped: mmap.mmap) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.size_bytes, offset=entry.offset)
    aligned = data if entry.offset % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(entry.shape)


def _check_single(path: Path, intake: Intake) -> None:
    """Raise an error unless a file is there, and is all of a state; a pattern says that a part is meant."""
    _check_file(path)
    part = _PART.fullmatch(path.name)
    if part and int(part[4]) > 1 and intake.include is None:
        raise InvalidSource(
            f"{path} is one of {int(part[4])} files that make a state",
            hint='Take what is in this one alone with include "*"; of safetensors, give the directory of all',
        )


def _check_file(path: Path) -> None:
    if not path.exists():
        raise FileMissing(f"{path} does not exist", file=path.name)
    if not path.is_file():
        raise InvalidSource(f"{path} is not a file")


def read_dcp(
    metadata: bytes,
    read: Callable[[Sequence[RangeRead]], None],
    sizes_bytes: Mapping[str, int],
    intake: Intake,
) -> FlatState:
    """Read a stock DCP directory: tensors, and values leaf by leaf, under their keys and paths.

    Raises CheckpointDamaged, and InvalidState for values that need code to be read.
    """
    stock = StockState(load_metadata(metadata), read, "", sizes_bytes, allow_pickle=intake.allow_pickle)
    paths = {key: _path_of(stock, key) for key in stock.all_keys()}
    optimizers = [path for path in _optimizer_paths(paths.values()) if intake.wants_optimizer(path)]
    owner = {key: own for key, path in paths.items() for own in optimizers if path[: len(own)] == own}

    def wanted(key: str) -> bool:
        return key in owner or intake.wants(key)

    aliases = {key: source for key, source in stock.index.aliases.items() if wanted(key)}
    sources = {*aliases.values(), *(key for key in stock.index.tensors if wanted(key) and key not in aliases)}
    for key in sources:
        entry = stock.index.tensors[key]
        size_bytes = math.prod(entry.shape) * entry.torch_dtype.itemsize
        _check_size(key, size_bytes, sum(sizes_bytes.values()), intake.allow_bytes)
    tensors = read_whole(stock, {key: entry for key, entry in stock.index.tensors.items() if key in sources})
    of_optimizers: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {path: {} for path in optimizers}
    everything = {**tensors, **{key: tensors[source] for key, source in aliases.items()}, **stock.values(wanted)}
    for key, item in everything.items():
        if key in owner:
            of_optimizers[owner[key]][paths[key][len(owner[key]) :]] = item
        elif isinstance(item, torch.Tensor):
            intake.add_tensor(paths[key], item)
        else:
            intake.add_value(paths[key], item)
    for path, items in of_optimizers.items():
        intake.add_optimizer(path, {STATE: {}, **nested(items)})
    return intake.finish()


def _optimizer_paths(paths: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Find the optimizers whose parameters are numbers, or a list of names for each group."""
    found = set()
    for path in paths:
        match path:
            case (*above, groups, int(), "params") if groups == GROUPS:
                found.add(tuple(above))
    return sorted(found, key=join_path)


def _path_of(stock: StockState, key: str) -> tuple[Any, ...]:
    path = stock.paths.get(key, (key,))
    is_sound = all(isinstance(part, str | int) for part in path) and join_path(path) == key
    return path if is_sound else (key,)
