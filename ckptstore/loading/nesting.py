"""The paths of the keys of a state, as far as a checkpoint has them, and the nested state that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptstore.dcp.stock.stock_pickles import load_metadata
from ckptstore.errors import InvalidInput
from ckptstore.format.layout import DCP_METADATA_NAME
from ckptstore.format.manifest import Manifest
from ckptstore.loading.checkpoint_files import CheckpointFiles

Path = tuple[str | int, ...]


def paths_of(files: CheckpointFiles, manifest: Manifest) -> dict[str, Path]:
    """Return the paths of keys and of their beginnings, which `.metadata` holds; empty if there is none."""
    receipt = manifest.by_name.get(DCP_METADATA_NAME)
    planner = None if receipt is None else load_metadata(files.read_file(receipt)).planner_data
    return beginnings(map(tuple, planner.values())) if isinstance(planner, dict) else {}


def beginnings(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the paths and all their beginnings by key."""
    return {".".join(map(str, path[:count])): path[:count] for path in paths for count in range(1, len(path) + 1)}


def path_of(key: str, paths: Mapping[str, Path]) -> Path:
    """Return the path of a key: the longest known beginning, and the rest as one part."""
    head, rest = key, ""
    while head and head not in paths:
        head, _, part = head.rpartition(".")
        rest = f"{part}.{rest}" if rest else part
    return (*paths.get(head, ()), rest) if rest else paths[key]


def nested(items: Mapping[Path, Any], at: Path = ()) -> Any:
    """Put items at their paths: dicts, and lists where all positions exist. `at` is where they are in the whole.

    Raises InvalidInput for an item that lies inside another one.
    """
    if () in items:
        if len(items) > 1:
            inside = ".".join(map(str, (*at, *max(items, key=len))))
            raise InvalidInput(f"{'.'.join(map(str, at))} is an item of its own, so {inside} has no place below it")
        return items[()]
    below: dict[str | int, dict[Path, Any]] = {}
    for path, item in items.items():
        below.setdefault(path[0], {})[path[1:]] = item
    found = {part: nested(inner, (*at, part)) for part, inner in below.items()}
    is_list = all(type(part) is int for part in found) and sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))] if found and is_list else found
