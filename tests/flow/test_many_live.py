"""A store with thousands of live checkpoints: a save costs what it costs with a few."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from trees import settle

from ckptstore import CheckpointStore, StepExists, open_store
from ckptstore.format.changes import Commit
from ckptstore.format.record import Record


def add_live(store: CheckpointStore, number: int) -> None:
    """Add live checkpoints by their records and empty directories alone."""
    job = store._job
    newest = job.log.newest()
    first = job.log.records(newest.state.live)[0].entry
    for step in range(1000, 1000 + number):
        attempt = job.new_attempt(step)
        os.makedirs(job.storage.local_path(f"checkpoints/{attempt}"))

        def change(newest: Record | None, step: int = step, attempt: object = attempt) -> Commit:
            save_number = newest.state.save_number + 1
            return Commit(entry=replace(first, step=step, attempt=str(attempt), save_number=save_number))

        job.log.append(change)


def calls_of_saves(root: Path, number: int) -> tuple[int, int]:
    """Return the function calls of a save, and the bytes of its record, with so many live checkpoints besides."""
    with open_store(root, group="solo", durable=False) as store:
        store.save(1, {"epoch": 1})
        add_live(store, number)
    calls = 0

    def count(_frame: FrameType, event: str, _what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with open_store(root, group="solo", durable=False) as store:
        for step in (9001, 9002):  # the first one reads all records
            store.save(step, {"epoch": 1})
            settle(store)
        sys.setprofile(count)
        try:
            store.save(9003, {"epoch": 1})
        finally:
            sys.setprofile(None)
        settle(store)
        with pytest.raises(StepExists):
            store.save(1000, {"epoch": 1}, exists="error")
        store.save(1000, {"epoch": 1})
        assert [checkpoint.step for checkpoint in store].count(1000) == 1
        newest = store._job.log.newest()
        return calls, len(newest.encode())


def test_a_save_costs_the_same_with_many_live_checkpoints(tmp_path: Path) -> None:
    few, few_bytes = calls_of_saves(tmp_path / "few", 10)
    many, many_bytes = calls_of_saves(tmp_path / "many", 400)
    assert many < few + 100
    assert many_bytes < few_bytes + 100
