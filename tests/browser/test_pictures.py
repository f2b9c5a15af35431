"""The pictures of the docs, and the page of a real job of which a rank was killed.

With PICTURES set to a folder, the pictures are written there: `make pictures`.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documents import document, trained
from PIL import Image
from reading import Reader

from ckptstore.tools.demo.launch import run_job
from ckptstore.tools.report.page import page

MOST_BYTES = 150_000
PICTURES = os.environ.get("PICTURES", "")

Picture = Callable[..., None]


@pytest.fixture
def picture(reader: Reader, tmp_path: Path) -> Picture:
    """Takes a picture of the page from one element to the end of another one, and holds it to its size."""

    def take(name: str, first: str = "body > header", last: str = "#curves") -> None:
        script = """const boxes = [...arguments].map((one) => document.querySelector(one).getBoundingClientRect());
        const [first, last] = boxes;
        return {x: 0, y: first.top + scrollY, width: innerWidth, height: last.bottom - first.top + 16, scale: 1}"""
        clip = reader.run(script, first, last)
        told = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        data = base64.b64decode(reader.driver.execute_cdp_cmd("Page.captureScreenshot", told)["data"])
        target = Path(PICTURES or tmp_path) / f"{name}.png"
        with Image.open(io.BytesIO(data)) as image:
            plain = image.convert("RGB")
            assert len(plain.getcolors(maxcolors=1 << 24) or []) > 8, f"{name} shows nothing"
            plain.save(target, optimize=True)
        assert target.stat().st_size < MOST_BYTES, f"{target} is too large for the docs"

    return take


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1000, False), ("dark", 1000, True), ("phone", 360, False)]
)
def test_pictures_of_the_whole(reader: Reader, picture: Picture, name: str, width: int, dark: bool) -> None:
    reader.show(page(document(trained())), width=width, height=740 if width < 500 else 900, dark=dark)
    picture(f"look-{name}")


@pytest.mark.slow
def test_pictures_of_a_save_and_of_tensors(reader: Reader, picture: Picture) -> None:
    value = trained()
    reader.show(page(document(value)), width=1000)
    reader.one('[data-key="open/26"]').click()
    picture("look-save", '[data-key="open/26"]', ".details")
    reader.show(page(document(value)), width=1000, dark=True)
    for _ in range(3):
        reader.run("document.querySelector('.area').click()")
    reader.run("document.activeElement.blur()")
    picture("look-tensors", "#tensors", "#tensors .key")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_page_of_a_job_of_which_a_rank_was_killed(reader: Reader, picture: Picture, tmp_path: Path) -> None:
    """The demo's own training: rank 1 dies in the middle of its upload of step 3, and the job starts again."""
    root = tmp_path / "demo"
    given = ("--store", str(root), "--report", str(tmp_path / "losses.json"), "--width", "8", "--batch-size", "480")
    ended = run_job(2, (*given, "--kill-rank", "1", "--kill-step", "3"), tell=print)
    assert (ended.failed_rank, ended.signal) == (1, signal.SIGKILL)
    assert run_job(2, given, tell=print).failed_rank is None
    html = tmp_path / "demo.html"
    command = [sys.executable, "-m", "ckptstore.tools.cli", "report", "demo", "--html", str(html), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)["stores"]

    reader.look_at(html, width=1000)
    (torn,) = found["torn"]
    assert reader.column("Attempt", table="#log-body table") == [torn["attempt"]]
    assert reader.column("Why", table="#log-body table") == [torn["why"]]
    assert torn["attempt"].startswith("step-0000000003-e0001-")
    assert reader.all(".mark-torn")
    numbers = [str(one["number"]) for one in reversed(found["checkpoints"])]
    assert reader.column("Number") == numbers
    assert reader.column("Status") == [one["status"] for one in reversed(found["checkpoints"])]
    jobs = [one for one in found["changes"] if one["kind"] == "claim"]
    assert [one.text for one in reader.all(".chart")[0].find_elements("css selector", "text.rule")] == [
        f"job {one['epoch']}" for one in jobs
    ]
    newest = found["checkpoints"][-1]
    reader.one(f'[data-key="open/{newest["number"]}"]').click()
    check_save(reader, newest)
    reader.one('[data-key^="choose/"]').click()
    reader.all('[data-key^="choose/"]')[1].click()
    check_changes(reader, found)
    assert reader.overflow() == 0
    assert reader.errors() == []
    assert reader.requests() == []
    reader.show(html.read_text().replace(f"{tmp_path}/", ""), width=1000)  # where tests lie is of no use in the docs
    picture("look-killed")


def check_save(reader: Reader, checkpoint: dict[str, Any]) -> None:
    """The bars and the numbers are those of the manifest."""
    timings = checkpoint["timings"]
    assert reader.column("requests", table=".details table") == [str(rank["requests"]) for rank in timings["ranks"]]
    bars = sum(len(set(rank["seconds"]) & {"agree", "stage", "upload", "wait", "commit"}) for rank in timings["ranks"])
    assert len(reader.all(".details .timeline rect")) == bars


def check_changes(reader: Reader, store: dict[str, Any]) -> None:
    """The tensors that are told to differ are those whose digests differ."""
    before, after = store["checkpoints"][-2:]
    old, new = (store["trees"][str(one["number"])] for one in (before, after))
    keys = store["layouts"][new["layout"]]["keys"]
    assert store["layouts"][old["layout"]]["keys"] == keys
    pairs = list(zip(keys, old["digests"], new["digests"], strict=True))
    changed = {key for key, was, now in pairs if None not in (was, now) and was != now}
    equal = sum(was == now and was is not None for _, was, now in pairs)
    told = reader.text("#tensor-changes")
    assert f"{len(changed):,} changed" in told
    assert f"{equal:,} equal" in told
