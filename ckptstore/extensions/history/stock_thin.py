"""`.metadata` of a thinned checkpoint: without some keys, and with the new places of the others."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CheckpointDamaged
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.stock.stock_pickle import MetadataPickle, StockPlace
from ckptstore.stock.stock_pickles import load_metadata
from ckptstore.stock.stock_write import stock_names, stock_tensors


@dataclass(frozen=True, slots=True)
class StockLeft:
    """The part of a `.metadata` that stays."""

    names: Mapping[str, str]
    """The names of keys for stock readers, where they are others."""
    paths: Mapping[str, Any]
    """The path of each name."""
    values: Mapping[str, StockPlace]
    """The plain values that stay, each with the place of its frame."""

    @staticmethod
    def of(data: bytes, index: TensorIndex, value_keys: Collection[str], dropped: Collection[str]) -> StockLeft | None:
        """Read the `.metadata` of a whole checkpoint with these keys of plain values. Return None if it does not name
        the tensors of the index. Raises CheckpointDamaged."""
        metadata = load_metadata(data)
        paths = metadata.planner_data
        known = metadata.state_dict_metadata.keys()
        names = stock_names({*index.tensors, *value_keys}, lambda _, names: not known.isdisjoint(names))
        tensors = (tensor for tensor in index.tensors.values() if not tensor.beside_value)
        if not isinstance(paths, dict) or any(names.get(one.key, one.key) not in known for one in tensors):
            return None
        gone = {name for key in dropped for name in (key, names.get(key, key))}
        values: dict[str, StockPlace] = {}
        for item, place in metadata.storage_data.items():
            if hasattr(metadata.state_dict_metadata.get(item.fqn), "chunks") or _is_below(item.fqn, gone):
                continue
            values[item.fqn] = (str(place.relative_path), int(place.offset), int(place.length))
        return StockLeft(names, paths, values)

    def encode(self, index: TensorIndex, moved: Callable[[StockPlace], StockPlace]) -> bytes:
        """Return the `.metadata` for the index of the thinned checkpoint; `moved` gives the new place of a frame."""
        made = MetadataPickle()

        def path_of(name: str) -> tuple[str | int, ...]:
            return tuple(self.paths.get(name, (name,)))

        for key, dtype, shape, chunks in stock_tensors(index):
            name = self.names.get(key, key)
            if name not in self.values:
                made.add_tensor(name, path_of(name), dtype, shape, chunks)
        for name, place in self.values.items():
            made.add_value(name, path_of(name), moved(place))
        return made.encode()


def _is_below(name: str, keys: Collection[str]) -> bool:
    """Return True if a name is one of these keys, or lies below one."""
    while name:
        if name in keys:
            return True
        name = name.rpartition(".")[0]
    return False


def check_frame(data: bytes | memoryview, *, file: str) -> None:
    """Raise CheckpointDamaged if the frame of a plain value is not what was written."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
        damaged = str(error)
    if damaged is not None:
        raise CheckpointDamaged(f"{file} is damaged where a plain value lies: {damaged}", file=file)
