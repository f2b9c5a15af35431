"""Digests of a few samples of a data set, so that another one of the same length is noticed.

Only memory is looked at: lists, arrays and tensors with an entry for each sample. No code of the data set runs, since
samples may be augmented at random, count how often they were read, or open files that workers must not share.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

logger = logging.getLogger("ckptstore")

_NUM_SAMPLES = 16
_MOST_ITEMS = 64
"""Entries of a sample that are looked at."""
_DEEPEST = 4
"""Data sets in data sets, and lists in samples."""
_COLUMNS = (list, tuple, range, torch.Tensor, np.ndarray, np.memmap)

Column = Callable[[int], Any]
"""Gives what a data set holds for one sample."""


def digests_of(dataset: Any) -> dict[str, str]:
    """Return the digest of a few entries of each column of a data set; nothing for one with its samples elsewhere.

    The same data gives the same digests in another process, and on another machine: paths count by their last part.
    """
    try:
        size = len(dataset)
    except Exception:  # a data set without a length, of any kind
        return {}
    last = max(1, _NUM_SAMPLES - 1)
    positions = sorted({(size - 1) * number // last for number in range(_NUM_SAMPLES)}) if size else []
    found = {}
    for name, column in _columns_of(dataset, size, _DEEPEST):
        entries = [_plain(column(position), _DEEPEST) for position in positions]
        if entries and None not in entries:
            found[name] = sha256("\n".join(map(str, entries)).encode()).hexdigest()[:16]
    return found


def warn_of_other_data(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warn if no column that was saved holds what it holds now. One that agrees is enough: others may be drawn anew in
    each process, such as the numbers of an augmentation."""
    both = saved.keys() & now.keys()
    if both and all(saved[name] != now[name] for name in both):
        logger.warning(
            "the data set of a loader holds other samples than when it was saved, though it has as many: its position "
            "stands for samples that this run has not seen, and others are left out. Give the loader the data set of "
            "the save; or begin the epoch anew: leave the loader out of the load with include="
        )


def _columns_of(dataset: Any, size: int, depth: int) -> Iterator[tuple[str, Column]]:
    """Yield what has an entry for each sample, with its name."""
    if type(dataset) in _COLUMNS:
        yield "", dataset.__getitem__
    elif isinstance(dataset, TensorDataset):
        for number, tensor in enumerate(dataset.tensors):
            yield str(number), tensor.__getitem__
    elif depth and type(dataset) is Subset:
        for name, column in _columns_of(dataset.dataset, len(dataset.dataset), depth - 1):  # type: ignore[arg-type]
            yield name, partial(_at_index, dataset.indices, column)
    elif depth and type(dataset) is ConcatDataset:
        parts = [dict(_columns_of(part, len(part), depth - 1)) for part in dataset.datasets]  # type: ignore[arg-type]
        for name in parts[0].keys() if all(part.keys() == parts[0].keys() for part in parts) else ():
            yield name, partial(_of_part, dataset.cumulative_sizes, parts, name)
    elif depth:
        yield from _attributes_of(dataset, size, depth)


def _attributes_of(dataset: Any, size: int, depth: int) -> Iterator[tuple[str, Column]]:
    for name, item in sorted(getattr(dataset, "__dict__", {}).items()):
        if type(item) in _COLUMNS and _length_of(item) == size:
            yield name, item.__getitem__
        elif isinstance(item, Dataset) and hasattr(item, "__len__") and len(item) == size:
            for inner, column in _columns_of(item, size, depth - 1):
                yield f"{name}.{inner}", column


def _length_of(column: Any) -> int:
    if isinstance(column, torch.Tensor | np.ndarray):
        return column.shape[0] if column.ndim else 0
    return len(column)


def _at_index(indices: Sequence[int], column: Column, position: int) -> Any:
    return column(int(indices[position]))


def _of_part(ends: list[int], parts: list[dict[str, Column]], name: str, position: int) -> Any:
    part = bisect_right(ends, position)
    return parts[part][name](position - (ends[part - 1] if part else 0))


def _plain(value: Any, depth: int) -> str | None:
    """Return a value as text; None if it is no plain one, or holds one that is not."""
    if value is None or isinstance(value, bool | int | float | complex | bytes | np.generic):
        return repr(value)[:1000]
    if isinstance(value, PurePath):
        return repr(value.name)
    if isinstance(value, str):  # a job may have its data at another place, and addresses may be signed anew
        return repr(re.split(r"[/\\]", value.split("?")[0] if "://" in value else value)[-1][:1000])
    if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type != "meta":
        value = value.detach().flatten()[:_MOST_ITEMS].cpu()
        return repr((value.dtype, value.tolist()))
    if type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
        return repr((value.dtype.str, value.shape, value.ravel()[:_MOST_ITEMS].tolist()))
    if not depth:
        return None
    items = list(value.items()) if type(value) is dict else value
    if type(items) not in (list, tuple):
        return None
    inner = [_plain(item, depth - 1) for item in items[:_MOST_ITEMS]]
    return None if None in inner else repr(inner)
