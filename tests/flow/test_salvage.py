"""Whatever a store has lost, `cp --salvage` brings each checkpoint that is whole to a new one, and says what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from trees import flip, salvaged

import ckptstore
from ckptstore.tools.cli import main

STEPS = range(4)


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.arange(1000.0) + step, "step": step}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with four checkpoints, of which one refers to another, one is pinned and one more was removed."""
    root = tmp_path_factory.mktemp("whole") / "store"
    with ckptstore.open_store(root, durable=False, retention=ckptstore.KeepAll()) as store:
        for step in STEPS:
            store.save(step, state_of(step))
        store.save(4, state_of(3) | {"step": 4}, incremental="reference")
        store.save(5, state_of(3) | {"step": 5}, incremental="reference")
        store.save(9, state_of(9))
        store.roll_back(5)
        store.pin(1)
    return root


def directory_of(root: Path, step: int) -> Path:
    return next(root.glob(f"checkpoints/step-{step:010}-*"))


def tear_a_record(root: Path) -> None:
    path = max(root.glob("log/*.json"))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


Loss = Callable[[Path], object]


def lose(path: str) -> Loss:
    """Remove the last file or directory of this name."""

    def lose(root: Path) -> None:
        found = max(root.glob(path))
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    return lose


RECORDS: dict[str, Loss] = {
    "no record": lambda root: None,
    "the log": lose("log"),
    "the first record": lose("log/0000000001.json"),
    "a record": lose("log/0000000004.json"),
    "the newest record": lose("log/*.json"),
    "half a record": tear_a_record,
}
LOST_STEPS: dict[str, tuple[Loss, set[int]]] = {
    "no checkpoint": (lambda root: None, set()),
    "a directory": (lose("checkpoints/step-0000000000-*"), {0}),
    "a manifest": (lose("checkpoints/step-0000000002-*/ckptstore.json"), {2}),
    "a bit": (lambda root: flip(max(directory_of(root, 2).glob("*.distcp"))), {2}),
}


def check(root: Path, target: Path, *, lost: set[int], log_is_whole: bool) -> None:
    report = salvaged(root, target)
    left = {step for step in (0, 1, 2, 3, 4, 5) if step not in lost}
    with ckptstore.open_store(target, group="solo") as store:
        found = {checkpoint.step for checkpoint in store}
        assert found - {9} == left
        assert 9 not in found or not log_is_whole, "what the log says was removed stays out"
        for checkpoint in store:
            loaded = {"w": torch.zeros(1000), "step": -1}
            checkpoint.load(loaded)
            expected = state_of(min(checkpoint.step, 3) if checkpoint.step != 9 else 9)
            assert torch.equal(loaded["w"], expected["w"])
            assert loaded["step"] == checkpoint.step
            assert checkpoint.verify().ok
        assert store.save(10, state_of(10)).step == 10
    assert set(report.steps) == found
    for step in lost & {2}:
        assert any(f"step-{step:010}-" in name for name in report.left_out), report.left_out


@pytest.mark.parametrize("lost", LOST_STEPS)
@pytest.mark.parametrize("of_log", RECORDS)
def test_every_combination(whole: Path, tmp_path: Path, of_log: str, lost: str) -> None:
    for others in ((), ("store.json", "latest.json")):
        root = shutil.copytree(whole, tmp_path / f"lost-{len(others)}")
        harm, steps = LOST_STEPS[lost]
        for loss in (RECORDS[of_log], harm, *map(lose, others)):
            loss(root)
        check(root, tmp_path / f"{root.name}-copy", lost=steps, log_is_whole=of_log == "no record")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_of_two_saves_of_a_step_the_last_whole_one_counts(tmp_path: Path, is_damaged: bool) -> None:
    root = tmp_path / "store"
    with ckptstore.open_store(root, durable=False) as store:
        store.save(2, state_of(2))
    with ckptstore.open_store(root, durable=False) as store:
        store.save(2, state_of(5), exists="replace")
    first, second = sorted(root.glob("checkpoints/step-*"), key=lambda path: path.name.split("-e")[1])
    if is_damaged:
        max(second.glob("*.distcp")).unlink()
    RECORDS["the log"](root)
    report = salvaged(root, tmp_path / "copy")
    assert list(report.left_out) == [second.name if is_damaged else first.name]
    with ckptstore.open_store(tmp_path / "copy") as store:
        loaded = {"w": torch.zeros(1000), "step": -1}
        store.load(loaded)
        assert loaded["step"] == (2 if is_damaged else 5)


