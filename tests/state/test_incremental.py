"""Incremental saves: what has not changed is not written again, and every checkpoint stays whole on its own."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import copied
from thread_ranks import run_threads

from ckptstore import Checkpoint, CheckpointDamaged, CheckpointStore, InvalidInput, KeepLatest, open_store
from ckptstore.testing import CountCalls
from ckptstore.testing.stores import with_faults


def lora_state(frozen_bytes: int = 16 << 20) -> dict[str, Any]:
    """A model of which 1 % is trained."""
    count = frozen_bytes // 8 // 4
    return {
        "frozen": {f"layer.{index}": torch.randn(count) for index in range(8)},
        "lora": {f"layer.{index}": torch.randn(count // 100) for index in range(8)},
        "epoch": 0,
    }


def change(state: dict[str, Any], *, layer: int | None = None) -> None:
    for tensor in state["lora"].values():
        tensor.add_(1)
    if layer is not None:
        state["frozen"][f"layer.{layer}"].add_(1)
    state["epoch"] += 1


def blank(state: dict[str, Any]) -> dict[str, Any]:
    zeros = {name: {key: torch.zeros_like(item) for key, item in state[name].items()} for name in ("frozen", "lora")}
    return {**zeros, "epoch": -1}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["epoch"] == expected["epoch"]
    for name in ("frozen", "lora"):
        assert all(torch.equal(found[name][key], item) for key, item in expected[name].items())


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else f"memory://{uuid4().hex}"


def written(counted: CountCalls) -> int:
    return sum(counted.size_bytes[verb] for verb in ("write", "write_part", "write_many", "create"))


def test_a_lora_run_writes_its_one_percent(root: str) -> None:
    counted, state = CountCalls(), lora_state()
    with with_faults(open_store(root), counted) as store:
        store.save(0, state, incremental=True)
        for step in range(1, 4):
            change(state)
            counted.clear()
            checkpoint = store.save(step, state, incremental=True)
            assert written(counted) <= 0.015 * checkpoint.size_bytes
            found = blank(state)
            checkpoint.load(found)
            assert_equal(found, state)
            assert checkpoint.verify().ok


def test_what_changed_is_written_and_files_that_hardly_hold_are_given_up(root: str) -> None:
    state = lora_state()
    with open_store(root) as store:
        store.save(0, state, incremental=True)
        names = []
        for step, layer in enumerate([0, 1, 2, 3, 4], start=1):
            change(state, layer=layer)
            checkpoint = store.save(step, state, incremental=True)
            names.append({item.name for item in checkpoint.files if item.name.startswith("state-")})
            found = blank(state)
            checkpoint.load(found)
            assert_equal(found, state)
        assert "state-rank=00000-00.distcp" in names[0] & names[1]
        sizes = [item.size_bytes for item in checkpoint.files]
        assert sum(sizes) < 1.4 * (16 << 20)


def test_another_start_of_the_job_takes_over_too(root: str) -> None:
    state = lora_state()
    with open_store(root) as store:
        store.save(0, state, incremental=True)
    counted = CountCalls()
    change(state)
    with with_faults(open_store(root), counted) as store:
        store.save(1, state, incremental=True)
        assert written(counted) < 1 << 20


def test_a_list_of_files_that_has_rotted_is_not_believed(tmp_path: Path) -> None:
    """A bit of an offset would be in the index of every checkpoint from there on."""
    state = {"x": torch.arange(1 << 18), "w": torch.arange(1 << 18) + 1}
    with open_store(tmp_path) as store:
        store.save(0, state, incremental=True)
    (path,) = tmp_path.glob("checkpoints/*/digests-rank=00000.json")
    value = json.loads(path.read_text())
    for file in value["files"]:
        for chunk in file["chunks"]:
            chunk[3] ^= 1 << 12  # its offset
    path.chmod(0o600)
    path.write_text(json.dumps(value))
    with open_store(tmp_path) as store:
        checkpoint = store.save(1, state, incremental=True)
        found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        checkpoint.load(found)
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_a_whole_save_in_between_starts_over(root: str) -> None:
    state, counted = lora_state(1 << 20), CountCalls()
    with with_faults(open_store(root), counted) as store:
        store.save(0, state, incremental=True)
        store.save(1, state)
        counted.clear()
        checkpoint = store.save(2, state, incremental=True)
        assert written(counted) > 1 << 20
        assert checkpoint.verify().ok


def test_each_checkpoint_stands_alone(tmp_path: Path) -> None:
    state = lora_state(1 << 20)
    with open_store(tmp_path / "store", retention=KeepLatest(1), grace_seconds=0) as store:
        for step in range(3):
            change(state)
            store.save_async(step, state, incremental=True).result()
            store._job.wait_for_prune()
        assert len(list((tmp_path / "store" / "checkpoints").iterdir())) == 1
        checkpoint = store[2]
        assert checkpoint.verify().ok
        found = blank(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, checkpoint_id=checkpoint.uri)
        assert_equal(found, state)


def test_ranks_take_over_their_own_files(tmp_path: Path) -> None:
    def flow(opened: CheckpointStore, rank: int) -> list[int]:
        state: dict[str, Any] = {"own": {f"rank-{rank}": torch.full((1 << 19,), float(rank))}}
        counted, sizes = CountCalls(), []
        store = with_faults(opened, counted)
        for step in range(3):
            counted.clear()
            assert store.save(step, {**state, "step": step}, incremental=True).verify().ok
            sizes.append(written(counted))
        found: dict[str, Any] = {"own": {f"rank-{rank}": torch.zeros(1 << 19)}, "step": -1}
        store[2].load(found, strict=False)
        assert found["own"][f"rank-{rank}"].eq(rank).all()
        assert found["step"] == 2
        return sizes

    for first, *others in run_threads(2, tmp_path / "store", flow):
        assert first > 1 << 21
        assert all(size < 1 << 16 for size in others)


def test_references_name_live_checkpoints_and_keep_them(root: str, tmp_path: Path) -> None:
    state, counted = lora_state(), CountCalls()
    with with_faults(open_store(root, retention=KeepLatest(1), grace_seconds=0), counted) as store:
        store.save(0, state, incremental="reference")
        for step in (1, 2):
            change(state)
            counted.clear()
            checkpoint = store.save(step, state, incremental="reference")
            store._job.wait_for_prune()
            found = blank(state)
            checkpoint.load(found)
            assert_equal(found, state)
            assert checkpoint.verify().ok
            assert ".metadata" not in {item.name for item in checkpoint.files}, "stock readers look in one directory"
            if step == 1:
                assert written(counted) <= 0.015 * checkpoint.size_bytes
                assert counted.counts["link"] + counted.counts["copy"] == 0
                assert [item.held_by for item in store.trash()] == ["1 checkpoints refer to it"]
        # the base is in the trash now: a new save may not name it, and has written everything itself
        assert written(counted) > 16 << 20
        assert {item.attempt for item in checkpoint.files} == {None}
        store.prune()
        assert store.trash() == []


def test_a_copy_of_a_reference_is_whole(tmp_path: Path) -> None:
    state = lora_state(1 << 20)
    with open_store(tmp_path / "store") as store:
        for step in range(3):
            change(state)
            checkpoint = store.save(step, state, incremental="reference")
        assert {item.attempt for item in checkpoint.files} != {None}
        with checkpoint.as_directory() as path:
            assert Checkpoint.from_directory(path).verify().ok
        copied(f"{tmp_path / 'store'}@2", tmp_path / "one")
        copied(tmp_path / "store", tmp_path / "all")
        with pytest.raises(CheckpointDamaged, match="ckptstore cp"):
            Checkpoint.from_directory(checkpoint.uri)
    alone = Checkpoint.from_directory(tmp_path / "one")
    found = blank(state)
    alone.load(found)
    assert_equal(found, state)
    assert alone.verify().ok
    with open_store(tmp_path / "all") as store:
        assert all(item.verify().ok for item in store)
        found = blank(state)
        store.load(found)
        assert_equal(found, state)


def test_other_words_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store, pytest.raises(InvalidInput, match="incremental"):
        store.save(0, {"a": 1}, incremental="link")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"incremental": "reference"}, {"incremental": True}, {"stock_readable": False}])
def test_ranks_that_ask_for_other_ways_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    def flow(store: CheckpointStore, rank: int) -> None:
        with pytest.raises(InvalidInput, match=f"rank 1 asks for .*{next(iter(options))}"):
            store.save(0, {"n": torch.ones(4)}, **(options if rank else {}))
        assert store.save(1, {"n": torch.ones(4)}, **options).verify().ok

    assert run_threads(2, tmp_path, flow) == [None, None]
