"""The paths of the keys of a state, as far as a checkpoint has them, and the nested state that they make."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInput
from ckptstore.format.layout import DCP_METADATA_NAME
from ckptstore.format.manifest import Manifest
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.runtime.torch_private import set_metadata
from ckptstore.state.index.key_paths import DictKey, KeyPaths, Part, Path, beginnings, key_of
from ckptstore.state.live.flatten import children
from ckptstore.state.read.stored import StoredState
from ckptstore.stock.stock_pickles import load_metadata

if TYPE_CHECKING:
    from ckptstore.stock.stock_read import StockState


def paths_of(files: CheckpointFiles, manifest: Manifest, stored: StoredState | StockState) -> KeyPaths:
    """Return the paths of keys, which the index holds, or `.metadata` of what only that describes."""
    outline = stored.index.outline if isinstance(stored, StoredState) else None
    if outline is not None and outline.paths.is_known:
        return outline.paths
    receipt = manifest.by_name.get(DCP_METADATA_NAME)
    planner = None if receipt is None else load_metadata(files.read_file(receipt)).planner_data
    return beginnings(map(tuple, planner.values())) if isinstance(planner, dict) else KeyPaths(is_known=False)


def nested(items: Mapping[Path, Any], at: Path = ()) -> Any:
    """Put items at their paths: dicts, and lists where all positions exist. `at` is where they are in the whole.

    Raises InvalidInput for an item that lies inside another one.
    """
    if () in items:
        if len(items) > 1:
            inside = key_of((*at, *max(items, key=len)))
            raise InvalidInput(f"{key_of(at)} is an item of its own, so {inside} has no place below it")
        return items[()]
    below: dict[Part, dict[Path, Any]] = {}
    for path, item in items.items():
        below.setdefault(path[0], {})[path[1:]] = item
    found = {part: nested(inner, (*at, part)) for part, inner in below.items()}
    is_list = all(type(part) is int for part in found) and sorted(found) == list(range(len(found)))
    if found and is_list:
        return [found[index] for index in range(len(found))]
    return {part.value if isinstance(part, DictKey) else part: item for part, item in found.items()}


Metadata = Callable[[], Mapping[str, Any]]
"""Returns what a module and those inside it have noted beside their items, by name."""


def nested_state(
    items: Mapping[Path, Any],
    keys: Collection[str],
    modules: Mapping[str, tuple[Path, Metadata]],
    is_included: Callable[[str], bool],
) -> Any:
    """Nest items, which have these keys, and make the dict at the path of each module what its `state_dict()` returned,
    with its metadata. A module without any item has an empty one, if its key is included."""
    bare = {
        path: dict[str, Any]()
        for key, (path, _) in modules.items()
        if is_included(key) and not any(one == key or one.startswith(f"{key}.") for one in keys)
    }
    state = nested({**items, **bare})
    for path, metadata in modules.values():
        state = _noted(state, path, metadata)
    return state


def _noted(state: Any, path: Path, metadata: Metadata) -> Any:
    """Return a state with the metadata of the module at a path, if a dict is there."""
    if not path:
        return set_metadata(OrderedDict(state), OrderedDict(metadata())) if isinstance(state, dict) else state
    part: Any = path[0].value if isinstance(path[0], DictKey) else path[0]
    inner = dict(children(state)).get(part)
    if isinstance(state, dict | list) and isinstance(inner, dict | list):
        state[part] = _noted(inner, path[1:], metadata)
    return state
