"""What `watch` prints: at any width, with hostile names, on a terminal that is a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from ckptstore import open_store
from ckptstore.errors import StorageUnavailable
from ckptstore.runtime.shown import printable
from ckptstore.tools.cli.commands import watch
from ckptstore.tools.cli.commands.watch import look_rows, print_look
from ckptstore.tools.cli.terminal import print_rows, redrawn
from ckptstore.tools.watching.look import Happening, Look, SeenAttempt, SeenCommit, SeenOnNode, SeenSigns

DEADLINE_SECONDS = 120.0
MIB = 1 << 20
HOSTILE = "lo\x1b[2Jss\x9b31m\u202e\n\udc80"


def commit(step: int = 30, **metrics: float) -> SeenCommit:
    fields: dict[str, Any] = {"number": step // 10, "step": step, "epoch": 1, "kind": "state", "world_size": 2}
    return SeenCommit(**fields, created_at=1_000_000.0 - step, size_bytes=45 * MIB, metrics=metrics)


def attempt(**fields: Any) -> SeenAttempt:
    defaults: dict[str, Any] = {
        "attempt": "step-0000000040-e0001-0123abcd",
        "step": 40,
        "epoch": 1,
        "status": "writing",
    }
    defaults |= {"num_files": 4, "size_bytes": 24 * MIB, "num_uploads": 2, "expected_bytes": 45 * MIB}
    defaults |= {"expected_as_step": 30, "bytes_per_second": 3.0 * MIB, "left_seconds": 7.0, "silent_seconds": 1.0}
    return SeenAttempt(**{**defaults, **fields})


def look(**fields: Any) -> Look:
    defaults: dict[str, Any] = {"at": 1_000_000.0, "uri": "s3://bucket/a/rather/long/prefix/of/a/run", "epoch": 1}
    defaults |= {"num_live": 2, "durable": commit(loss=0.25), "on_node": None, "attempts": (attempt(),)}
    defaults |= {"commits": (commit(loss=0.25), commit(20, loss=0.5)), "changes": (), "notes": ()}
    defaults["signs"] = SeenSigns(num_ranks=2, last_seconds=3.0, oldest_rank=1, oldest_seconds=20.0)
    return Look(**{**defaults, **fields})


def picture(shown: Look, columns: int = 100, later_seconds: float = 0.0) -> list[str]:
    with redirect_stdout(StringIO()) as drawn:
        print_rows(look_rows(shown, now=shown.at + later_seconds), columns=columns)
    return [line.rstrip() for line in drawn.getvalue().splitlines()]


def test_a_picture_has_the_rate_the_guess_and_ages_that_go_on() -> None:
    assert picture(look(), 120, later_seconds=10.0) == [
        "store      s3://bucket/a/rather/long/prefix/of/a/run",
        "durable    step 30, 40 s ago, number 3",
        "in flight  step 40  [############------------]  53%",
        "           24.0 MiB of about 45.0 MiB, 3.0 MiB/s, about 7 s left",
        "           4 files, 2 uploads begun, the size of step 30 is expected",
        "signs      2 ranks, last 13 s ago, rank 1 30 s ago",
        "commits    step 30  40 s ago  45.0 MiB  2 ranks  loss=0.25",
        "           step 20  30 s ago  45.0 MiB  2 ranks  loss=0.5",
    ]


def test_the_age_on_the_node_stands_next_to_the_durable_one() -> None:
    behind = SeenOnNode(step=45, created_at=999_990.0, is_durable=False, not_durable_since=999_900.0)
    level = SeenOnNode(step=45, created_at=999_990.0, is_durable=True, not_durable_since=None)
    nothing = SeenOnNode(step=None, created_at=None, is_durable=True, not_durable_since=None)
    assert [picture(look(on_node=seen), later_seconds=10.0)[2] for seen in (behind, level, nothing)] == [
        "this node  step 45, 20 s ago; the store has been behind for 110 s",
        "this node  step 45, 20 s ago, and the store is not behind",
        "this node  no fast checkpoint",
    ]


def test_an_error_stands_above_the_last_look_that_succeeded() -> None:
    """Where a low terminal shows it."""
    (style, label, text), end, *rest = look_rows(look(), StorageUnavailable("away"), now=1e6, end="every 2 s")
    assert (style, label) == ("red", "trouble")
    assert text.endswith("ago, it is tried again: away")
    assert end == ("dim", "", "every 2 s")
    assert next(text for _, _, text in rest) == look().uri


def test_a_picture_is_drawn_before_anything_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = StringIO()
    monkeypatch.setattr("rich.live.get_console", lambda: Console(file=drawn, force_terminal=True))
    with redrawn(lambda: [("", "label", "text")]):
        assert "label" in drawn.getvalue()


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_picture_keeps_what_matters_at_any_width(columns: int) -> None:
    lines = picture(look(), columns)
    assert max(map(len, lines)) <= columns
    assert "about7sleft" in re.sub(r"\s+", "", "".join(lines))


def test_a_silent_attempt_and_one_that_commits_say_so() -> None:
    silent = attempt(status="silent", silent_seconds=700.0, bytes_per_second=None, left_seconds=None)
    lines = picture(look(attempts=(silent,)), later_seconds=20.0)
    assert lines[2] == "silent     step 40"
    assert lines[3].strip() == "no sign of life for 12 min, 24.0 MiB, 4 files, 2 uploads begun"
    lines = picture(look(attempts=(attempt(status="committing"),)))
    assert lines[3].strip().startswith("all is stored, the commit comes next, 24.0 MiB")
    lines = picture(look(attempts=tuple(attempt(step=step) for step in range(100, 120))))
    assert any(line.strip() == "12 more attempts" for line in lines)


def test_hostile_names_move_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = commit(**{HOSTILE: 1.0})
    change = Happening(kind="commit", text="step 30 is committed", step=30, number=3)
    shown = look(uri=f"/tmp/{HOSTILE}", durable=hostile, commits=(hostile,), notes=(HOSTILE,), changes=(change,))
    print_look(shown)
    print_look(shown, StorageUnavailable(HOSTILE))
    printed = capsys.readouterr().out.splitlines()
    rows = look_rows(shown, StorageUnavailable(HOSTILE), now=1e6)
    for line in [*picture(shown, 200), *printed, *(text for _, _, text in rows)]:
        assert line.isprintable(), line
    assert any(printable(HOSTILE)[:8] in line for line in picture(shown, 200) if line.startswith("commits"))
    assert len(printed) == 2


# On a terminal


class Terminal:
    """The command on a pseudo-terminal of a given size, and what it has drawn."""

    def __init__(self, *arguments: object, columns: int, rows: int = 24, env: Mapping[str, str] | None = None) -> None:
        self.end, theirs = pty.openpty()
        self.resize(columns, rows)
        inherited = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS", "LINES", "NO_COLOR"}}
        own: Any = {"env": {**inherited, "TERM": "xterm-256color", **(env or {})}, "start_new_session": True}
        command = [sys.executable, "-m", "ckptstore.tools.cli", "watch", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, **own)
        os.close(theirs)
        self.drawn, self.seen = "", 0

    def resize(self, columns: int, rows: int = 24) -> None:
        ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str) -> str:
        """Read until the text is there; returns what was drawn since the last call, up to the text."""
        deadline, start = time.monotonic() + DEADLINE_SECONDS, self.seen
        while text not in self.drawn[start:]:
            assert time.monotonic() < deadline, self.drawn
            if select.select([self.end], [], [], 1.0)[0]:
                self.drawn += os.read(self.end, 65536).decode()
        self.seen = self.drawn.index(text, start) + len(text)
        return self.drawn[start : self.seen]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.end)

    def interrupted(self) -> tuple[int, str]:
        """Ctrl-C; returns the exit status and what it printed to stderr."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, errors.decode()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    with open_store(tmp_path / "store") as opened:
        opened.save_directory(1, tmp_path / "source", metrics={f"metric_{number}": number / 3 for number in range(9)})
    return tmp_path / "store"


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PLAIN_STYLES = {"\x1b[0m", "\x1b[1m", "\x1b[2m"}
"""Bold and dim are no colours."""


