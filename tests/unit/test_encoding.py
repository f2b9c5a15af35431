"""JSON as the format has it: everything comes back, nothing bare is written, nothing broken is believed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CheckpointDamaged, InvalidMetadata, UnsupportedVersion
from ckptstore.format.encoding import dump_json, load_json, load_object

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT.filter(lambda key: key != "$t"), inner),
    max_leaves=30,
)


@given(VALUES)
def test_every_value_comes_back_with_its_types(value: object) -> None:
    again = load_json(dump_json(value), file="a.json")
    assert repr(again) == repr(_sorted(value))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


@given(VALUES)
def test_what_is_written_is_strict_json_in_utf8(value: object) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"bare {name}")

    json.loads(dump_json(value).decode(), parse_constant=refuse)


def test_a_large_integer_is_exact() -> None:
    assert load_json(dump_json(2**100 + 1), file="a.json") == 2**100 + 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"metadata\.a\.b\[1\] is a set"),
        ({"a": b"bytes"}, r"metadata\.a is a bytes"),
        ({"a": {1: 2}}, r"metadata\.a has the key 1"),
        ({"a": {"$t": "float"}}, r"metadata\.a has the key '\$t'"),
        ({"a": object}, r"metadata\.a is a type"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(InvalidMetadata, match=path):
        dump_json(value)


@pytest.mark.parametrize("value", ["\ud800", 10**5000], ids=["lone surrogate", "huge integer"])
def test_what_could_not_be_read_again_is_not_written(value: object) -> None:
    with pytest.raises(InvalidMetadata, match="metadata"):
        dump_json({"a": value})


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(InvalidMetadata, match="refers to itself"):
        dump_json(value)


def test_bytes_that_are_not_our_json_are_damage_in_a_named_file() -> None:
    with pytest.raises(CheckpointDamaged, match=r"log/0000000001\.json") as caught:
        load_json(b'{"a": NaN}', file="log/0000000001.json")
    assert caught.value.file == "log/0000000001.json"


def test_a_newer_major_version_is_refused_with_a_hint() -> None:
    with pytest.raises(UnsupportedVersion, match=r"format version 2.*up to 1.*Upgrade ckptstore"):
        load_object(b'{"version": 2}', file="a.json")


@pytest.mark.parametrize("text", ['{"$t":"float","v":[1]}', '{"$t":"float","v":"1"}', '{"$t":"later","v":"NaN"}'])
def test_an_unknown_tag_is_left_as_it_is(text: str) -> None:
    assert load_json(text.encode(), file="a.json") == json.loads(text)
