"""Publish and follow weights on a disk, one process: what is full, what is a delta, what is refused."""

from __future__ import annotations

import json
import shutil
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from weights_made import Weights, bytes_of, changed, read_model, some_weights

import ckptstore
from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput, InvalidState, StoreFenced
from ckptstore.extensions.exchange.copying import copy_checkpoint, copy_store
from ckptstore.extensions.exchange.salvage import salvage_store
from ckptstore.extensions.publication import directories
from ckptstore.extensions.publication.subscription import Applied
from ckptstore.transfer.opened import open_place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "published"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model"


def is_full(place: Path, version: int) -> bool:
    index = json.loads((place / f"weight_v{version:06d}" / "model.safetensors.index.json").read_text())
    return "delta_encoding" not in index["metadata"]


def test_a_reader_holds_each_version_bit_by_bit(place: Path, model: Path) -> None:
    random, weights, history = Random(1), some_weights(), {}
    deltas = {1: 0, 2: 1, 3: 1, 8: 3, 9: 0, 12: 3}
    with (
        ckptstore.open_publication(place, anchor_every=3, keep=2) as publication,
        ckptstore.Subscription(place, model) as subscription,
    ):
        assert subscription.version is None
        for version in range(1, 14):
            publication.publish(version, weights, metadata={"step": 10 * version})
            history[version] = bytes_of(weights)
            weights = changed(weights, random) if version != 7 else weights
            if version in deltas:
                assert subscription.wait() == version
                applied = subscription.apply()
                assert (applied.version, applied.metadata["step"], applied.notices) == (version, 10 * version, ())
                assert (applied.is_full, applied.num_deltas) == (version in (1, 8, 9), deltas[version])
                assert read_model(model) == history[version]
                assert not subscription.apply().is_changed
        assert subscription.apply(10).version == subscription.version == 10
        assert read_model(model) == history[10]
        with pytest.raises(CheckpointGone, match="version 2"):
            subscription.apply(2)
        with pytest.raises(TimeoutError, match="newest one is 13"):
            subscription.wait(13, timeout_seconds=0)
    assert [is_full(place, version) for version in range(9, 14)] == [True, False, False, False, True]


