"""The directory of a reader that is killed, or whose disk is full, at any point of an apply."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from small_disks import mounted
from weights_made import Weights, bytes_of, changed, read_model, some_weights

import ckptstore
from ckptstore.errors import InvalidInput, StorageFull
from ckptstore.extensions.publication import local, shard, work
from ckptstore.storage.disk import posix

HERE = Path(__file__).parent
MARGIN_BYTES = 16 << 20


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Weights, Weights]:
    """A place with two versions of several files, and a model at the first."""
    monkeypatch.setattr(shard, "SHARD_BYTES", 9000)
    place, model, weights = tmp_path / "published", tmp_path / "model", some_weights()
    with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
        publication.publish(1, weights)
        subscription.apply()
        other = changed(weights, Random(7), num=4)
        publication.publish(2, other)
    return place, model, weights, other


def killed_at(place: Path, model: Path, at: int, free_bytes: int) -> int | None:
    """Apply in a process that dies at a change; the number of changes if it did not come to that one."""
    command = [sys.executable, str(HERE / "killed_reader.py"), str(place), str(model), str(at), str(free_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("stride", [pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_a_reader_that_is_killed_anywhere_holds_a_version_or_none(
    published: tuple[Path, Path, Weights, Weights], tmp_path: Path, has_room: bool, stride: int
) -> None:
    place, model, weights, other = published
    free_bytes = 0 if has_room else MARGIN_BYTES + 12000
    num_changes: int | None = None
    at, seen, num_begun = 0, set(), 0
    while num_changes is None:
        at += stride
        kept = tmp_path / f"at-{at}"
        kept.mkdir()
        shutil.copytree(model, kept / "model", copy_function=os.link)
        num_changes = killed_at(place, kept / "model", at, free_bytes)
        if (kept / "model" / "model.safetensors.index.json").exists():
            held = read_model(kept / "model")
            assert held in (bytes_of(weights), bytes_of(other)), f"a mixture, killed at change {at}"
            found = "old" if held == bytes_of(weights) else "new"
        else:
            found = "none"
        seen.add(found)
        with ckptstore.Subscription(place, kept / "model") as subscription:
            assert subscription.version == {"old": 1, "new": 2, "none": None}[found]
            has_begun = (kept / ".model.ckptstore" / "journal.json").exists()
            num_begun += has_begun
            assert not (subscription.apply().is_full and has_begun), "it goes on, where a full version has no room"
        assert read_model(kept / "model") == bytes_of(other)
        assert {path.name for path in kept.iterdir()} == {"model", ".model.ckptstore"}
        assert {path.name for path in (kept / ".model.ckptstore").iterdir()} <= {"lock", "file.new"}
        shutil.rmtree(kept)
    assert stride > 1 or seen >= ({"old", "new"} if has_room else {"old", "new", "none"})
    assert at > 10
    assert has_room or num_begun


def test_without_room_for_two_files_are_replaced_one_by_one(
    published: tuple[Path, Path, Weights, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, model, _, other = published
    monkeypatch.setattr(local.posix, "free_bytes", lambda _path: MARGIN_BYTES + 12000)
    journals = []
    replaced = local.LocalModel._replace
    monkeypatch.setattr(
        local.LocalModel,
        "_replace",
        lambda self, *args, **options: journals.append(1) or replaced(self, *args, **options),
    )
    with ckptstore.Subscription(place, model) as subscription:
        assert subscription.apply().num_deltas == 1
        assert journals == [1]
        assert read_model(model) == bytes_of(other)
        assert not subscription.apply().is_changed


def test_a_disk_without_any_room_leaves_the_version_before(
    published: tuple[Path, Path, Weights, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, model, weights, other = published
    with ckptstore.Subscription(place, model) as subscription:
        with monkeypatch.context() as patch:
            patch.setattr(local.posix, "free_bytes", lambda _path: 0)
            with pytest.raises(StorageFull, match="Make room"):
                subscription.apply()
        assert read_model(model) == bytes_of(weights)
        assert subscription.version == 1
        subscription.apply()
        assert read_model(model) == bytes_of(other)


def test_a_disk_that_fills_up_meanwhile_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MARGIN_BYTES", 0)
    weights = {"a": torch.zeros(300_000), "b": torch.zeros(300_000)}
    other = {name: tensor + 1 for name, tensor in weights.items()}
    free_bytes = posix.free_bytes("/")
    monkeypatch.setattr(local.posix, "free_bytes", lambda _path: free_bytes)  # which sees another disk
    with mounted(tmp_path / "disk", "4m") as disk:
        place, model = tmp_path / "published", disk / "model"
        with ckptstore.open_publication(place) as publication, ckptstore.Subscription(place, model) as subscription:
            publication.publish(1, weights)
            subscription.apply()
            publication.publish(2, other)
            with pytest.raises(StorageFull):
                subscription.apply()
            assert read_model(model) == bytes_of(weights)
            assert subscription.version == 1


def test_another_start_of_the_machine_has_all_digests_compared(
    published: tuple[Path, Path, Weights, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, model, weights, _ = published
    monkeypatch.setattr(local, "_boot_id", lambda: "another")
    with ckptstore.Subscription(place, model) as subscription:
        assert not subscription.apply(1).is_changed
        (file, *_) = sorted(model.glob("*.safetensors"))
        times = file.stat()
        file.chmod(0o600)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as after a loss of power
        monkeypatch.setattr(local, "_boot_id", lambda: "a third")
        assert subscription.apply(1).is_full
        assert read_model(model) == bytes_of(weights)


@pytest.mark.slow
def test_processes_of_a_node_fetch_once(published: tuple[Path, Path, Weights, Weights]) -> None:
    place, model, _, other = published
    program = "import sys, ckptstore; print(ckptstore.Subscription(*sys.argv[1:]).apply().is_changed)"
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(place), str(model)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ends = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    assert ends == ["False", "False", "True"]
    assert read_model(model) == bytes_of(other)


class _Crash(BaseException):
    """The end of the machine."""


@pytest.mark.parametrize("lost", ["what was built", "what was fetched"])
def test_a_machine_that_fails_while_files_are_replaced_gets_a_whole_version(
    published: tuple[Path, Path, Weights, Weights], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Nothing is synced: files that were renamed may be full of zeros then, and the journal is there."""
    place, model, _, other = published
    built: list[Any] = []

    def crash(*_: object) -> None:
        raise _Crash

    build = work.Work.build

    def build_once(self: work.Work, *args: Any) -> None:
        if built:
            raise _Crash
        built.append(args)
        build(self, *args)

    with ckptstore.Subscription(place, model) as subscription, monkeypatch.context() as patch:
        patch.setattr(local.posix, "free_bytes", lambda _path: MARGIN_BYTES + 12000)
        if lost == "what was built":
            patch.setattr(local.LocalModel, "_finish", crash)
        else:
            patch.setattr(work.Work, "build", build_once)
        with pytest.raises(_Crash):
            subscription.apply()
    aside = model.with_name(".model.ckptstore")
    assert (aside / "journal.json").exists()
    files = model.glob("model-v000002-*") if lost == "what was built" else aside.glob("spool-*/*/model-*.safetensors")
    for path in files:
        path.write_bytes(bytes(path.stat().st_size if lost == "what was built" else 0))
    monkeypatch.setattr(local, "_boot_id", lambda: "the next start")
    with ckptstore.Subscription(place, model) as subscription:
        assert subscription.apply().is_full
    assert read_model(model) == bytes_of(other)
    assert len(list(model.glob("*.safetensors"))) == len(
        {*json.loads((model / "model.safetensors.index.json").read_text())["weight_map"].values()}
    )


