"""What asks a storage directly, without a store, survives a storage that throttles for a moment as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptstore
from ckptstore.dcp import StoreReader, StoreWriter
from ckptstore.interchange import import_state
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about a single process
def test_dcp_and_imports_survive_a_moment_of_throttling(
    fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.1")
    options: dict[str, Any] = {"storage_options": fast_s3.storage_options}
    uri = "s3://test/retries/by-hand"
    state = {"weight": torch.arange(1000), "epoch": 3}
    busy = [
        Fault(action="status", status=503, code="SlowDown", match=match, times=2)
        for match in ("^GET .*list-type", "^GET /test/retries", "^PUT")
    ]

    fast_s3.faults.replace(busy)
    dcp.save(state, storage_writer=StoreWriter(uri, **options), no_dist=True)
    assert fast_s3.faults.pending == 1, "of reads: a save lists and writes"

    fast_s3.faults.replace(busy[1:2])
    found = {"weight": torch.zeros(1000, dtype=torch.int64), "epoch": 0}
    dcp.load(found, storage_reader=StoreReader(uri, **options), no_dist=True)
    assert torch.equal(found["weight"], state["weight"])
    assert fast_s3.faults.pending == 0

    fast_s3.faults.replace(busy[:2])
    with ckptstore.open_store(tmp_path) as store:
        checkpoint = import_state(uri, store, 7, kind="dcp", **options)
        assert checkpoint.step == 7
        checkpoint.load(found)
    assert fast_s3.faults.pending == 0
