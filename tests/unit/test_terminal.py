"""The progress bar: it counts what moves while it is shown, and is not there otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.events import BytesMoved, FileStored, emit, is_heard
from ckptstore.tools.cli import terminal
from ckptstore.tools.cli.terminal import _Bar, progress


class Bar:
    """Stands for rich's, and remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def add_task(self, description: str, total: int | None, speed: str) -> str:
        return description

    def update(self, task: str, *, completed: int, total: int, speed: str) -> None:
        assert speed.endswith("B/s")
        self.told.append((completed, total))


def test_the_bar_adds_up_what_moves() -> None:
    bar: Any = Bar()
    listener = _Bar(bar, "copy", None)
    for size_bytes in (10, 20):
        listener(BytesMoved(key="a", size_bytes=size_bytes, total_bytes=100))
    listener(FileStored(key="a", size_bytes=30, seconds=0.1, rank=0))
    assert bar.told == [(10, 100), (30, 100)]


def test_a_second_transfer_does_not_run_over_the_end() -> None:
    bar: Any = Bar()
    listener = _Bar(bar, "verify", None)
    listener(BytesMoved(key="a", size_bytes=100, total_bytes=100))
    listener(BytesMoved(key="b", size_bytes=5, total_bytes=50))
    assert bar.told[-1] == (105, 105)


def test_the_bar_listens_only_while_it_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda _stream: True)
    with progress("copy", quiet=True):
        assert not is_heard(BytesMoved)
    with progress("copy", quiet=False):
        assert is_heard(BytesMoved)
        emit(BytesMoved(key="a", size_bytes=10, total_bytes=100))
    assert not is_heard(BytesMoved)
    assert capsys.readouterr().out == ""


def test_a_known_total_is_that_of_all_transfers() -> None:
    bar: Any = Bar()
    listener = _Bar(bar, "verify", 300)
    listener(BytesMoved(key="a", size_bytes=100, total_bytes=100))
    assert bar.told == [(100, 300)]


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress("copy", quiet=False, total_bytes=300):
        emit(BytesMoved(key="a", size_bytes=100, total_bytes=100))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.0)
    with progress("copy", quiet=False, total_bytes=300):
        emit(BytesMoved(key="a", size_bytes=100, total_bytes=100))
    with progress("copy", quiet=True):
        emit(BytesMoved(key="a", size_bytes=100, total_bytes=100))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("copy: 100 B of 300 B, ")
    assert " left, " in line
