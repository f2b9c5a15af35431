"""A hostile store gets nothing into a report but text, and keeps none from being made."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing import checked, files, look

from ckptstore import open_store
from ckptstore.errors import InvalidInput
from ckptstore.format.record import sealed
from ckptstore.tools.cli.output import redacted_command_line
from ckptstore.tools.report.lines import can_be_named
from ckptstore.tools.report.page import page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
NAMES = [EVIL, '"><b>', "<!--", "'; drop", "\u202eevil", "__proto__", "constructor", "a\nb", "\x1b[31mred", "é\u0301"]


def test_every_text_of_a_hostile_store_stays_text(tmp_path: Path) -> None:
    root = tmp_path / "runs <b>&amp;"
    source = files(tmp_path / "source")
    (source / "<img src=x onerror=alert(1)>.bin").write_bytes(b"x")
    numbers = (float("nan"), float("inf"), float("-inf"), 1e308, -0.0)
    with open_store(root) as store:
        for step, name in enumerate(NAMES):
            metrics = {name: numbers[step % len(numbers)], f"loss {name}": float("nan")}
            store.save_directory(step, source, metrics=metrics, metadata={name: EVIL})
        store.save(50, {EVIL: torch.ones(3), "model": {name: torch.ones(2) for name in NAMES}})
        seen = look(store)
    text = page({"version": 1, "created_at": 1, "command": EVIL, "live": False, "stores": [seen]})
    assert EVIL not in text
    assert "<img src=x" not in text
    assert seen["metrics"] == sorted({*NAMES, *(f"loss {name}" for name in NAMES)})
    assert seen["checkpoints"][0]["metrics"][EVIL] == "NaN"
    assert [seen["checkpoints"][at]["metrics"][NAMES[at]] for at in (1, 2)] == ["Infinity", "-Infinity"]
    assert all(best == [] for best in (item["best_of"] for item in seen["checkpoints"][:-1])), "NaN is never the best"
    (tree,) = seen["trees"].values()
    assert len(tree["digests"]) == len(NAMES) + 1


def test_numbers_that_are_none(tmp_path: Path, run: Callable[..., Any]) -> None:
    """What no save writes, but a record may hold."""
    root = tmp_path / "store"
    with open_store(root) as store:
        store.save_directory(1, files(tmp_path / "source"), metrics={"loss": 1.0})
    path = max((root / "log").iterdir())
    path.chmod(0o644)
    record = json.loads(path.read_bytes())
    nan = {"$t": "float", "v": "NaN"}
    record["change"]["checkpoint"]["metrics"] = {"high": 10**400, "loss": nan, "huge": -(10**400)}
    del record["body_sha256"]
    path.write_bytes(sealed(json.dumps(record).encode()))
    (root / "latest.json").unlink()
    out = tmp_path / "out.html"
    (found,) = checked(json.loads(run("report", root, "--json", "--html", out).stdout))["stores"]
    assert set(found["checkpoints"][0]["metrics"]) == {"high", "loss", "huge"}
    out.read_text(encoding="utf-8")


def test_a_terminal_is_not_told_to_do_anything(tmp_path: Path, run: Callable[..., Any]) -> None:
    root = tmp_path / "a\x1b[2Jb"
    with open_store(root) as store:
        store.save_directory(1, files(tmp_path / "source"))
        seen = look(store)
    assert seen["commands"] == seen["checkpoints"][0]["commands"] == {}
    told = run("report", root, "--html", tmp_path / "x.html").stderr
    assert "no lines to copy" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("uri", "usable"),
    [
        ("/a b/c'd", True),
        ("s3://bucket/x", True),
        ("s3://key:secret@bucket/x", False),
        ("memory://here", False),
        ("/a\nb", False),
        ("/\u202ea", False),
    ],
)
def test_which_uris_a_line_can_name(uri: str, usable: bool) -> None:
    assert can_be_named(uri) is usable


def test_no_secret_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    for arguments in (
        ("report", "s3://me:sesame@bucket/x", "--json"),
        ("serve", "s3://me:sesame@bucket/x"),
        ("report", str(tmp_path), "--json", "--storage-option", "key=sesame"),
    ):
        assert "sesame" not in run(*arguments, code=InvalidInput.exit_code).output
    words = ["ckptstore", "report", "s3://b/x", "--storage-option", "key=sesame", "--storage-option=a=sesame"]
    words.append("az://me:sesame@x/y")
    monkeypatch.setattr(sys, "argv", words)
    assert "sesame" not in redacted_command_line()
    assert shlex.split(redacted_command_line())[:3] == ["ckptstore", "report", "s3://b/x"]
    with open_store("memory://needs-options") as store:
        store.save_directory(1, files(tmp_path / "source"))
        assert look(store, needs_options=["key", "secret"])["needs_options"] == ["key", "secret"]
