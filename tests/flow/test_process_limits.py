"""Processes at their limits: that may start no thread of ours, or end while they save. Nothing is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks

import ckptstore
from ckptstore import FastTier, KeepLatest
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if request.param == "disk":
        yield str(tmp_path / "store"), {}
        return
    with s3_server(buckets=["test"]) as server:
        yield "s3://test/run", server.storage_options


@contextmanager
def no_threads() -> Iterator[set[str]]:
    """Refuse threads of ours while the context lasts; the set gets their names."""
    start = threading.Thread.start
    refused: set[str] = set()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ckptstore"):
            refused.add(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield refused


def live_without_threads(uri: str, options: dict[str, Any], directory: str, group: str | None = None) -> set[str]:
    """Save, load and prune, and return the names of the threads that were wanted."""
    with no_threads() as refused:
        state = {"w": torch.ones(1 << 18), "steps": torch.arange(3)}
        more: dict[str, Any] = {"retention": KeepLatest(2), "grace_seconds": 0}
        with ckptstore.open_store(uri, group=group, storage_options=options, **more) as store:
            store.save(1, state)
            for step in (2, 3):
                store.save_async(step, state).result()
            latest = store.resume(state)
            assert latest.step == 3
            assert torch.equal(latest.to_dict()["w"], state["w"])
            latest.to_directory(directory)
            with latest.as_directory() as path:
                assert path.is_dir()
            assert [checkpoint.step for checkpoint in store.follow(timeout_seconds=0.1)] == [2, 3]
            assert store.trash() == [], "step 1 was pruned, by the save itself"
    return refused


def test_a_process_without_threads(place: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    refused = live_without_threads(*place, str(tmp_path / "copy"), "solo")
    assert {"ckptstore-prune", "ckptstore-save", "ckptstore-transfer-0"} <= refused


def rank_without_threads(uri: str, directory: str) -> set[str]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    return live_without_threads(uri, {}, f"{directory}/{rank}")


def test_ranks_without_threads_that_meet_through_torch(tmp_path: Path) -> None:
    for refused in run_ranks(2, rank_without_threads, str(tmp_path / "store"), str(tmp_path), timeout_seconds=120):
        assert {"ckptstore-group", "ckptstore-save"} <= refused


def test_without_threads_fast_checkpoints_stay_on_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, tier = tmp_path / "store", FastTier(tmp_path / "nvme", keep=2)
    with no_threads() as refused, ckptstore.open_store(root, group="solo", fast=tier) as store:
        store.save(1, {"w": torch.ones(8)})
        store.save_async(2, {"w": torch.full((8,), 2.0)}).result()
    assert "ckptstore-drain" in refused
    assert "stay on the nodes" in caplog.text
    state = {"w": torch.zeros(8)}
    with ckptstore.open_store(root, group="solo", fast=tier) as store:
        resumed = store.resume(state)
        assert (resumed is not None, state["w"].tolist()) == (True, [2.0] * 8)


PROGRAM = """
import atexit, sys, threading, time
import torch
import ckptstore

when, how, root, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])

def train():
    time.sleep(0.3)
    store = ckptstore.open_store(root, group="solo", storage_options=options or None)
    for step in range(2):
        state = {"w": torch.full((2 << 20,), float(step)), "step": step}
        if how == "save":
            store.save(step, state)
        else:
            store.save_async(step, state)
    if how != "forget":
        store.close()
        print("closed", flush=True)

if when == "thread":
    threading.Thread(target=train).start()
elif when == "atexit":
    atexit.register(train)
else:
    train()
"""


def ended(*arguments: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("thread", "save_async"),
        ("atexit", "forget"),
        ("now", "forget"),
        *(
            pytest.param(when, how, marks=pytest.mark.slow)
            for when, how in (("thread", "save"), ("thread", "forget"), ("atexit", "save"), ("atexit", "save_async"))
        ),
    ],
)
def test_every_save_is_there(tmp_path: Path, when: str, how: str) -> None:
    done = ended(when, how, str(tmp_path / "store"), "{}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("closed" in done.stdout) == (how != "forget")
    with ckptstore.open_store(tmp_path / "store", group="solo") as store:
        assert [checkpoint.step for checkpoint in store] == [0, 1]
        assert store[1].verify().ok


@pytest.mark.parametrize("when", [pytest.param("thread", marks=pytest.mark.slow), "atexit"])
def test_a_bucket_that_is_claimed_at_the_end(when: str) -> None:
    with s3_server(buckets=["test"]) as server:
        done = ended(when, "save_async", "s3://test/end", repr(server.storage_options))
        assert done.returncode == 0, done.stderr
        with ckptstore.open_store("s3://test/end", group="solo", storage_options=server.storage_options) as store:
            assert [checkpoint.step for checkpoint in store] == [0, 1]


@pytest.mark.parametrize("when", [pytest.param("thread", marks=pytest.mark.slow), "atexit", "now", "collected"])
def test_an_error_that_nobody_takes_is_told_at_the_end(tmp_path: Path, when: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/checkpoints").write_text("no directory")
    program = PROGRAM.replace("range(2)", "range(1)")
    if when == "collected":  # with the store, which nobody holds any more
        program += "import gc\nfor thread in threading.enumerate()[1:]:\n    thread.join()\ngc.collect()\n"
    done = ended(when, "forget", str(tmp_path / "store"), "{}", program=program)
    assert "the process ends, and the last asynchronous save has failed: " in done.stderr
    assert "Not a directory" in done.stderr


def test_a_relative_path_needs_a_directory(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch, ckptstore\n"
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "try:\n    ckptstore.open_store('runs/a')\n"
        "except ckptstore.InvalidInput as error:\n    print(error)\n"
        "with ckptstore.open_store(sys.argv[1]) as store:\n    store.save(1, {'a': 1})\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert "'runs/a' is a relative path, and the current directory of this process was removed" in done.stdout
