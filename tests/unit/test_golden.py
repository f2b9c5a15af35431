"""Objects of format version 1 as they were once written: they are read for ever, and are never written anew.

A change of the code that fails here has changed the format. The files stay as they are.
"""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from ckptstore.errors import InvalidInput
from ckptstore.extensions.history.cursor import Cursor
from ckptstore.format.changes import Annotate, Change, Claim, Commit, Noop, Pin, Remove, Restore, Resumed, Unpin, apply
from ckptstore.format.layout import HINT_KEY, STORE_KEY, record_key
from ckptstore.format.manifest import Manifest, sha256_of
from ckptstore.format.order import SaveOrder, Void
from ckptstore.format.record import Record
from ckptstore.format.timings import Spread
from ckptstore.log import Log
from ckptstore.log.identity import StoreIdentity, read_or_create_identity
from ckptstore.log.reader import Hint
from ckptstore.storage.memory import MemoryStorage

GOLDEN = Path(__file__).parents[1] / "golden"
LOG = GOLDEN / "log-v1"
NUMBERS = range(1, 14)
MANIFEST_THINNED = (GOLDEN / "manifest-v1/thinned.json").read_bytes()


def record(number: int) -> Record:
    return Record.decode((LOG / f"{number:010d}.json").read_bytes(), number)


def golden_store() -> MemoryStorage:
    storage = MemoryStorage(f"memory://{uuid.uuid4().hex}")
    names = {STORE_KEY: "store.json", HINT_KEY: "latest.json"}
    names |= {record_key(number): f"{number:010d}.json" for number in NUMBERS}
    for key, name in names.items():
        storage.write(key, [memoryview((LOG / name).read_bytes())])
    return storage


@pytest.mark.parametrize("number", NUMBERS)
def test_a_record_is_read_and_would_be_written_the_same(number: int) -> None:
    stored = record(number)
    before = record(number - 1) if number > 1 else None
    again = Record.following(before, stored.change, write_id=stored.write_id, created_at=stored.created_at)
    assert again.encode() == stored.encode() == (LOG / f"{number:010d}.json").read_bytes()
    assert again.state == stored.state


def test_the_changes_are_these() -> None:
    changes: list[Change] = [record(number).change for number in NUMBERS]
    assert changes[0] == Claim("job-71-0", 2)
    assert changes[4:7] == [Pin((3,)), Noop(), Claim("job-71-1", 4)]
    assert changes[9:] == [
        Remove(drop=(2,), epoch=2, reason="grace period over"),
        Unpin((3,)),
        Remove(trash=(9,), reason="roll back to step 300"),
        Claim("cp-1", 1, above_epoch=6),
    ]
    third, fourth, eighth, ninth = (changes[number - 1] for number in (3, 4, 8, 9))
    assert isinstance(fourth, Commit)
    assert (fourth.drops, fourth.replaces, dict(fourth.reasons)) == ((2,), (), {2: "not among the latest 2"})
    entry = fourth.entry
    assert (entry.step, entry.epoch, entry.attempt) == (300, 1, "step-0000000300-e0001-3f9a1c2e")
    assert (entry.kind, entry.world_size, entry.size_bytes, entry.num_files) == ("directory", 2, 2097175, 5)
    assert (entry.created_at, dict(entry.metrics)) == (1767225900.25, {"eval_loss": 0.3125, "worst": math.inf})
    assert isinstance(third, Commit)
    assert isinstance(eighth, Commit)
    assert math.isnan(eighth.entry.metrics["eval_loss"])
    assert (eighth.entry.bases, eighth.entry.kind) == ((4,), "state")
    assert isinstance(ninth, Commit)
    assert ninth.replaces == (8,)


def test_the_state_at_the_end_is_this() -> None:
    state = record(13).state
    assert (state.epoch, state.resume_from, state.latest) == (7, 4, 4)
    assert state.live == {3, 4}
    assert record(10).state.pinned == {3}
    assert not state.pinned
    assert dict(state.trash) == {8: 9, 9: 12}
    assert dict(state.bases) == {4: {8}}


def test_the_log_holds_together_and_goes_on() -> None:
    storage = golden_store()
    log = Log(storage)
    assert log.verify_chain() == []
    newest, latest = log.newest(), log.latest()
    assert newest
    assert latest
    assert (newest.number, latest.number, latest.entry.step) == (13, 4, 300)
    assert log.append(lambda _: Remove(drop=(9, 8), epoch=7))
    assert Log(storage).verify_chain() == []
    assert read_or_create_identity(storage) == "5f0c3a9e4b7d41d8a2c6e1f09b83d754"


