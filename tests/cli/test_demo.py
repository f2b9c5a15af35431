"""The demo itself, as `make demo` runs it: slow, because it trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_tells_its_story(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptstore.tools.cli", "demo", "--store", str(tmp_path / "stores")]
    command += ["--width", "16", "--html", str(tmp_path / "demo.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rank 1 died by SIGKILL") == 2
    assert done.stdout.count("the torn attempt is invisible: the store holds the steps [1, 2], the latest is 2") == 2
    assert done.stdout.count("resumed from step 2; ranks now: 2, at the save: 2") == 2
    assert done.stdout.count("resumed from step 3; ranks now: 1, at the save: 2") == 2
    assert done.stdout.count("step 1 goes to the trash: no rule keeps it") >= 2
    invited = done.stdout.partition("The stores stay.")[2].splitlines()[1:]
    assert [line.split("ckptstore ")[-1].split()[0] for line in invited if "ckptstore " in line] == [
        *("ls", "show", "diff", "report")
    ]
    for line in invited[:2]:
        words = line.split("ckptstore ")[-1].split()
        subprocess.run([sys.executable, "-m", "ckptstore.tools.cli", *words], check=True, capture_output=True)
    differences = [float(text) for text in re.findall(r"by (\S+) at most", done.stdout)]
    assert len(differences) == 2
    assert max(differences) <= 1e-6
    text = (tmp_path / "demo.html").read_text()
    (embedded,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)
    for store in json.loads(embedded)["stores"]:  # as it was before gc
        assert [attempt["step"] for attempt in store["torn"]] == [3]
        assert store["health"]["garbage_bytes"] > 0
    for name in ("ddp", "sharded"):
        with open_store(tmp_path / "stores" / name / "crashed") as store:
            assert [checkpoint.step for checkpoint in store] == [3, 4]
            assert all(checkpoint.verify().ok for checkpoint in store)
            assert len(list((tmp_path / "stores" / name / "crashed/checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--engine", "ray", "--html", "{}/demo.html"], "--html is drawn by --engine processes"),
        (["--html", "{}/nowhere/demo.html"], "There is no directory"),
        (["--engine", "ray", "--picture", "{}/nowhere/demo.html"], "There is no directory"),
        (["--store", "{}"], "is not empty"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(run: Any, tmp_path: Path, given: list[str], why: str) -> None:
    (tmp_path / "file").write_text("mine")
    assert why in run("demo", *(word.format(tmp_path) for word in given), code=2).stderr
