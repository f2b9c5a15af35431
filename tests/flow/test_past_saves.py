"""The history of a store: what the log knows of every save, after its files are deleted."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from trees import directories, make_tree, settle

from ckptstore import InvalidInput, KeepLatest, open_store


def test_metrics_outlive_the_files(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x" * 10})
    root = tmp_path / "store"
    with open_store(root) as store:
        assert store.history() == []
        assert store.history().to_pandas().empty
        store.save_directory(1, source, metrics={"loss": 0.9, "step": 7})
        store.save_directory(2, source, metrics={"loss": math.inf})
        store.save_directory(2, source, metrics={"accuracy": 0.5})
    with open_store(root, retention=KeepLatest(1), grace_seconds=0) as store:
        store.save_directory(3, source)
        settle(store)
        store.save_directory(4, source, metrics={"loss": 0.1})
        settle(store)
        store.prune()
        assert [item.step for item in store] == [2, 4], "the job began with step 2"
        assert len(directories(root)) == 2
        past = store.history()
    assert [(save.step, save.epoch, save.status) for save in past] == [
        (1, 1, "deleted"),
        (2, 1, "deleted"),
        (2, 1, "live"),
        (3, 2, "deleted"),
        (4, 2, "live"),
    ]
    reasons = [save.removed_because for save in past]
    assert reasons == ["no rule keeps it", "step 2 was saved again", "", "no rule keeps it", ""]
    assert [dict(save.metrics) for save in past][:2] == [{"loss": 0.9, "step": 7.0}, {"loss": math.inf}]
    assert {(save.size_bytes, save.world_size, save.kind) for save in past} == {(10, 1, "directory")}
    frame = past.to_pandas()
    assert frame["step"].tolist() == [1, 2, 2, 3, 4]
    assert frame["metrics.step"].tolist()[0] == 7.0
    assert frame["loss"].isna().tolist() == [False, False, True, True, False]
    assert frame.columns[-1] == "accuracy"


def test_what_came_back_from_the_trash_is_live_again(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x"})
    with open_store(tmp_path / "store") as store:
        for step in (1, 2, 3):
            store.save_directory(step, source)
        store.roll_back(1)
        store.restore(3)
        found = [(save.status, save.removed_because) for save in store.history()]
    assert found == [("live", ""), ("trash", "roll back to step 1"), ("live", "")]


def test_without_pandas_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with open_store(tmp_path / "store") as store, pytest.raises(InvalidInput, match="pandas, which is not installed"):
        store.history().to_pandas()