def test_the_hint_is_read_and_would_be_written_the_same() -> None:
    data = (LOG / "latest.json").read_bytes()
    hint = Hint.decode(data)
    assert hint
    assert hint.latest
    assert (hint.newest.sha256, hint.latest.sha256) == (record(13).sha256, record(4).sha256)
    assert hint.encode() == data


def test_packed_numbers_and_unknown_fields_are_read() -> None:
    data = (LOG / "packed.json").read_bytes()
    found = Record.decode(data, 10_000)
    assert found.state.live == {n * n % 9973 + 13 for n in range(1, 700)}
    assert found.extra == {"later": ["kept"]}
    assert found.state.extra == {"later": "kept"}
    after = Record.following(found, Noop(), write_id="", created_at=0.0)
    assert json.loads(after.encode())["state"]["later"] == "kept"


def test_a_record_of_a_copy_has_the_time_of_the_original() -> None:
    data = (LOG / "copied.json").read_bytes()
    found = Record.decode(data, 14)
    again = Record.following(record(13), found.change, write_id=found.write_id, created_at=found.created_at)
    assert again.encode() == data
    assert (found.entry.committed_at, found.entry.attempt) == (1767225903.5, "step-0000000300-e0007-3f9a1c2e")


def test_a_record_that_restores_is_read_and_would_be_written_the_same() -> None:
    data = (LOG / "restored.json").read_bytes()
    found = Record.decode(data, 14)
    again = Record.following(record(13), found.change, write_id=found.write_id, created_at=found.created_at)
    assert again.encode() == data
    assert found.change == Restore((8,), pin=True, epoch=7)
    assert (found.state.live, found.state.pinned, dict(found.state.trash)) == ({3, 4, 8}, {8}, {9: 12})
    assert dict(found.state.bases) == {4: {8}}


def test_a_record_that_annotates_is_read_and_would_be_written_the_same() -> None:
    data = (LOG / "annotated.json").read_bytes()
    found = Record.decode(data, 14)
    again = Record.following(record(13), found.change, write_id=found.write_id, created_at=found.created_at)
    assert again.encode() == data
    assert isinstance(found.change, Annotate)
    assert (found.change.number, found.change.epoch, dict(found.state.annotated)) == (4, None, {4: 14})
    metrics = dict(found.change.metrics)
    assert math.isnan(metrics.pop("worst"))
    assert metrics == {"eval_loss": 0.25, "bleu": 31.5}
    assert replace(found.state, annotated={}) == record(13).state


def test_a_record_that_thins_is_read_and_would_be_written_the_same() -> None:
    before = Record.decode((LOG / "counted.json").read_bytes(), 14)
    data = (LOG / "thinned.json").read_bytes()
    found = Record.decode(data, 15)
    again = Record.following(before, found.change, write_id=found.write_id, created_at=found.created_at)
    assert again.encode() == data
    assert isinstance(found.change, Commit)
    assert (found.change.thins, found.entry.step, found.entry.epoch, found.change.begun_in) == (3, 200, 1, 7)
    state = found.state
    assert (state.live, dict(state.trash), dict(state.thinned)) == ({4, 14, 15}, {3: 15, 8: 9, 9: 12}, {15: 3})
    assert (state.latest, state.in_order()) == (14, [15, 4, 14])
    manifest = Manifest.decode(MANIFEST_THINNED)
    assert manifest.encode() == MANIFEST_THINNED
    assert manifest.thinned == found.entry.thinned
    assert manifest.thinned is not None
    assert manifest.thinned.dropped == ("optimizer.*", "ema.*")
    assert manifest.attempt == found.entry.attempt


@pytest.mark.parametrize("name", ["counted", "resumed", "rolled-back"])
def test_records_that_order_saves_are_read_and_would_be_written_the_same(name: str) -> None:
    before = record(13)
    for each, number in (("counted", 14), ("resumed", 15), ("rolled-back", 16)):
        data = (LOG / f"{each}.json").read_bytes()
        found = Record.decode(data, number)
        again = Record.following(before, found.change, write_id=found.write_id, created_at=found.created_at)
        assert again.encode() == data
        before = found
        if each == name:
            break
    state, later = found.state, Void(SaveOrder(6, 5), SaveOrder(7, 9))
    match name:
        case "counted":
            assert (found.entry.order, state.save_number, state.void) == ((7, 8), 8, ())
        case "resumed":
            assert found.change == Resumed(7, SaveOrder(6, 5), "step-0000000350-e0006-77c1d2e3", 9)
            assert state.void == (later,)
        case _:
            rolled_back = Void(SaveOrder(1, 0), SaveOrder(8, 0))
            assert found.change == Remove((14,), reason="roll back to step 300", voids=rolled_back)
            assert (state.void, state.latest) == ((rolled_back,), 4)


