"""Reports from S3, and of stores with very many checkpoints."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import many
import pytest
import torch
from seeing import look

from ckptstore import KeepLatest, open_store
from ckptstore.storage.open import open_storage
from ckptstore.testing import CountCalls, with_faults
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.report.document import Document
from ckptstore.tools.report.gather import NUM_TIMINGS, Sighting

pytestmark = pytest.mark.slow

NUM_CHECKPOINTS = 10_000


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 server in memory, and the environment that leads to it."""
    with s3_server(buckets=("test",)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server


def test_a_store_in_a_bucket(s3: Any) -> None:
    uri, counted = "s3://test/run", CountCalls()
    with open_store(uri, retention=KeepLatest(2)) as store:
        for step in (1, 2, 3):
            tensors = {"w": torch.full((600, 600), float(step)), "b": torch.ones(3)}
            store.save(step, {"model": tensors}, metrics={"loss": step})
    with with_faults(open_store(uri), counted) as store:
        seen = look(store)
    writes = {"write", "write_many", "create", "delete", "open_parts", "copy", "abort_unfinished"}
    assert not set(counted.counts) & writes
    assert [(item["step"], item["status"]) for item in seen["checkpoints"]] == [(1, "trash"), (2, "live"), (3, "live")]
    assert seen["checkpoints"][2]["commands"]["pin"] == "ckptstore pin s3://test/run@3"
    assert seen["health"]["trouble"] == seen["health"]["gaps"] == seen["torn"] == []
    assert seen["health"]["stored_bytes"] > 3 * 600 * 600 * 4
    two, three = (tree["digests"] for tree in seen["trees"].values())
    keys = seen["layouts"][0]["keys"]
    assert [a == b for a, b in zip(two, three, strict=True)] == [key == "model.b" for key in keys]


def filled(uri: str) -> None:
    with closing(open_storage(uri)) as storage:
        many.fill(storage, NUM_CHECKPOINTS)


def looked_at(uri: str) -> tuple[Any, float, CountCalls]:
    counted = CountCalls()
    with with_faults(open_store(uri), counted) as store:
        began = time.process_time()
        document = Document(created_at=1, command="test", live=False, stores=(Sighting(store).look(),))
        value = json.loads(json.dumps(document.to_json(), allow_nan=False))
        return value["stores"][0], time.process_time() - began, counted


def check_whole(seen: Any, counted: CountCalls) -> None:
    assert [item["step"] for item in seen["checkpoints"]] == [*range(NUM_CHECKPOINTS)]
    assert len(seen["changes"]) == NUM_CHECKPOINTS + 1
    assert seen["checkpoints"][0]["best_of"] == []
    assert seen["checkpoints"][-1]["best_of"] == ["accuracy", "loss"]
    assert seen["sizes"][-1]["live_bytes"] == NUM_CHECKPOINTS * 10**9
    assert seen["health"]["gaps"] == []
    # Twice for each manifest, as these are not there, and a missing file is believed after a second look.
    assert counted.total <= NUM_CHECKPOINTS + 2 * NUM_TIMINGS + 50, "each record once, and few other things"


def test_ten_thousand_checkpoints_on_a_disk(tmp_path: Path) -> None:
    filled(str(tmp_path / "store"))
    seen, seconds, counted = looked_at(str(tmp_path / "store"))
    check_whole(seen, counted)
    assert seconds < 30, "of the processor's time"


@pytest.mark.long
def test_ten_thousand_checkpoints_in_a_bucket(s3: Any) -> None:
    filled("s3://test/run")
    seen, seconds, counted = looked_at("s3://test/run")
    check_whole(seen, counted)
    assert seconds < 60, "of the processor's time, the server's in it"


def test_more_files_than_are_listed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.tools.report.condition.LISTED_FILES", 100)
    with closing(open_storage(str(tmp_path))) as storage:
        many.fill(storage, 50)
    counted = CountCalls()
    with with_faults(open_store(tmp_path), counted) as store:
        seen = look(store)
    assert any("the log speaks of 800 files" in text for text in seen["health"]["trouble"])
    assert seen["health"]["stored_bytes"] is None
    assert not [call for call in counted.calls if call.verb == "list" and call.key.startswith("checkpoints/")]
    assert any("30 more checkpoints have such trouble" in text for text in seen["health"]["trouble"])
