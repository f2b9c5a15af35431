"""The paths that flat keys stand for, from the containers alone."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.state.index.key_paths import DictKey, KeyPaths, beginnings, key_of, untyped

Parts = st.sampled_from(["a", "b", "a.b", "0", 0, 1, DictKey(0), DictKey(None), DictKey(True), DictKey(1.5)])
Leaves = st.sampled_from(["w", "w.x", 7])


@st.composite
def states(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Paths of which no two have the same key, and none ends where another has a container, as a save takes them."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in draw(st.lists(st.tuples(st.lists(Parts, min_size=1, max_size=3), Leaves), max_size=8)):
        whole = ("root", *path[0], path[1])
        known = {key_of(whole[:count]): whole[:count] for count in range(1, len(whole) + 1)}
        if all(found.get(key, at) == at for key, at in known.items()):
            found.update(known)
    inner = {path[:count] for path in found.values() for count in range(1, len(path))}
    return [path for path in found.values() if path not in inner]


@given(states())
def test_paths_are_found_again_and_survive_json(paths: list[tuple[Any, ...]]) -> None:
    known = KeyPaths.of(paths)
    assert KeyPaths.from_json(json.loads(json.dumps(known.to_json()))) == known
    for path in paths:
        assert known.path_of(key_of(path)) == path
        assert key_of(untyped(path)) == key_of(path)
        assert beginnings(paths).path_of(key_of(path)) == path
