"""Rounds of the agent that fail: what is tried again, and what is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store
from ckptstore.events import listening
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.tools.run.notices import CommitsDelayed
from tests.folders.test_finished_property import zipped

JOB = JobSeen(frozenset([os.getpid()]), frozenset())


def test_a_storage_that_is_away_for_a_day_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine_1.pt").write_bytes(zipped(1, ""))
    folder, said = Folder(tmp_path / "out", Rules(patterns=("mine_*",))), list[Any]()

    def away(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    with open_store(tmp_path / "store", durable=False) as store, listening(said.append, CommitsDelayed):
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=5.0, began_at=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(folder, "hold", away)
            for count in (0, 1, 2000):
                committer.failures.count, committer.failures.not_before = count, 0.0
                committer._round()
                committer._round()
        assert [event.wait_seconds for event in said] == [5.0, 10.0, 60.0]
        committer.failures.not_before = 0.0
        committer._round()
        assert [checkpoint.step for checkpoint in store] == [1]
