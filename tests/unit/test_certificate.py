"""The certificate of a fast checkpoint: what is written comes back, and nothing false is ever believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CheckpointDamaged, CkptstoreError, UnsupportedVersion
from ckptstore.extensions.tier.certificate import Certificate, held_by
from ckptstore.format.manifest import Manifest

GOLDEN = Path(__file__).parents[1] / "golden"
DATA = (GOLDEN / "fast-v1/fast.json").read_bytes()


@given(st.data())
def test_no_change_of_a_byte_goes_unseen(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(DATA) - 1))
    changed = bytes([*DATA[:at], DATA[at] ^ (1 << data.draw(st.integers(0, 7))), *DATA[at + 1 :]])
    try:
        found = Certificate.decode(changed)
    except CkptstoreError:
        return
    # JSON has several spellings of some characters; what they say must be the same.
    assert found == Certificate.decode(DATA)


def rebuilt(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """A certificate whose digests fit what was changed in it: `change` gets what it says and its manifest."""
    outer = json.loads(DATA)
    inner, manifest = json.loads(outer["certificate"]), json.loads(outer["manifest"])
    change(inner, manifest)
    outer["manifest"] = json.dumps(manifest)
    inner["manifest_sha256"] = hashlib.sha256(outer["manifest"].encode()).hexdigest()
    outer["certificate"] = json.dumps(inner)
    outer["sha256"] = hashlib.sha256(outer["certificate"].encode()).hexdigest()
    return json.dumps(outer).encode()


FALSE: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "an attempt of another step": lambda inner, manifest: [each.update(step=301) for each in (inner, manifest)],
    "an attempt that is a path": lambda inner, manifest: [each.update(attempt="../../x") for each in (inner, manifest)],
    "a file elsewhere": lambda _, manifest: manifest["files"][0].update(attempt="step-0000000200-e0001-0123abcd"),
    "endless ranks": lambda inner, manifest: (
        manifest.update(world_size=10**15),
        inner.update(holders={"node-a": f"0-{10**15 - 1}"}),
    ),
}


@pytest.mark.parametrize("name", FALSE)
def test_what_contradicts_itself_is_refused_though_its_digests_fit(name: str) -> None:
    with pytest.raises(CheckpointDamaged, match="is not a certificate"):
        Certificate.decode(rebuilt(FALSE[name]))
    Certificate.decode(rebuilt(lambda _inner, _manifest: None))


def test_nothing_false_is_written() -> None:
    good = Certificate.decode(DATA)
    bad = Certificate(good.manifest_data, 2, 1, good.claim_sha256, held_by({"node-a": [0]}))
    with pytest.raises(CheckpointDamaged, match="do not hold the ranks"):
        bad.encode()


def test_later_versions_are_refused_and_unknown_fields_are_kept() -> None:
    with pytest.raises(UnsupportedVersion):
        Certificate.decode(rebuilt(lambda inner, _: inner.update(version=2)))
    assert Certificate.decode(rebuilt(lambda inner, _: inner.update(later=[1]))).extra == {"later": [1]}


def test_the_golden_certificate_is_read_and_would_be_written_the_same() -> None:
    found = Certificate.decode(DATA)
    again = Certificate(found.manifest_data, found.save_number, found.claim_number, found.claim_sha256, found.holders)
    assert again.encode() == DATA
    assert found.sha256 == again.sha256 == hashlib.sha256(DATA).hexdigest()
    sizes = {receipt.name: receipt.size_bytes for receipt in found.manifest.files}
    assert found.ranks_in(sizes) == {0, 1}
    for receipt in found.manifest.files:
        assert receipt.rank not in found.ranks_in({**sizes, receipt.name: receipt.size_bytes + 1})
    assert found.manifest == Manifest.decode(found.manifest_data)
    assert len(found.manifest.files) == 5
    assert (found.order, found.claim_number) == ((1, 2), 1)
    assert found.claim_sha256 == hashlib.sha256((GOLDEN / "log-v1/0000000001.json").read_bytes()).hexdigest()
    assert found.holders == {"node-a": {0}, "node-b": {0, 1}}
    assert str(found.attempt) == "step-0000000300-e0001-3f9a1c2e"
