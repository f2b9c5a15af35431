"""What looks at a store goes on past what is damaged, and prints any name that a file may have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store

STRICT = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}


def directory_of(root: Path, step: int) -> Path:
    (found,) = (root / "checkpoints").glob(f"step-{step:010d}-*")
    return found


def test_verify_all_goes_on_after_a_checkpoint_that_is_gone(run: Any, run_json: Any, store: Path) -> None:
    (directory_of(store, 20) / "ckptstore.json").unlink()
    lines = run("verify", "--all", store, code=3).stdout.splitlines()
    assert lines[1] == "  ckptstore.json: missing, expected the committed one, found nothing"
    assert [line.partition(",")[0] for line in (lines[0], *lines[2:])] == ["step 20: DAMAGED", "step 30: ok", "log: ok"]
    found = run_json("verify", "--all", store, code=3)
    assert [report["ok"] for report in found["reports"]] == [False, True]


def test_verify_all_goes_on_after_a_record_that_is_gone(run: Any, store: Path) -> None:
    (store / "log" / "0000000003.json").unlink()
    lines = run("verify", "--all", store, code=3).stdout.splitlines()
    assert lines[0].startswith("step 30: ok")
    assert lines[1:] == ["log: log/0000000003.json is missing, or, in a replica, not here yet"]


def test_verify_all_says_that_there_was_nothing_to_check(run: Any, store: Path) -> None:
    with open_store(store) as opened:
        opened.remove_all()
    assert run("verify", "--all", store).stdout == "no checkpoints\nlog: ok\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_of_files_move_no_terminal_and_may_be_no_unicode(run: Any, run_json: Any, store: Path) -> None:
    with open(os.fsencode(directory_of(store, 20)) + b"/a\x1b[2J\xff", "wb"):
        """Somebody put a file there."""
    (store / "checkpoints" / "b\x1b[2J").write_text("x")
    assert "  a\\x1b[2J\\udcff: extra, expected nothing" in run("verify", f"{store}@20", code=3).stdout
    assert run_json("verify", f"{store}@20", code=3)["reports"][0]["problems"][0]["file"] == "a\x1b[2J\\udcff"
    assert "left: checkpoints/b\\x1b[2J: " in run("gc", "--dry-run", store).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_place_whose_name_is_no_unicode_is_printed_as_its_bytes(store: Path) -> None:
    place = os.fsencode(store.parent) + b"/a\xff"
    shutil.copytree(os.fsencode(store), place)
    command = [sys.executable, "-m", "ckptstore"]
    done = subprocess.run([*command, "latest", place], env=STRICT, capture_output=True, check=True)
    assert os.path.isfile(done.stdout.strip() + b"/ckptstore.json")
    done = subprocess.run([*command, "latest", place, "--json"], env=STRICT, capture_output=True, check=True)
    assert b"a\\\\udcff/checkpoints/" in done.stdout