def test_a_terminal_is_drawn_again_in_its_place_and_follows_its_width(store: Path) -> None:
    with Terminal("--interval", "0.2", store, columns=40) as terminal:
        first = terminal.until("+8")  # the end of the picture
        rows = [_ESCAPES.sub("", row).strip("\r") for row in first.split("\n")]
        assert max(map(len, rows)) <= 40
        assert any(row.startswith("durable    step 1, ") for row in rows)
        assert "\x1b[1m" in first
        again = terminal.until("+8")
        assert again.count("\x1b[1A\x1b[2K") == len(rows) - 1
        terminal.resize(160)
        terminal.until("1 rank  metric_0=0 +8")  # a line that was broken
        with open_store(store) as opened:
            opened.save_directory(2, store.parent / "source")
        terminal.until("step 2, ")
        assert terminal.interrupted() == (130, "")


def test_a_terminal_without_colour_and_a_dumb_one(store: Path) -> None:
    with Terminal("--interval", "0.2", store, columns=80, env={"NO_COLOR": "1"}) as terminal:
        assert {code for code in _ESCAPES.findall(terminal.until("Ctrl-C ends")) if code[-1] == "m"} <= PLAIN_STYLES
        assert terminal.interrupted() == (130, "")
    with Terminal("--interval", "0.2", store, columns=80, env={"TERM": "dumb"}) as terminal:
        assert "\x1b" not in terminal.until('"trouble": null')
        assert terminal.interrupted() == (130, "")


def test_a_terminal_that_is_lower_than_the_picture(store: Path) -> None:
    with Terminal("--interval", "0.2", store, columns=80, rows=3) as terminal:
        terminal.until("Ctrl-C ends")
        terminal.until("...")  # stands for the rest
        assert terminal.until("...").count("\x1b[1A") == 2
        assert terminal.interrupted() == (130, "")


def test_a_look_that_hangs_holds_up_no_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that never answers: the end waits for it a moment, and no longer."""
    monkeypatch.setattr(watch, "_PATIENCE_SECONDS", 0.1)
    never, closed = threading.Event(), []

    class Hanging:
        def look(self) -> Look:
            never.wait()
            raise AssertionError

        def close(self) -> None:
            closed.append(True)

    watcher: Any = Hanging()
    with watch._Looks(watcher, 1.0) as looks:
        assert looks.next() is None
    assert closed == []
    never.set()