def _other_dtype(model: Path) -> str:
    file = min(model.glob("*.safetensors"))
    data = file.read_bytes()
    assert b'"F32"' in data[:2000]
    file.unlink()
    file.write_bytes(data[:2000].replace(b'"F32"', b'"I32"', 1) + data[2000:])
    return file.name


def _other_index(model: Path) -> str:
    index = json.loads((model / "model.safetensors.index.json").read_bytes())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "gone.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return "index.json"


def _emptied(name: str) -> Any:
    def empty(model: Path) -> str:
        (model / name).write_bytes(b"")
        return name

    return empty


def _gone(pattern: str) -> Any:
    def remove(model: Path) -> str:
        file = min(model.glob(pattern))
        file.unlink()
        return file.name

    return remove


def _cut(model: Path) -> str:
    file = max(model.glob("*.safetensors"))
    os.truncate(file, 5)
    return file.name


@pytest.mark.parametrize(
    "edit",
    [
        _other_dtype,
        _other_index,
        _cut,
        _emptied("config.json"),
        _emptied("model.safetensors.index.json"),
        _emptied(".ckptstore-pull.json"),
        _gone("*.safetensors"),
        _gone("config.json"),
        _gone("model.safetensors.index.json"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_directory_that_somebody_edited_is_fetched_anew_and_it_is_said(
    tmp_path: Path, edit: Any, version: int
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"hidden_size": 4}')
    place, model, weights = tmp_path / "published", tmp_path / "model", {"w": torch.ones(700), "v": torch.ones(3)}
    with ckptstore.open_publication(place, config_from=config) as publication:
        publication.publish(1, weights)
        with ckptstore.Subscription(place, model) as subscription:
            subscription.apply()
        if version == 2:
            publication.publish(2, weights := {**weights, "v": torch.zeros(3)})
    what = edit(model)
    with ckptstore.Subscription(place, model) as subscription:
        applied = subscription.apply()
    assert (applied.version, applied.is_full) == (version, True)
    assert "is fetched anew" in applied.notices[0]
    assert what in applied.notices[0]
    assert read_model(model) == bytes_of(weights)
    assert (model / "config.json").read_text() == '{"hidden_size": 4}'


def test_config_files_are_on_the_disk_when_they_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = tmp_path / "config", tmp_path / "model"
    config.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (config / name).write_text("{}")
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino) or fsync(descriptor))
    with ckptstore.open_publication(tmp_path / "published", config_from=config) as publication:
        publication.publish(1, {"w": torch.ones(700)})
        with ckptstore.Subscription(tmp_path / "published", model) as subscription:
            subscription.apply()
        publication.publish(2, {"w": torch.zeros(700)})
        assert {path.stat().st_ino for path in model.glob("[ct]o*.json")} <= synced
        os.truncate(model / "config.json", 0)
        os.utime(model / "config.json", ns=(0, 0))  # a power loss, and the machine has started again
        monkeypatch.setattr(local, "_boot_id", lambda: "another")
        with ckptstore.Subscription(tmp_path / "published", model) as subscription:
            assert subscription.apply().is_full
    assert (model / "config.json").read_text() == "{}"


def test_a_directory_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with ckptstore.open_publication(tmp_path / "published") as publication:
        publication.publish(1, {"w": torch.ones(700)})
    (tmp_path / "model").write_text("mine")
    with (
        ckptstore.Subscription(tmp_path / "published", tmp_path / "model") as subscription,
        pytest.raises(InvalidInput, match="is no directory"),
    ):
        subscription.apply()
