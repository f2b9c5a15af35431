"""What is decided on fast checkpoints: why one cannot be resumed from, and who sends what. The rest is simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptstore import FastTier
from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.candidates import Merged, NodeSighting, merge
from ckptstore.extensions.tier.certificate import Certificate, held_by
from ckptstore.extensions.tier.upkeep.sweep import SweepView, sweep
from ckptstore.format.changes import Change, Claim, Commit, Remove, Resumed
from ckptstore.format.digest import Digest
from ckptstore.format.entry import CheckpointEntry
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.format.order import SaveOrder
from ckptstore.format.record import Record

STORE_ID = "5f0c3a9e4b7d41d8a2c6e1f09b83d754"


def log_of(*changes: Change) -> list[Record]:
    records: list[Record] = []
    for change in changes:
        newest = records[-1] if records else None
        records.append(Record.following(newest, change, write_id="w", created_at=0.0))
    return records


CLAIM = log_of(Claim("token", 2))[0]


def certificate(save_number: int, *, size_bytes: int = 1) -> Certificate:
    """Of two ranks on the nodes a and b."""
    step = 10 * save_number
    manifest = Manifest(
        store_id=STORE_ID,
        step=step,
        epoch=1,
        attempt=f"step-{step:010d}-e0001-0123abcd",
        kind="state",
        world_size=2,
        created_at=0.0,
        files=(
            Receipt("0.pt", size_bytes, Digest("crc32c", 7), 0),
            Receipt("1.pt", size_bytes, Digest("crc32c", 7), 1),
        ),
    )
    return Certificate(manifest.encode(), save_number, 1, CLAIM.sha256, held_by({"a": [0], "b": [1]}))


def commit(of: Certificate) -> Commit:
    return Commit(
        CheckpointEntry(
            step=of.manifest.step,
            epoch=1,
            attempt=of.manifest.attempt,
            manifest_sha256=sha256_of(of.manifest_data),
            kind="state",
            world_size=2,
            size_bytes=of.manifest.size_bytes,
            num_files=2,
            created_at=0.0,
            save_number=of.save_number,
        )
    )


def seen(of: Certificate, *nodes: str, certified: bool = True) -> list[NodeSighting]:
    """On node a the file of rank 0, on b that of rank 1."""
    files = {"a": {"0.pt": 1}, "b": {"1.pt": 1}}
    sha256 = of.sha256 if certified else ""
    name = of.manifest.attempt
    return [NodeSighting(node=node, attempt=name, sha256=sha256, sizes=files[node]) for node in nodes]


def merged(sightings: list[NodeSighting], of: list[Certificate], records: list[Record]) -> Merged:
    state = records[-1].state
    committed = [record for record in records if record.number in {*state.live, *state.trash}]
    claims = {record.number: record for record in records}
    certificates = {each.sha256: each for each in of}
    return merge(sightings, certificates, records[-1], committed, claims, store_id=STORE_ID)


def test_fast_and_committed_ones_are_in_one_order() -> None:
    first, second, third, fourth = map(certificate, (1, 2, 3, 4))
    records = log_of(Claim("token", 2), commit(first), commit(third))
    sightings = [*seen(second, "a", "b"), *seen(third, "b"), *seen(fourth, "a"), *seen(fourth, "b", certified=False)]
    found = merged(sightings, [second, third, fourth], records)
    assert [(each.step, each.number, dict(each.holders)) for each in found.candidates] == [
        (40, None, {0: ("a",), 1: ("b",)}),  # node b was killed before it wrote the certificate
        (30, 3, {1: ("b",)}),  # the store has what no node has
        (20, None, {0: ("a",), 1: ("b",)}),
        (10, 2, {}),
    ]
    assert [each.is_durable for each in found.candidates] == [False, True, False, True]
    assert found.refused == ()


def test_a_reason_is_told_for_each_that_cannot_be_used() -> None:
    lost, changed, elsewhere, removed, left = map(certificate, (1, 2, 3, 4, 5))
    other = certificate(2, size_bytes=9)
    elsewhere = replace(elsewhere, claim_number=9)
    records = log_of(
        Claim("token", 2),
        commit(changed),
        commit(removed),
        commit(certificate(6)),
        Remove(trash=(3,)),
        Claim("token", 2),
        Resumed(2, SaveOrder(1, 4)),
    )
    sightings = [*seen(lost, "a"), *seen(other, "a", "b"), *seen(elsewhere, "a", "b"), *seen(removed, "a", "b")]
    sightings += [*seen(left, "a", "b"), NodeSighting(node="b", attempt=lost.manifest.attempt, fault="it is torn")]
    found = merged(sightings, [lost, other, elsewhere, removed, left], records)
    reasons = {(each.attempt, each.nodes): (each.reason, each.is_void) for each in found.refused}
    both = ("a", "b")
    assert reasons == {
        (lost.manifest.attempt, ("b",)): ("it is torn", False),
        (lost.manifest.attempt, ("a",)): (
            "no node that is here has the files of rank 1, which were on b",
            False,
        ),
        (other.manifest.attempt, both): ("its manifest is not the one that record 2 names", False),
        (elsewhere.manifest.attempt, both): (
            "it is of another history of this store: the log has another record where its epoch was claimed",
            False,
        ),
        (removed.manifest.attempt, both): ("it was removed by record 5", True),
        (left.manifest.attempt, both): (
            "it is save 5 of epoch 1, and what came of save 4 of epoch 1 takes its place",
            True,
        ),
    }
    assert [each.number for each in found.candidates] == [4, 2]


def test_a_certificate_of_another_store_is_left_alone() -> None:
    of = certificate(1)
    records = log_of(Claim("token", 2))
    other = merge(seen(of, "a", "b"), {of.sha256: of}, records[0], [], {1: records[0]}, store_id="ab" * 16)
    assert other.candidates == ()
    assert [each.reason for each in other.refused] == ["it is of another store"]
    view = SweepView(newest=records[0], committed=[], claims={1: records[0]}, store_id="ab" * 16, epoch=1)
    found = {each.attempt: each for each in map(certificate, (1, 2, 3))}
    assert sweep(found, view, keep=1) == {}
    assert [*sweep(found, replace(view, store_id=STORE_ID), keep=1)] == [
        str(certificate(number).attempt) for number in (2, 1)
    ]


def test_a_certificate_of_a_copy_of_the_store_is_left_alone() -> None:
    """A copy has the id of the store, and a claim of its own where the store has another record."""
    records = log_of(Claim("token of the copy", 2))
    view = SweepView(newest=records[0], committed=[], claims={1: records[0]}, store_id=STORE_ID, epoch=1)
    found = {each.attempt: each for each in map(certificate, (1, 2, 3))}
    assert sweep(found, view, keep=1) == {}
    assert len(sweep(found, replace(view, claims={1: CLAIM}), keep=1)) == 2


def test_attempts_in_use_stay_void_superseded_or_unfinished() -> None:
    superseded, newest, void = map(certificate, (1, 2, 4))
    unfinished = Attempt(9, 0, "0123abcd")
    records = log_of(Claim("token", 2), Claim("token", 2), Resumed(2, SaveOrder(1, 2)))
    view = SweepView(newest=records[-1], committed=[], claims={1: records[0]}, store_id=STORE_ID, epoch=2)
    found = {superseded.attempt: superseded, newest.attempt: newest, void.attempt: void, unfinished: None}
    swept = {*sweep(found, view, keep=1)}
    assert swept == {str(superseded.attempt), str(void.attempt), str(unfinished)}
    for name in swept:
        assert {*sweep(found, replace(view, kept={name}), keep=1)} == swept - {name}


@pytest.mark.parametrize("keep", [0, -1])
def test_the_newest_always_stays(keep: int) -> None:
    view = SweepView(newest=CLAIM, committed=[], claims={}, store_id=STORE_ID, epoch=1)
    assert FastTier("~/fast").path == str(Path.home() / "fast")
    with pytest.raises(InvalidInput, match="has to be a directory or file of this machine"):
        FastTier("s3://bucket/fast")
    with pytest.raises(InvalidInput, match="always stays"):
        sweep({Attempt(1, 1, "0123abcd"): None}, view, keep=keep)


def test_a_job_that_was_fenced_deletes_nothing() -> None:
    records = log_of(Claim("token", 2), Claim("token", 2))
    view = SweepView(newest=records[1], committed=[], claims={}, store_id=STORE_ID, epoch=1)
    found: dict[Attempt, Certificate | None] = {Attempt(1, 0, "0123abcd"): None}
    assert sweep(found, view, keep=1) == {}
    assert [*sweep(found, replace(view, epoch=2), keep=1)] == [*map(str, found)]


def test_a_save_without_a_certificate_stays_while_it_may_go_on() -> None:
    records = log_of(Claim("token", 2))
    view = SweepView(newest=records[0], committed=[], claims={}, store_id=STORE_ID, epoch=1)
    assert sweep({Attempt(1, 1, "0123abcd"): None}, view, keep=1) == {}
