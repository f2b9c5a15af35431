"""Saves while the interpreter ends: from a thread that outlives the main one, and from a handler of `atexit`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow

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
else:
    atexit.register(train)
"""


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("thread", "save_async"),
        ("atexit", "forget"),
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
    if when in ("now", "collected"):
        program = program.replace("atexit.register(train)", "train()")
    if when == "collected":  # with the store, which nobody holds any more
        program += "import gc\nfor thread in threading.enumerate()[1:]:\n    thread.join()\ngc.collect()\n"
    command = [sys.executable, "-W", "ignore", "-c", program, when, "forget", str(tmp_path / "store"), "{}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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
