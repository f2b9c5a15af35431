"""The upload process: no signal to its group ends it, its trainer's end does, and nobody waits for it without end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import InvalidInput, RankFailed, open_store
from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.saving import upload_process
from ckptstore.saving.upload_process import Uploader
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.s3_server import Fault, S3Server

WAIT_SECONDS = 120.0
"""The most that anything here takes, on a machine that is busy with other things."""
REFUSE_UPLOADS = Fault(action="status", match="^PUT /test/.*distcp", times=None)

TRAINER = """
import json, os, sys, time, torch
from ckptstore import open_store
uri, options, what = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
store = open_store(uri, storage_options=options)
store.install_sigterm(600.0)
if what == "forks":
    store.warm_up({"w": torch.ones(1 << 18)}, uploader="process")
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
pending = store.save_async(1, {"w": torch.ones(1 << 18)}, uploader="process")
print(store._state_saver.upload_process().pid, flush=True)
while not store.stop_requested:
    time.sleep(0.01)
print(store.finish_by(), pending.result().step, flush=True)
store.close()
"""


@contextmanager
def trainer(server: S3Server, what: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A trainer in a process group of its own, and its upload process, which gets its files not stored for now."""
    server.faults.replace([REFUSE_UPLOADS])
    environment = {
        **os.environ,
        "CKPTSTORE_RETRY_WAIT_MAX_SECONDS": "0.05",
        "CKPTSTORE_RETRY_ATTEMPTS": "1000000",
        "CKPTSTORE_RETRY_DEADLINE_SECONDS": "600",
    }
    command = [sys.executable, "-c", TRAINER, f"s3://test/{what or 'run'}", json.dumps(server.storage_options), what]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        with process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            until(lambda: any(request.status == 503 for request in server.log))
            yield process, pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        server.faults.clear()
        server.log.clear()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_signal_to_the_process_group_lets_the_last_save_finish(fast_s3: S3Server) -> None:
    """Schedulers send it to the group, some to every process; Ctrl-C at a terminal goes to the group too."""
    with trainer(fast_s3) as (process, pid):
        assert os.getpgid(pid) != os.getpgid(process.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        os.killpg(process.pid, signal.SIGTERM)
        assert not is_gone(pid)
        fast_s3.faults.clear()
        out, errors = process.communicate(timeout=WAIT_SECONDS)
        assert out.split() == ["True", "1"], errors
    until(lambda: is_gone(pid))
    with open_store("s3://test/run", storage_options=fast_s3.storage_options) as store:
        assert store[1].verify().ok


@pytest.mark.parametrize("what", ["", "forks"])
def test_it_ends_with_its_trainer_in_the_middle_of_an_upload(fast_s3: S3Server, what: str) -> None:
    """Also where a child of the trainer lives on, with copies of its open files."""
    with trainer(fast_s3, what) as (process, pid):
        process.kill()
        until(lambda: is_gone(pid))


def some_state() -> dict[str, Any]:
    return {"w": torch.ones(1 << 19)}


@pytest.mark.parametrize("when", ["before", "during"])
def test_one_that_is_stopped_is_found_out_and_replaced(
    fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(upload_process, "_SILENT_SECONDS", 3.0)
    with open_store("s3://test/stopped", storage_options=fast_s3.storage_options) as store:
        store.warm_up(some_state(), uploader="process")
        pid = store._state_saver.upload_process().pid
        fast_s3.faults.replace([REFUSE_UPLOADS])
        if when == "before":
            os.kill(pid, signal.SIGSTOP)
        pending = store.save_async(1, some_state(), uploader="process", max_failures=1)
        if when == "during":
            until(lambda: any(request.status == 503 for request in fast_s3.log))
            os.kill(pid, signal.SIGSTOP)
        assert store.finish_by(WAIT_SECONDS)
        assert "no sign of life" in str(pending.error())
        assert is_gone(pid)
        fast_s3.faults.clear()
        again = store.save_async(2, some_state(), uploader="process", max_failures=1).result(WAIT_SECONDS)
        assert again is not None
        assert again.verify().ok
    fast_s3.log.clear()


@pytest.mark.slow
def test_one_that_is_busy_for_longer_than_it_may_be_silent_is_left_alone(
    fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_process, "_SILENT_SECONDS", 3.0)
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1000000")
    fast_s3.faults.replace([Fault(action="stall", match="^PUT /test/.*distcp", seconds=6.0)])
    with open_store("s3://test/busy", storage_options=fast_s3.storage_options) as store:
        checkpoint = store.save_async(1, some_state(), uploader="process").result(WAIT_SECONDS)
        assert checkpoint is not None
        assert fast_s3.faults.pending == 0


class Unpicklable(LocalStorage):
    def __reduce__(self) -> Any:
        raise TypeError("canary")


class Unwelcome(LocalStorage):
    """Pickles, and cannot be opened in another process: as a class of the training script."""

    def __reduce__(self) -> Any:
        return _only_here, (os.getpid(),)


def _only_here(process_id: int) -> Any:
    raise ImportError(f"there is no such class in {process_id}: canary")


@pytest.mark.parametrize("kind", [Unpicklable, Unwelcome])
def test_a_storage_that_cannot_be_handed_over_is_refused_before_anything_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[LocalStorage]
) -> None:
    monkeypatch.setattr("ckptstore.transfer.opened.open_storage", lambda uri, **_options: kind(uri))
    with open_store(tmp_path / "store") as store:
        with pytest.raises(InvalidInput, match="cannot be handed to an upload process") as caught:
            store.save_async(1, some_state(), uploader="process")
        assert "uploader='thread'" in str(caught.value)
        assert "canary" not in str(caught.value)
        assert not (tmp_path / "store").exists()
        assert store.save_async(1, some_state()).result() is not None
    assert capfd.readouterr().err == ""


def test_a_process_that_cannot_start_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RankFailed, match="no upload process could be started"):
        Uploader(LocalStorage(str(tmp_path)), config=TransferConfig(), retry=RetryConfig(), rank=0)


def test_a_trainer_that_closes_in_the_middle_gets_no_traceback(
    fast_s3: S3Server, capfd: pytest.CaptureFixture[str]
) -> None:
    fast_s3.faults.replace([REFUSE_UPLOADS])
    with open_store("s3://test/closes", storage_options=fast_s3.storage_options) as store:
        store.save_async(1, some_state(), uploader="process", max_failures=1)
        until(lambda: any(request.status == 503 for request in fast_s3.log))
        store._state_saver.upload_process().close()
        assert store.finish_by(WAIT_SECONDS)
        store._background.raise_failure(max_failures=1)
    fast_s3.log.clear()
    assert "Traceback" not in capfd.readouterr().err
