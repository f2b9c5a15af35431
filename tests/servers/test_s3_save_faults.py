"""Saves to S3 through faults: each is committed once and whole, or fails clearly and nothing of it is ever seen."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.errors import AccessDenied
from ckptstore.storage.base import UploadGone
from ckptstore.storage.open import open_storage
from ckptstore.testing import run_ranks
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

SIZE_BYTES = 33 << 20
numbers = itertools.count()

COMMITTED = {
    "the commit's answer is lost": Fault(action="lose_answer", match="^PUT /test/saves/[^?]*/log/"),
    "the commit is throttled": Fault(action="status", match="^PUT /test/saves/[^?]*/log/", times=3),
    "the commit meets a conflict": Fault(
        action="status", match="^PUT /test/saves/[^?]*/log/", status=409, code="ConditionalRequestConflict"
    ),
    "the manifest's answer is lost": Fault(action="lose_answer", match="^PUT .*ckptstore.json"),
    "the upload is aborted before a part": Fault(
        action="status", match="partNumber=2", status=404, code="NoSuchUpload"
    ),
    "the upload is aborted before its end": Fault(
        action="status", match="^POST .*uploadId", status=404, code="NoSuchUpload"
    ),
    "a part is lost before the end": Fault(action="status", match="^POST .*uploadId", status=400, code="InvalidPart"),
    "credentials expire": Fault(action="status", match="partNumber=2", status=400, code="ExpiredToken"),
}
REFUSED = {
    "uploads are aborted again and again": Fault(
        action="status", match="^PUT .*partNumber", times=None, status=404, code="NoSuchUpload"
    ),
    "access is refused in the middle": Fault(
        action="status", match="^PUT .*partNumber", skip=1, times=None, status=403, code="AccessDenied"
    ),
    "the clocks differ": Fault(action="status", match="^PUT", times=None, status=403, code="RequestTimeTooSkewed"),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "large.bin").write_bytes(os.urandom(SIZE_BYTES))
    (directory / "small.bin").write_bytes(os.urandom(1000))
    return directory


@pytest.fixture
def store(fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch, files: Path) -> Iterator[ckptstore.CheckpointStore]:
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.1")
    uri = f"s3://test/saves/{next(numbers)}"
    with ckptstore.open_store(uri, storage_options=fast_s3.storage_options) as store:
        store.save_directory(0, files)
        yield store
        fast_s3.faults.clear()
    assert fast_s3.objects.uploads == {}, "no upload is left behind"


@pytest.mark.parametrize("name", COMMITTED)
def test_it_is_committed_once(store: Any, fast_s3: S3Server, files: Path, name: str) -> None:
    fast_s3.faults.replace([COMMITTED[name]])
    checkpoint = store.save_directory(1, files)
    assert fast_s3.faults.pending == 0, "it has happened"
    assert [found.step for found in store] == [0, 1]
    assert checkpoint.verify().ok
    with ckptstore.open_store(store.uri, storage_options=fast_s3.storage_options) as other:
        assert other.latest().number == checkpoint.number
        assert other.save_directory(2, files).number > checkpoint.number


@pytest.mark.parametrize("name", REFUSED)
def test_it_fails_clearly_and_nothing_is_seen(store: Any, fast_s3: S3Server, files: Path, name: str) -> None:
    fast_s3.faults.replace([REFUSED[name]])
    with pytest.raises((AccessDenied, UploadGone)) as caught:
        store.save_directory(1, files)
    assert caught.value.committed is False
    fast_s3.faults.clear()
    assert [found.step for found in store] == [0]
    assert store.save_directory(1, files).verify().ok


def save_and_die(uri: str, options: dict[str, Any], files: str) -> None:
    """The server never answers the second part; it is on its way when the process is killed."""

    def die(storage: Any) -> None:
        while not storage.unfinished(""):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    with ckptstore.open_store(uri, storage_options=options) as store:
        threading.Thread(target=die, args=(open_storage(uri, storage_options=options),), daemon=True).start()
        store.save_directory(1, files)


def test_a_process_killed_in_the_middle_of_a_part(store: Any, fast_s3: S3Server, files: Path) -> None:
    fast_s3.faults.replace([Fault(action="stall", match="partNumber=2", times=None)])
    options = fast_s3.storage_options
    run_ranks(1, save_and_die, store.uri, options, str(files), expect_killed=[0])
    fast_s3.faults.clear()
    assert len(fast_s3.objects.uploads) == 1, "what a killed process leaves"
    with ckptstore.open_store(store.uri, storage_options=options) as again:
        assert [found.step for found in again] == [0]
        assert again.resume().step == 0
        assert again.save_directory(1, files).verify().ok
        garbage = again.collect_garbage()
        assert len(garbage.unfinished) == 1
        assert [found.step for found in again] == [0, 1]