def test_a_copy_with_the_epochs_of_its_source_is_read_and_not_written_any_more() -> None:
    first = Record.decode((LOG / "copied.json").read_bytes(), 14).entry
    change = Commit(replace(first, attempt="step-0000000300-e0001-3f9a1c2e"))
    assert apply(record(13).state, 14, change).latest == 14
    with pytest.raises(InvalidInput, match="was not begun in the writer epoch 7"):
        Record.following(record(13), change, write_id="", created_at=0.0)


def test_the_identity_is_read_and_would_be_written_the_same() -> None:
    data = (LOG / "store.json").read_bytes()
    identity = StoreIdentity.decode(data)
    assert (identity.kept_by, identity.created_at) == ("ckptstore", 1767225600.0)
    assert identity.encode() == data


def test_a_cursor_is_read_and_would_be_written_the_same() -> None:
    data = (LOG / "cursor.json").read_bytes()
    cursor = Cursor.decode(data, file="cursor.json")
    assert cursor == Cursor("5f0c3a9e4b7d41d8a2c6e1f09b83d754", 4, record(4).sha256, 3)
    assert cursor.encode() == data


def test_a_manifest_is_read_and_would_be_written_the_same() -> None:
    data = (GOLDEN / "manifest-v1/directory.json").read_bytes()
    manifest = Manifest.decode(data)
    assert manifest.encode() == data
    assert (manifest.step, manifest.epoch, manifest.world_size, manifest.kind) == (300, 1, 2, "directory")
    assert manifest.attempt == "step-0000000300-e0001-3f9a1c2e"
    assert [
        (item.name, item.size_bytes, str(item.digest), item.rank, item.original_name) for item in manifest.files
    ] == [
        ("config.json", 17, "crc32c:0badcafe", 0, None),
        ("logs/träining log.txt", 0, "crc32c:00000000", 1, None),
        ("model-rank=00000.pt", 1048577, "crc32c:12345678", 0, "model.pt"),
        ("model-rank=00001.pt", 1048576, "crc32c:deadbeef", 1, "model.pt"),
        ("vocab.bin", 5, "None", 1, None),
    ]
    assert [*manifest.by_name.items()] == [(item.name, item) for item in manifest.files]
    assert manifest.directories == ("empty",)
    assert manifest.metrics == {"eval_loss": 0.3125, "worst": math.inf}
    assert manifest.metadata["commit"] == "8c15528"
    assert math.isnan(manifest.metadata["nested"][3]["lr"])
    entry = record(4).entry
    assert entry.manifest_sha256 == sha256_of(data)
    assert (entry.size_bytes, entry.num_files) == (manifest.size_bytes, len(manifest.files))


def test_timings_are_read_and_would_be_written_the_same() -> None:
    data = (GOLDEN / "manifest-v1/with-timings.json").read_bytes()
    manifest = Manifest.decode(data)
    assert manifest.encode() == data
    timings = manifest.timings
    assert timings is not None
    assert timings.to_json() == json.loads(data)["timings"]
    assert (timings.seconds, timings.size_bytes, timings.requests, timings.retries) == (2.4375, 2097175, 6, 1)
    assert timings.phases["upload"] == Spread(1.5, 1.75, 2.0, (1, 0))
    assert timings.stalled == Spread(0.375, 0.4375, 0.5, (1, 0))
    assert [(one.rank, one.node, one.stalled_seconds) for one in timings.ranks] == [
        (0, "node-a-29d49f25", 0.375),
        (1, "node-b-77aa01ff", 0.5),
    ]
    assert timings.ranks[0].seconds == {"agree": 0.25, "stage": 0.125, "upload": 1.5, "wait": 0.5, "commit": 0.0625}
    assert replace(manifest, extra={}) == Manifest.decode((GOLDEN / "manifest-v1/directory.json").read_bytes())


def test_a_provenance_is_read_and_would_be_written_the_same() -> None:
    data = (GOLDEN / "manifest-v1/with-provenance.json").read_bytes()
    manifest = Manifest.decode(data)
    assert manifest.encode() == data
    found = manifest.provenance
    assert found is not None
    assert found.to_json() == json.loads(data)["provenance"]
    assert (found.commit[:7], found.is_dirty, found.num_hosts) == ("5f0c3a9", True, 2)
    assert found.argv == ("train.py", "--lr", "0.1", "--api-key", "***")
    assert found.versions["torch"] == "2.9.0"
    assert replace(manifest, extra={}) == Manifest.decode((GOLDEN / "manifest-v1/directory.json").read_bytes())


def test_unknown_fields_of_a_manifest_are_kept() -> None:
    manifest = Manifest.decode((GOLDEN / "manifest-v1/with-unknown-fields.json").read_bytes())
    assert manifest.extra == {"later": {"field": 1}}
    assert json.loads(manifest.encode())["later"] == {"field": 1}
