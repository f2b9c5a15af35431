"""The manifest: what is written comes back, what was tampered with or torn is refused and named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidName, UnsupportedVersion
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt, check_collisions
from ckptstore.format.manifest import Manifest, Receipt, sorted_receipts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PART = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\."), min_size=1, max_size=8)
NAME = st.lists(PART, min_size=1, max_size=3).map("/".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(lambda key: key != "$t"), inner),
    max_leaves=8,
)
RECEIPT = st.builds(
    Receipt,
    name=NAME,
    size_bytes=st.integers(0, 2**60),
    digest=st.builds(Digest, st.just("crc32c"), st.integers(0, 2**32 - 1)),
    rank=st.integers(0, 100_000),
    original_name=st.none() | NAME,
    attempt=st.none() | st.just("step-0000000011-e0003-0123abcd"),
)


def _do_not_collide(receipts: list[Receipt]) -> bool:
    try:
        check_collisions(receipt.name for receipt in receipts)
    except InvalidName:
        return False
    return True


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    attempt = Attempt(draw(st.integers(0, 10**10 - 1)), draw(st.integers(0, 9999)), "0123abcd")
    return Manifest(
        store_id=draw(st.uuids()).hex,
        step=attempt.step,
        epoch=attempt.epoch,
        attempt=str(attempt),
        kind=draw(st.sampled_from(["directory", "state"])),
        world_size=draw(st.integers(1, 10**5)),
        created_at=draw(st.floats(0, 1e11)),
        files=tuple(sorted_receipts(draw(st.lists(RECEIPT, max_size=6).filter(_do_not_collide)))),
        metrics=draw(st.dictionaries(TEXT.filter(lambda key: key != "$t"), st.floats(allow_nan=False), max_size=3)),
        metadata=draw(st.dictionaries(TEXT.filter(lambda key: key != "$t"), JSON, max_size=3)),
        extra={"later": draw(JSON)},
    )


@given(manifests())
def test_a_manifest_comes_back_and_has_one_encoding(manifest: Manifest) -> None:
    data = manifest.encode()
    again = Manifest.decode(data)
    assert again == manifest
    assert again.encode() == data
    assert again.size_bytes == sum(receipt.size_bytes for receipt in manifest.files)
    assert set(again.by_name) == {receipt.name for receipt in manifest.files}


def example() -> Manifest:
    files = (
        Receipt("a.pt", 10, Digest("crc32c", 0xDEADBEEF), 0),
        Receipt("model-rank=00001.pt", 5, Digest("crc32c", 7), 1, "model.pt"),
    )
    return Manifest(
        store_id="00ff" * 8,
        step=12,
        epoch=3,
        attempt="step-0000000012-e0003-0123abcd",
        kind="directory",
        world_size=2,
        created_at=1_700_000_000.5,
        files=files,
        directories=("empty",),
        metrics={"loss": float("inf")},
        metadata={"note": "höher"},
    )


def test_the_encoding_of_version_1_does_not_change() -> None:
    assert json.loads(example().encode()) == {
        "version": 1,
        "kind": "directory",
        "store_id": "00ff" * 8,
        "step": 12,
        "epoch": 3,
        "attempt": "step-0000000012-e0003-0123abcd",
        "world_size": 2,
        "created_at": 1_700_000_000.5,
        "metrics": {"loss": {"$t": "float", "v": "Infinity"}},
        "metadata": {"note": "höher"},
        "files": [
            {"name": "a.pt", "size_bytes": 10, "digest": "crc32c:deadbeef", "rank": 0},
            {
                "name": "model-rank=00001.pt",
                "size_bytes": 5,
                "digest": "crc32c:00000007",
                "rank": 1,
                "original_name": "model.pt",
            },
        ],
        "directories": ["empty"],
    }


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(example().encode()), **fields}).encode()


def file_entry(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "a", "size_bytes": 1, "digest": "crc32c:00000000", "rank": 0, **fields}]


@pytest.mark.parametrize("place", ["name", "original_name", "directory"])
def test_a_hostile_name_is_refused_wherever_it_stands(place: str) -> None:
    data = changed(directories=["../a"]) if place == "directory" else changed(files=file_entry(**{place: "../a"}))
    with pytest.raises(InvalidName) as caught:
        Manifest.decode(data, file="dir/ckptstore.json")
    assert caught.value.file == "dir/ckptstore.json"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "A"), ("a", "a/b")])
def test_names_that_collide_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(InvalidName):
        Manifest.decode(changed(files=[file_entry(name=name)[0] for name in names]))


def test_a_newer_major_version_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="Upgrade"):
        Manifest.decode(changed(version=2))