def command(*words: object) -> Result:
    return CliRunner().invoke(main, ["cp", "--salvage", *map(str, words)])


def test_the_command(whole: Path, tmp_path: Path) -> None:
    root = shutil.copytree(whole, tmp_path / "lost")
    for loss in (RECORDS["the log"], LOST_STEPS["a bit"][0]):
        loss(root)
    done = command(root, tmp_path / "copy")
    assert done.exit_code == 0, done.output
    assert "left out: step-0000000002-" in done.output
    again = json.loads(command(root, tmp_path / "copy", "--json").stdout)
    assert again["copied_steps"] == []
    assert again["present_steps"] == [0, 1, 3, 4, 5, 9]
    assert len(again["left_out"]) == 1


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_store_is_not_copied_into_itself(whole: Path, tmp_path: Path, below: str) -> None:
    root = tmp_path / "lost"
    shutil.copytree(whole, root)
    for loss in (RECORDS["the log"], lose("latest.json")):
        loss(root)
    before = sorted(root.rglob("*"))
    (tmp_path / "alias").symlink_to(root)
    for source, target in ((root, root), (root, tmp_path / "alias"), (tmp_path / "alias", root)):
        done = command(source, target / below)
        assert done.exit_code == ckptstore.InvalidInput.exit_code, done.output
        assert sorted(root.rglob("*")) == before


def test_what_others_leave_beside_checkpoints_is_told(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run é [1]"
    shutil.copytree(whole, root)
    RECORDS["the log"](root)
    (root / "checkpoints/.DS_Store").write_bytes(b"x")
    (root / "checkpoints/checkpoint-500").mkdir()
    (root / "checkpoints/checkpoint-500/model.safetensors").write_bytes(b"x")
    report = salvaged(root, tmp_path / "copy")
    assert set(report.left_out) == {".DS_Store", "checkpoint-500"}
    assert set(report.steps) == {0, 1, 2, 3, 4, 5, 9}


INDEXES = [
    '{"metadata": {"total_size": 1}, "weight_map": {}}',  # of Hugging Face
    '{"metadata": {"delta_encoding": "xor", "base_version": "weight_v000001"}}',  # of another publisher
    '{"metadata": {"attempt": "step-0000000007-e0001-00000000", "base_attempt": "step-0000000006-e0001-00000000"}}',
    '{"metadata": {"base_attempt": ["x"]}}',
    '{"metadata": null}',
    "[1, 2]",
    "{not json",
]


def test_a_directory_of_hugging_face_is_salvaged_whatever_its_index_says(tmp_path: Path) -> None:
    """The weights in it may be a delta, of a publication somewhere else: nobody asked to apply it."""
    root = tmp_path / "store"
    with ckptstore.open_store(root, durable=False, retention=ckptstore.KeepAll()) as store:
        for step, index in enumerate(INDEXES):
            folder = tmp_path / str(step)
            folder.mkdir()
            (folder / "model.safetensors.index.json").write_text(index)
            store.save_directory(step, folder)
    RECORDS["the log"](root)
    report = salvaged(root, tmp_path / "copy")
    assert (report.steps, report.left_out) == (tuple(range(len(INDEXES))), {})


def test_nothing_is_whole(tmp_path: Path) -> None:
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        (file,) = Path(store.save(1, state_of(1)).uri).glob("*.distcp")
    file.unlink()
    done = command(tmp_path / "store", tmp_path / "copy")
    assert done.exit_code == ckptstore.NoUsableCheckpoint.exit_code
    assert f"could be copied: {file.parent.name}: {file.name} is missing" in done.stderr


def test_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = command(tmp_path / "empty", tmp_path / "copy")
    assert done.exit_code == ckptstore.StoreMissing.exit_code
    assert not (tmp_path / "copy").exists()
