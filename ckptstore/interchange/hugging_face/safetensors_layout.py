"""Deal tensors to files, with the names that Hugging Face libraries look for. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptstore.errors import InvalidInput
from ckptstore.interchange.safetensors_file import SafetensorsEntry, check_storable, header
from ckptstore.interchange.selection import Selection
from ckptstore.state.index.part import DTYPES
from ckptstore.state.read.stored import StoredState

INDEX_NAME = "model.safetensors.index.json"


LaidOut = tuple[str, tuple[SafetensorsEntry, ...]]
"""A file's name and tensors."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of each file."""

    files: tuple[LaidOut, ...]
    """All files."""
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

    def digest(self, manifest: bytes) -> str:
        """Return a digest that distinguishes this layout, and the checkpoint's manifest, from every other one."""
        hasher = hashlib.sha256(manifest)
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


def lay_out(stored: StoredState, selection: Selection, *, shard_size_bytes: int) -> Layout:
    """Deal the tensors to files of at most so many bytes; a larger tensor has a file of its own.

    Raises InvalidState for tensors that the format cannot hold, InvalidInput when there is no tensor.
    """
    groups: dict[str, list[str]] = {}
    for key, source in selection.sources.items():
        groups.setdefault(source, []).append(selection.name_of(key))
    keys: dict[str, str] = {}
    tied: dict[str, str] = {}
    for source, names in groups.items():
        chosen = min(names, key=_preference)
        keys[chosen] = source
        tied.update((name, chosen) for name in names if name != chosen)
    if not keys:
        raise InvalidInput("There is no tensor to export")
    entries = [
        SafetensorsEntry(name, stored.entry(source).dtype, tuple(stored.entry(source).shape))
        for name, source in sorted(keys.items())
    ]
    check_storable(entries)
    groups_of_files = list(_dealt(entries, shard_size_bytes))
    count = len(groups_of_files)
    names_of_files = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    files = tuple((name, tuple(group)) for name, group in zip(names_of_files, groups_of_files, strict=True))
    return Layout(files, keys, tied)


def _preference(name: str) -> tuple[bool, str]:
    """Prefer the input embedding among tied weights: transformers makes the output head from it, not the reverse."""
    return "embed" not in name and "wte" not in name, name


def _dealt(entries: Sequence[SafetensorsEntry], shard_size_bytes: int) -> Iterator[list[SafetensorsEntry]]:
    group: list[SafetensorsEntry] = []
    held_bytes = 0
    for entry in entries:
        if group and held_bytes + entry.size_bytes > shard_size_bytes:
            yield _aligned(group)
            group, held_bytes = [], 0
        group.append(entry)
        held_bytes += entry.size_bytes
    yield _aligned(group)


def _aligned(group: list[SafetensorsEntry]) -> list[SafetensorsEntry]:
    """Sort large elements first, so that every tensor begins at a multiple of its element size."""
    return sorted(group, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name))
