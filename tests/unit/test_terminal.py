"""The progress bar: it counts what moves while it is shown, and is not there otherwise."""

from __future__ import annotations

import pytest

from ckptstore.events import BytesMoved, Event, FileStored, emit, is_heard
from ckptstore.tools.cli import terminal
from ckptstore.tools.cli.terminal import Moved, progress


def moved(total_bytes: int | None, *events: Event) -> list[tuple[int, int]]:
    """What is shown of events: how much has moved, and of how much."""
    shown: list[tuple[int, int]] = []
    listener = Moved(lambda moved_bytes, total, _seconds: shown.append((moved_bytes, total)), total_bytes)
    for event in events:
        listener(event)
    return shown


def test_the_bar_adds_up_what_moves() -> None:
    parts = [BytesMoved(key="a", size_bytes=size_bytes, total_bytes=100) for size_bytes in (10, 20)]
    assert moved(None, *parts, FileStored(key="a", size_bytes=30, seconds=0.1, rank=0)) == [(10, 100), (30, 100)]
    assert moved(300, *parts) == [(10, 300), (30, 300)], "a known total is that of all transfers"


def test_a_second_transfer_does_not_run_over_the_end() -> None:
    parts = [BytesMoved(key=key, size_bytes=size, total_bytes=size) for key, size in (("a", 100), ("b", 5))]
    assert moved(None, *parts)[-1] == (105, 105)


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