def test_the_first_wait_says_once_that_there_is_nothing_yet(
    place: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptstore.extensions.publication.subscription._SILENT_SECONDS", 0.02)
    with ckptstore.Subscription(place, model) as subscription:
        with pytest.raises(TimeoutError, match="No version came to"):
            subscription.wait(timeout_seconds=0.5, poll_seconds=0.01)
        with pytest.raises(TimeoutError):
            subscription.wait(timeout_seconds=0.01)
        assert [record.getMessage().rpartition("; ")[0] for record in caplog.records] == [
            f"{place} has no version of weights yet"
        ]


def test_a_tensor_that_comes_goes_or_changes_its_kind_makes_a_full_version(place: Path, model: Path) -> None:
    weights: Weights = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    ways: list[Weights] = [
        {**weights, "c": torch.ones(1)},
        {"a": torch.ones(3), "b": torch.ones(2, 2)},
        {"a": torch.ones(3).double(), "b": torch.ones(2, 2)},
        {"a": torch.ones(3).double(), "b": torch.ones(4)},
    ]
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        publication.publish(1, weights)
        for version, way in enumerate(ways, 2):
            publication.publish(2 * version, way)
            assert is_full(place, 2 * version)
            publication.publish(2 * version + 1, way)
            assert not is_full(place, 2 * version + 1)
            subscription.apply()
            assert read_model(model) == bytes_of(way)


def test_a_module_is_published_as_it_is_exported(place: Path, model: Path, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    module[2].weight = module[0].weight
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    (tmp_path / "config" / "old.safetensors").write_text("not this")
    with ckptstore.open_publication(place, dtype=torch.bfloat16, config_from=tmp_path / "config") as publication:
        publication.publish(1, module)
    with ckptstore.Subscription(place, model) as subscription:
        subscription.apply()
    with ckptstore.open_store(tmp_path / "store") as store:
        exported = ckptstore.interchange.export(
            store.save(1, {"model": module}), tmp_path / "export", to="safetensors", strip_prefix="model."
        )
    names = {name for name, *_ in read_model(model).items()}
    assert names == {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert exported.num_tensors == len(names) + 1, "tied weights count once each there"
    assert read_model(model) == bytes_of(
        {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in module.state_dict().items()
            if name in names
        }
    )
    assert sorted(item.name for item in model.iterdir() if not item.name.startswith("model")) == [
        ".ckptstore-pull.json",
        "config.json",
    ]


def test_a_trainer_that_starts_again_builds_only_on_what_it_can_prove(place: Path, model: Path) -> None:
    first, other = some_weights(), changed(some_weights(), Random(2))
    for version, (weights, wanted) in enumerate([(first, True), (first, False), (other, True), (other, False)]):
        with ckptstore.open_publication(place, keep=9) as publication:
            publication.publish(version, weights)
        assert is_full(place, version) == wanted
    with ckptstore.open_publication(place, checksum="adler32", keep=9) as publication:
        publication.publish(9, other)
    assert is_full(place, 9), "a weak digest proves nothing"
    with ckptstore.open_publication(place, keep=9) as publication:
        publication.publish(10, other)
    assert is_full(place, 10)
    with ckptstore.Subscription(place, model) as subscription:
        subscription.apply(3)
        assert read_model(model) == bytes_of(other)


def test_two_trainers_at_one_place_shut_each_other_out(place: Path, model: Path) -> None:
    weights = some_weights()
    with ckptstore.open_publication(place) as first, ckptstore.open_publication(place) as second:
        first.publish(1, weights)
        second.publish(2, changed(weights, Random(1)))
        with pytest.raises(StoreFenced):
            first.publish(3, weights)
        second.publish(3, weights)
    assert is_full(place, 2)
    with ckptstore.Subscription(place, model) as subscription:
        assert subscription.apply().version == 3
        assert read_model(model) == bytes_of(weights)


def test_after_a_roll_back_readers_leave_what_was_rolled_back(place: Path, model: Path) -> None:
    weights = some_weights()
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        for version in (1, 2, 3):
            publication.publish(version, changed(weights, Random(version)))
        subscription.apply()
        with pytest.raises(InvalidInput, match="not above version 3"):
            publication.publish(2, weights)
        publication.store.roll_back(1)
        assert subscription.wait() == 1
        publication.publish(3, weights)  # the number again, with other bytes
        assert is_full(place, 3)
        assert not (place / "weight_v000002").exists()
        assert subscription.wait() == 3
        assert subscription.apply().is_changed
        assert read_model(model) == bytes_of(weights)


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ([torch.ones(1)], InvalidInput),
        ({}, InvalidInput),
        ({"a": 1}, InvalidInput),
        ({1: torch.ones(1)}, InvalidInput),
        ({"__metadata__": torch.ones(1)}, InvalidState),
        ({"format": torch.ones(1)}, InvalidState),
        ({"a\n": torch.ones(1)}, InvalidState),
        ({"": torch.ones(1)}, InvalidState),
        ({"a": torch.ones(1, dtype=torch.complex128)}, InvalidState),
        ({"a": torch.ones(2).to_sparse()}, InvalidState),
    ],
)
def test_weights_that_nobody_could_read_are_refused(place: Path, weights: Any, error: type[Exception]) -> None:
    with ckptstore.open_publication(place) as publication:
        with pytest.raises(error):
            publication.publish(1, weights)
        assert not place.exists() or not list(place.glob("checkpoints/*"))
        publication.publish(1, {"a": torch.ones(1)})


@pytest.mark.parametrize(
    "options",
    [
        {"anchor_every": -1},
        {"keep": 0},
        {"keep": True},
        {"checksum": "md5"},
        {"retention": None},
        {"config_from": "/no"},
    ],
)
def test_bad_options_are_refused(place: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ckptstore.CkptstoreError):
        ckptstore.open_publication(place, **options)


def test_in_the_background_the_copy_is_published(place: Path, model: Path) -> None:
    weights = some_weights()
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        for version in (1, 2, 3):
            pending = publication.publish_async(version, weights)
            expected = bytes_of(weights)
            weights["model.norm.weight"] += 1  # while it is on its way
        assert pending.result() is not None
        assert not is_full(place, 2)
        assert not is_full(place, 3)
        subscription.apply()
        assert read_model(model) == expected


def test_a_version_that_failed_is_no_base(place: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = some_weights()
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        publication.publish(1, weights)
        with monkeypatch.context() as patch:
            patch.setattr("ckptstore.saving.log_publisher.commit", _fails)
            with pytest.raises(ckptstore.StorageError):
                publication.publish(2, changed(weights, Random(1)))
            pending = publication.publish_async(3, changed(weights, Random(2)))
            with pytest.raises(ckptstore.StorageError):
                pending.result()
        with pytest.raises(ckptstore.StorageError):
            publication.publish(4, weights)  # the error of the one in the background
        publication.publish(4, changed(weights, Random(4)))
        assert not is_full(place, 4)
        subscription.apply()
        assert read_model(model) == bytes_of(changed(weights, Random(4)))


def _fails(*_args: Any, **_options: Any) -> None:
    raise ckptstore.StorageError("the network is down")


def test_damage_and_missing_links_are_told_and_passed_over(place: Path, model: Path) -> None:
    weights, random = some_weights(), Random(5)
    with ckptstore.open_publication(place, anchor_every=2, keep=3) as publication:
        for version in range(1, 8):
            publication.publish(version, weights)
            last, weights = bytes_of(weights), changed(weights, random)
            if version == 4:
                with ckptstore.Subscription(place, model) as subscription:
                    subscription.apply()
    (damaged,) = place.glob("checkpoints/step-0000000005-*/model-*.safetensors")
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with ckptstore.Subscription(place, model) as subscription:
        before = read_model(model)
        with pytest.raises(CheckpointDamaged, match=damaged.name):
            subscription.apply(5)
        assert read_model(model) == before
        assert subscription.version == 4
        with pytest.raises(CheckpointDamaged):
            subscription.apply(6)
        applied = subscription.apply()
        assert (applied.version, applied.is_full) == (7, True)
        assert read_model(model) == last


def test_files_that_were_touched_are_compared_and_not_trusted(place: Path, model: Path) -> None:
    weights = some_weights()
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        publication.publish(1, weights)
        subscription.apply()
        (file,) = model.glob("*.safetensors")
        data = file.read_bytes()
        file.chmod(0o600)
        file.write_bytes(data)  # another time, the same bytes
        assert not subscription.apply().is_changed
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert subscription.apply().is_full
        assert read_model(model) == bytes_of(weights)


def test_a_directory_of_somebody_else_is_left_alone(place: Path, model: Path) -> None:
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        with pytest.raises(CheckpointGone, match="No version"):
            subscription.apply()
        publication.publish(1, some_weights())
        model.mkdir()
        (model / "thesis.txt").write_text("precious")
        with pytest.raises(InvalidInput, match=str(model)):
            subscription.apply()
        (model / "thesis.txt").unlink()
        subscription.apply()
        (model / "notes").mkdir()
        (model / "notes" / "mine.txt").write_text("mine")
        publication.publish(2, changed(some_weights(), Random(1)))
        subscription.apply()
        assert (model / "notes" / "mine.txt").read_text() == "mine"


def test_a_store_of_checkpoints_is_no_publication(place: Path, model: Path, tmp_path: Path) -> None:
    with ckptstore.open_store(place) as store:
        store.save(1, {"a": torch.ones(1)})
        one = store[1].uri
    with ckptstore.Subscription(place, model) as subscription, pytest.raises(CheckpointDamaged, match="no version"):
        subscription.apply()
    with ckptstore.Subscription(one, model) as subscription, pytest.raises(InvalidInput, match="is one checkpoint"):
        subscription.wait(timeout_seconds=60)


class WithExtraState(nn.Linear):
    """A module with a plain value besides its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to do."""


def publish_seven(place: Path) -> dict[int, Any]:
    """Publish versions 1 to 7, of which 1 and 5 are full and the chain of 5 alone stays, and return their bytes."""
    random, weights, history = Random(2), some_weights(), {}
    with ckptstore.open_publication(place, anchor_every=3, keep=1) as publication:
        for version in range(1, 8):
            publication.publish(version, weights)
            history[version] = bytes_of(weights)
            weights = changed(weights, random)
    return history


def test_a_copy_keeps_what_its_deltas_need(place: Path, model: Path, tmp_path: Path) -> None:
    """Through retention in the copy, in a copy of the copy, and when both are copied again."""
    history = publish_seven(place)
    copies = [place, tmp_path / "copy", tmp_path / "copy of the copy"]
    for source, target in pairwise(copies):
        for is_new in (True, False):
            with ckptstore.open_store(source, group="solo") as store:
                report = copy_store(store, open_place(target))
            assert (report.steps, report.present)[not is_new] == (5, 6, 7)
        with ckptstore.open_store(target, group="solo", grace_seconds=0) as store:
            verdicts = store.retain(ckptstore.KeepLatest(1))
            assert [verdict.step for verdict in verdicts if not verdict.keep] == [5, 6]
            store.prune()
            assert [checkpoint.step for checkpoint in store] == [7], "the others are in the trash, and needed"
            with pytest.raises(InvalidInput, match="delta to another version"):
                copy_checkpoint(store[7], open_place(tmp_path / "alone"))
        with ckptstore.Subscription(target, tmp_path / f"model of {target.name}") as subscription:
            assert subscription.apply().num_deltas == 2
            assert read_model(subscription.path) == history[7]


@pytest.mark.parametrize("lost", [None, "log", "log/0000000007.json"])
def test_a_salvaged_delta_comes_with_what_it_builds_on(place: Path, tmp_path: Path, lost: str | None) -> None:
    history = publish_seven(place)
    with ckptstore.open_store(place, group="solo") as store:
        store.retain(ckptstore.KeepLatest(1))
        assert [checkpoint.step for checkpoint in store] == [7], "the others are in the trash, and needed"
    if lost == "log":
        shutil.rmtree(place / lost)
    elif lost:
        (place / lost).unlink()
    for is_new in (True, False):
        report = salvage_store(open_place(place), open_place(tmp_path / "copy"))
        assert (report.steps, report.present)[not is_new][-3:] == (5, 6, 7)
    with ckptstore.open_store(report.uri, group="solo", grace_seconds=0) as store:
        store.retain(ckptstore.KeepLatest(1))
        store.prune()
    with ckptstore.Subscription(report.uri, tmp_path / "model") as subscription:
        assert subscription.apply().num_deltas == 2
        assert read_model(subscription.path) == history[7]
    (damaged,) = place.glob("checkpoints/step-*6-*/*.safetensors")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    report = salvage_store(open_place(place), open_place(tmp_path / "less"))
    assert report.steps[-1] == 5
    assert [why for name, why in report.left_out.items() if "0007-e" in name] == [
        "Step 7 is a delta to version 6, which is not copied: nobody could read it"
    ]
    with ckptstore.Subscription(report.uri, tmp_path / "model of less") as subscription:
        subscription.apply()
        assert read_model(subscription.path) == history[5]


def test_plain_values_are_left_out_and_named_once(place: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckptstore.open_publication(place) as publication:
        for version in (1, 2):
            publication.publish(version, WithExtraState(2, 2))
    (warning,) = [record.getMessage() for record in caplog.records if "plain values" in record.getMessage()]
    assert "_extra_state" in warning
    with ckptstore.Subscription(place, model) as subscription:
        subscription.apply()
    assert sorted(read_model(model)) == ["bias", "weight"]


def test_weights_of_another_kind_after_an_error_are_published_in_full(place: Path, model: Path) -> None:
    """The bytes of a delta would be as many, and its digest right."""
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        publication.publish(1, {"w": torch.zeros(6)})
        subscription.apply()
        other = {"w": torch.ones(3, dtype=torch.float64)}
        with pytest.raises(InvalidInput, match="not above version 1"):
            publication.publish(1, other)
        publication.publish(2, other)
        assert subscription.apply().is_full
        assert read_model(model) == bytes_of(other)


def test_a_version_to_which_it_comes_back_is_told_again(place: Path, model: Path) -> None:
    told = []

    def then(applied: Applied) -> None:
        told.append(applied.version)
        if applied.version == 2:
            raise OSError("the server is down")

    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        publication.publish(1, {"w": torch.zeros(4)})
        subscription.apply(then=then)
        publication.publish(2, {"w": torch.ones(4)})
        with pytest.raises(OSError, match="server is down"):
            subscription.apply(then=then)
        publication.store.roll_back(1)
        assert subscription.apply(then=then).is_changed
        subscription.apply(then=then)
    assert told == [1, 2, 1]


@pytest.mark.parametrize("lost", ["model.safetensors.index.json", ".ckptstore-pull.json"])
def test_old_weights_do_not_stay_beside_new_ones(place: Path, model: Path, lost: str) -> None:
    """And what users have put there does."""
    with (
        ckptstore.open_publication(place, anchor_every=0) as publication,
        ckptstore.Subscription(place, model) as subscription,
    ):
        publication.publish(1, {"w": torch.zeros(9)})
        subscription.apply()
        (model / "adapter.safetensors").write_bytes(b"mine")
        if lost.startswith("."):
            (model / lost).write_text("{")
        else:
            (model / lost).unlink()
        for version in (2, 3):
            publication.publish(version, {"w": torch.full((9,), version)})
            subscription.apply()
            assert sorted(path.name for path in model.glob("*.safetensors"))[0] == "adapter.safetensors"
            assert len(list(model.glob("*.safetensors"))) == 2


def write_foreign(directory: Path, value: float) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((4,), value)}, directory / "model.safetensors")


def test_a_version_of_another_place_or_time_is_another_one(tmp_path: Path, model: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        write_foreign(tmp_path / name / "weight_v000001", value)
        with ckptstore.Subscription(tmp_path / name, model) as subscription:
            assert subscription.wait(timeout_seconds=5) == 1
            assert subscription.apply().is_changed
            assert not subscription.apply().is_changed
        with safe_open(model / "model.safetensors", "pt") as found:
            assert found.get_tensor("w")[0] == value
    write_foreign(tmp_path / "b/weight_v000001", 3.0)  # the trainer began anew
    with ckptstore.Subscription(tmp_path / "b", model) as subscription:
        assert subscription.apply().is_changed


def test_a_wait_ends_by_its_deadline_where_the_server_is_away(model: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    began = time.monotonic()
    with (
        ckptstore.Subscription("s3://bucket/w", model, storage_options=options) as subscription,
        pytest.raises(TimeoutError, match="No version came"),
    ):
        subscription.wait(timeout_seconds=1)
    assert time.monotonic() - began < 60  # where the tries of a request take 200 s


def test_directories_that_a_killed_trainer_was_removing_go(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"anchor_every": 0, "keep": 1, "grace_seconds": 0.0}
    removed = directories.shutil.rmtree

    def die(path: Path, **more: Any) -> None:
        if Path(path).exists():
            raise KeyboardInterrupt
        removed(path, **more)

    with ckptstore.open_publication(place, **options) as publication:
        publication.publish(1, {"w": torch.ones(9)})
        publication.publish(2, {"w": torch.ones(9)})
        monkeypatch.setattr(directories.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - whichever of them has one to remove
            for version in (3, 4, 5):
                publication.publish(version, {"w": torch.ones(9)})
        monkeypatch.undo()
    assert [*place.glob(".weight_v*")]
    with ckptstore.open_publication(place, **options) as publication:
        publication.publish(7, {"w": torch.ones(9)})
    assert not [*place.glob(".weight_v*")]
