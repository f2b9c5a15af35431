"""A checkpoint or a store that is read by a process alone, under whatever name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptstore import Checkpoint, CheckpointGone, GroupMissing, InvalidInput, open_store


def test_one_process_of_a_job_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store", durable=False) as store:
        uri = store.save(1, {"a": torch.ones(3)}).uri
    monkeypatch.setenv("WORLD_SIZE", "4")
    with open_store(tmp_path / "store") as store, pytest.raises(GroupMissing, match="group='solo'"):
        store.load({"a": torch.zeros(3)})
    with pytest.raises(GroupMissing, match="group='solo'"):
        Checkpoint.from_uri(uri).load({"a": torch.zeros(3)})
    for load in (open_store(tmp_path / "store", group="solo").load, Checkpoint.from_uri(uri, group="solo").load):
        state = {"a": torch.zeros(3)}
        load(state)
        assert torch.equal(state["a"], torch.ones(3))


def test_a_name_that_is_no_checkpoint_says_what_opens_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with open_store(root, durable=False) as store:
        store.save_directory(30, None)
    with pytest.raises(InvalidInput, match=rf"is a store\. Write open_store\('{root}'\)\.latest\(\)"):
        Checkpoint.from_uri(str(root))
    with pytest.raises(InvalidInput, match=rf"Write open_store\('{root}'\)\[30\]"):
        Checkpoint.from_uri(f"{root}@30")
    with pytest.raises(InvalidInput, match=rf"Write open_store\('{root}'\)\.latest\(\)"):
        Checkpoint.from_uri(f"{root}@latest")
    with pytest.raises(CheckpointGone):
        Checkpoint.from_uri(f"{tmp_path / 'other'}@30")
    assert not (tmp_path / "other@30").exists()


def test_a_closed_store_is_not_written_to(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", durable=False)
    saved = store.save(1, {"a": 1})
    store.close()
    for call in (
        lambda: store.save(2, {"a": 1}),
        lambda: store.save_async(2, {"a": 1}),
        lambda: store.save_directory(2, None),
        lambda: store.resume({"a": 1}),
        lambda: store.latest(),
        lambda: store.prune(),
    ):
        with pytest.raises(InvalidInput, match="is closed"):
            call()
    with pytest.raises(InvalidInput, match=r"was closed before this call.*open_store"):
        saved.verify()
    with open_store(tmp_path / "store") as store:
        assert [checkpoint.step for checkpoint in store] == [1]
