"""What `ckptstore report` asks for, and how it writes its file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seeing import files

from ckptstore import open_store
from ckptstore.errors import StorageError
from ckptstore.tools.cli.commands.report import write_whole

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store") as store:
        store.save_directory(1, files(tmp_path / "source"), metrics={"loss": 0.5})
    return tmp_path / "store"


def test_a_page_a_document_or_both_have_to_be_asked_for(root: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    assert "Ask for --html FILE" in run("report", root, code=2).stderr
    assert "Missing argument" in run("report", "--json", code=2).stderr
    both = run("report", root, "--json", "--html", tmp_path / "a.html")
    assert both.stdout.startswith('{"version": 1')
    assert "step-0000000001" in (tmp_path / "a.html").read_text()
    assert run("report", root, "--html", tmp_path / "b.html").stdout == f"{tmp_path / 'b.html'}\n"
    assert "could not be written" in run("report", root, "--html", tmp_path / "none/b.html", code=30).stderr
    run("report", root, "--html", tmp_path, code=2)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "a.html", tmp_path / "link.html"
    path.write_text("before")
    link.symlink_to(path)
    write_whole(link, "after")
    assert (path.read_text(), link.is_symlink()) == ("after", True)

    def full(self: Path, *_arguments: Any, **_keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        write_whole(path, "later")
    assert path.read_text() == "after"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.html", "link.html"]


def test_a_pipe_is_written_to_as_it_is(root: Path) -> None:
    command = [sys.executable, "-m", "ckptstore.tools.cli", "report", str(root), "--html", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<!doctype html>")
