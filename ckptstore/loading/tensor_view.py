"""List the tensors of a checkpoint without reading one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptstore.format.manifest import Manifest
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_state import open_any
from ckptstore.runtime.near import meant, nearest_key
from ckptstore.state.index.tensor_index import TensorIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint, as a whole, however the ranks had divided it."""

    key: str
    dtype: str
    """torch's name, such as "bfloat16"."""
    shape: tuple[int, ...]
    size_bytes: int
    """The bytes of its elements, or of one rank's where each rank had its own."""
    ranks: tuple[int, ...]
    """The ranks that wrote parts of it."""
    files: tuple[str, ...]
    """The files that hold those parts."""
    is_per_rank: bool
    """True if each rank had its own; then dtype and shape are the lowest rank's."""
    live_dtype: str
    """The dtype that it had in the state, and has again after a load. It differs from `dtype` if the save cast it."""


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint by key, in the order of keys. The index is read on first use: one or two requests.

    Raises InvalidInput for a checkpoint without a state, CheckpointGone and CheckpointDamaged.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files

    def __getitem__(self, key: str) -> StoredTensor:
        index, manifest = self._opened
        if key not in self._sources:
            raise KeyError(f"{key}{meant(nearest_key(key, list(self._sources)))}")
        source = self._sources[key]
        entry, own = index.tensors[source], index.ranks_of(source)
        numbers = {chunk.file for rank in own or [0] for chunk in index.chunks(source, rank)}
        names = sorted(index.files[number] for number in numbers)
        return StoredTensor(
            key=key,
            dtype=entry.dtype,
            shape=entry.shape,
            size_bytes=entry.size_bytes,
            ranks=tuple(sorted({manifest.by_name[name].rank for name in names})),
            files=tuple(names),
            is_per_rank=bool(own),
            live_dtype=entry.restored.dtype,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"StoredTensors({self._files.uri!r})"

    def all_keys(self) -> list[str]:
        """Return the keys of tensors and plain values, sorted."""
        index = self._opened[0]
        return sorted({*self._sources, *index.common_values(), *index.value_ranks()})

    @cached_property
    def _opened(self) -> tuple[TensorIndex, Manifest]:
        files = self._files.alone()
        with files.held():
            return open_any(files).whole_index(), files.read_manifest()[0]

    @cached_property
    def _sources(self) -> dict[str, str]:
        """The keys of the tensors, each with the key under which its bytes lie; without the tensors of plain values."""
        index = self._opened[0]
        keys = sorted(key for key, entry in index.tensors.items() if not entry.beside_value)
        return {key: index.aliases.get(key, key) for key in keys}
