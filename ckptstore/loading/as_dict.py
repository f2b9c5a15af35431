"""Give a stored state back as nested dicts, without a state to load into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.errors import InvalidState
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_state import open_any
from ckptstore.loading.nesting import nested_state, paths_of
from ckptstore.runtime.near import shown
from ckptstore.state.index.key_paths import Path
from ckptstore.state.index.packed_values import is_plain
from ckptstore.state.live.flatten import children, find_references, join_path, map_tensors
from ckptstore.state.live.patterns import check_used, fitting
from ckptstore.state.read.stored import PerRank, check_per_rank, read_whole
from ckptstore.state.tensors.wrapped import Wrapped


def state_as_dict(files: CheckpointFiles, *, include: str | Sequence[str] | None, per_rank: PerRank) -> dict[str, Any]:
    """Return the nested state of a checkpoint; see `Checkpoint.to_dict`."""
    check_per_rank(per_rank)
    includes = fitting(include)
    with files.held():
        stored = open_any(files, per_rank=per_rank, wanted=includes)
        check_used(include, stored.all_keys())
        try:
            saved = stored.saved(includes)
        except InvalidState as error:  # whose hint is for a load
            hint = "Name the keys to read with include=, or load it into a state with allow_pickle=True"
            raise InvalidState(error.message, hint=hint) from None
        _refuse_wrapped(saved.values)
        references = [item for key, value in saved.values.items() for item in find_references(value, (key,))]
        places = {join_path(path) for path, _ in references}
        sources = {key: saved.aliases.get(key, key) for key in (*saved.tensors, *saved.aliases)}
        alone = [key for key in sources if includes(key) and key not in places]
        paths = paths_of(files, files.read_manifest()[0], stored)
        wanted = {sources[key] for key in (*alone, *(reference.key for _, reference in references))}
        tensors = read_whole(stored, {source: saved.tensors[source] for source in sorted(wanted)})
    items: dict[Path, Any] = {
        paths.path_of(key): map_tensors(value, (key,), lambda _, reference: tensors[sources[reference.key]])
        for key, value in saved.values.items()
    }
    items |= {paths.path_of(key): tensors[sources[key]] for key in alone}
    modules = {key: (paths.path_of(key), metadata) for key, metadata in saved.modules.items()}
    found: dict[str, Any] = nested_state(items, [*saved.values, *alone], modules, includes)
    return found


def _refuse_wrapped(values: Mapping[str, Any]) -> None:
    """Raise InvalidState for a tensor that is stored as others: no class is imported because a checkpoint names it."""
    found = {key: label for key, value in values.items() if (label := _wrapper_in(value))}
    if found:
        raise InvalidState(
            f"{shown(found)}: a {next(iter(found.values()))} is stored as the tensors it is made of, and only filled "
            "where a state has one",
            hint="Load it into a state that has one, or name the other keys with include=",
        )


def _wrapper_in(value: Any) -> str | None:
    """Return the class of a wrapped tensor in a value, None if there is none."""
    if isinstance(value, Wrapped):
        return value.label.kind
    if is_plain(value):
        return None
    return next(filter(None, (_wrapper_in(item) for _, item in children(value))), None)
