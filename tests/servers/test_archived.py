"""A rule of the bucket has moved old objects to an archive class: nothing keeps anybody from the newest checkpoint."""

from __future__ import annotations

import uuid

import pytest

import ckptstore
from ckptstore.errors import StorageArchived
from ckptstore.retention import KeepAll
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow


def archived(match: str) -> Fault:
    return Fault(action="status", match=f"^GET .*{match}", times=None, status=403, code="InvalidObjectState")


def test_old_records_in_an_archive_keep_nobody_from_the_newest(fast_s3: S3Server) -> None:
    uri, options = f"s3://test/archived/{uuid.uuid4().hex[:8]}", fast_s3.storage_options
    with ckptstore.open_store(uri, storage_options=options, retention=KeepAll()) as store:
        for step in range(6):
            store.save(step, {"step": step})
    fast_s3.faults.add(archived("log/000000000[1-5]"), archived("checkpoints/step-000000000[0-3]"))
    with ckptstore.open_store(uri, storage_options=options, retention=KeepAll()) as store:
        state = {"step": -1}
        found = store.resume(state)
        assert found is not None
        assert (found.step, state["step"]) == (5, 5)
        store.save(6, {"step": 6})
        assert [checkpoint.step for checkpoint in store] == [4, 5, 6]
        latest = store.latest()
        assert latest is not None
        assert latest.step == 6
    fast_s3.faults.clear()
    with ckptstore.open_store(uri, storage_options=options) as store:
        assert [checkpoint.step for checkpoint in store] == [0, 1, 2, 3, 4, 5, 6]
        fast_s3.faults.add(archived("distcp|index|ckptstore.json"))
        with pytest.raises(StorageArchived, match="archive class") as caught:
            store[6].load({"step": 0})
        assert "step-0000000006" in str(caught.value.file)


def test_a_store_that_is_archived_as_a_whole_is_no_empty_one(fast_s3: S3Server) -> None:
    uri, options = f"s3://test/archived/{uuid.uuid4().hex[:8]}", fast_s3.storage_options
    with ckptstore.open_store(uri, storage_options=options) as store:
        store.save(0, {"step": 0})
        with ckptstore.open_store(uri, storage_options=options) as again:
            again.resume({"step": -1})  # the newest record is a claim, and can be read
    fast_s3.faults.add(archived("log/0000000002"))
    with ckptstore.open_store(uri, storage_options=options) as store:
        with pytest.raises(StorageArchived, match="archive class"):
            store.resume({"step": -1})
        with pytest.raises(StorageArchived):
            store.latest()
    fast_s3.faults.clear()
