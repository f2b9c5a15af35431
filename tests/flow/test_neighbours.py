"""A start in an empty place beside a full one: a line names that, and a start can require something to resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import run_threads

from ckptstore import CheckpointStore, FastTier, StoreMissing, open_store
from ckptstore.testing.s3_server import s3_server


def full(uri: str, step: int, **options: Any) -> None:
    with open_store(uri, group="solo", **options) as store:
        store.save(step, {"epoch": step})


def lines_of_start(caplog: pytest.LogCaptureFixture, uri: str, state: Any, **options: Any) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO), open_store(uri, group="solo", **options) as store:
        assert store.resume(state) is None
    return [(record.levelno, record.getMessage()) for record in caplog.records if "begins anew" in record.getMessage()]


@pytest.mark.parametrize("state", [None, {"epoch": -1}], ids=["files", "state"])
def test_a_misspelt_place_is_told_by_the_likest_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Any
) -> None:
    assert lines_of_start(caplog, str(tmp_path / "alone"), state) == []
    full(str(tmp_path / "runs/mistral"), 7)
    full(str(tmp_path / "runs/llama-7"), 12000)
    (tmp_path / "runs/lima-7").write_bytes(b"")
    ((level, line),) = lines_of_start(caplog, str(tmp_path / "runs/lama-7"), state)
    assert level == logging.WARNING
    assert f"{tmp_path}/runs/llama-7, beside it, has step 12000" in line
    ((level, line),) = lines_of_start(caplog, str(tmp_path / "runs/llama-8"), state)  # a run of its own
    assert level == logging.INFO
    assert "step 12000" in line


def test_a_misspelt_prefix_of_a_bucket_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    with s3_server(buckets=["b"]) as server:
        options = {"storage_options": server.storage_options}
        full("s3://b/runs/llama", 3, **options)
        ((level, line),) = lines_of_start(caplog, "s3://b/runs/Llama", {"epoch": -1}, **options)
        assert level == logging.WARNING
        assert "s3://b/runs/llama, beside it, has step 3" in line
        assert lines_of_start(caplog, "s3://b", None, **options) == []


def test_a_start_can_require_something_to_resume_and_writes_nothing_without_it(tmp_path: Path) -> None:
    full(str(tmp_path / "llama"), 12)

    def flow(store: CheckpointStore, _rank: int) -> str:
        with pytest.raises(StoreMissing, match=r"llama, beside it, has step 12\. Was that meant") as caught:
            store.resume({"epoch": -1}, required=True)
        return str(caught.value)

    assert len(set(run_threads(2, tmp_path / "lama", flow))) == 1
    assert [path for path in (tmp_path / "lama").rglob("*") if path.is_file()] == []
    fast = FastTier(tmp_path / "fast", node="a")
    with open_store(tmp_path / "lima", group="solo", fast=fast) as store, pytest.raises(StoreMissing):
        store.resume(required=True)
    with open_store(tmp_path / "llama", group="solo", fast=fast) as store:
        assert store.resume({"epoch": -1}, required=True).step == 12
