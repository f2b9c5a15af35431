"""What only a terminal gets to see: progress bars, tables with lines, lines that are drawn again in their place. The
only importer of rich."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.events import BytesMoved, Event, listening
from ckptstore.runtime.shown import show_duration, show_size, show_speed


def is_terminal(stream: Any) -> bool:
    """Whether somebody looks at the stream while it is written."""
    return stream is not None and bool(stream.isatty())  # None: it was closed before Python began


_LINE_SECONDS = 10.0
"""How often a line says how far it is, where there is no terminal."""


@contextmanager
def progress(description: str, *, total_bytes: int | None = None, shown: bool | None = None) -> Iterator[None]:
    """Show the bytes that this process moves on stderr, while the context lasts: as a bar with the time left on a
    terminal, else as a line now and then. Nothing is shown with `shown` False, and a bar anywhere with True.

    `total_bytes` is what will be moved, where that is known.
    """
    if shown is False:
        yield
        return
    if not (is_terminal(sys.stderr) or shown):
        with listening(_Lines(description, total_bytes)):
            yield
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TextColumn("{task.fields[speed]}"),
        bars.TimeRemainingColumn(),
    )
    with (
        bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        listening(_Bar(bar, description, total_bytes)),
    ):
        yield


@contextmanager
def counting(*, shown: bool | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr while the context lasts, moved by calls with a description, how much is done, of how much.

    It is shown on a terminal only, unless `shown` says otherwise.
    """
    if not (is_terminal(sys.stderr) if shown is None else shown):
        yield lambda _description, _completed, _total: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TextColumn("{task.description}"))
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda description, completed, total: bar.update(
            task, description=description, completed=completed, total=max(completed, total)
        )


class _Bar:
    """A listener that moves one bar; transfers on several threads add up."""

    def __init__(self, bar: Any, description: str, total_bytes: int | None) -> None:
        self._bar = bar
        self._total_bytes = total_bytes
        self._task = bar.add_task(description, total=total_bytes, speed="")
        self._moved_bytes = 0
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, BytesMoved):
            with self._lock:
                self._moved_bytes += event.size_bytes
                total = max(self._total_bytes or event.total_bytes, self._moved_bytes)
                speed = show_speed(self._moved_bytes, time.monotonic() - self._started)
                self._bar.update(self._task, completed=self._moved_bytes, total=total, speed=speed)


class _Lines:
    """A listener that says on stderr how far it is, once in a while."""

    def __init__(self, description: str, total_bytes: int | None) -> None:
        self._description = description
        self._total_bytes = total_bytes
        self._moved_bytes = 0
        self._started = self._said = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, BytesMoved):
            return
        with self._lock:
            self._moved_bytes += event.size_bytes
            now = time.monotonic()
            if now - self._said < _LINE_SECONDS:
                return
            self._said = now
            moved, seconds = self._moved_bytes, now - self._started
        text = f"{self._description}: {show_size(moved)}"
        if self._total_bytes:
            left_seconds = max(0, self._total_bytes - moved) * seconds / moved
            text += f" of {show_size(self._total_bytes)}, {show_duration(left_seconds)} left"
        print(f"{text}, {show_speed(moved, seconds)}", file=sys.stderr, flush=True)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[bool]) -> None:
    """Print a table to stdout with lines and bold headers; `right` says which columns hold numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header, is_number in zip(headers, right, strict=True):
        table.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


Line = tuple[str, str]
"""The style ("", "bold", "dim", "red" or "green") and the text, which has nothing in it that moves a terminal."""

_STYLES = {"": "", "bold": "\x1b[1m", "dim": "\x1b[2m", "red": "\x1b[31m", "green": "\x1b[32m"}


class Redrawn:
    """Lines at the end of a terminal that are drawn again in their place. What was there before stays above them.

    Each line is cut to the width that the terminal has now, and the first lines are left out where it is too low. The
    cursor is not hidden, so nothing is to be undone in the end. NO_COLOR is kept to.
    """

    def __init__(self, stream: Any) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream)
        self._drawn_columns: list[int] = []

    @staticmethod
    def can(stream: Any) -> bool:
        """Whether the stream is a terminal on which a cursor moves; TERM=dumb says that it does not."""
        from rich.console import Console

        return is_terminal(stream) and not Console(file=stream).is_dumb_terminal

    @property
    def columns(self) -> int:
        """How many columns a line has."""
        return max(1, self._console.size.width - 1)

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace what was drawn before. Raises OSError when nobody looks any more."""
        from rich.cells import cell_len

        width, height = self._console.size
        # a terminal that became narrower has broken the lines that are there
        rows = sum(max(1, -(-columns // max(1, width))) for columns in self._drawn_columns)
        shown = [(style, _cut(text, self.columns)) for style, text in lines[-max(1, height - 1) :]]
        up = f"\x1b[{rows}A" if rows else ""
        plain = self._console.no_color
        text = "".join(
            f"{line}\n" if plain or not style else f"{_STYLES[style]}{line}\x1b[0m\n" for style, line in shown
        )
        self._stream.write(f"\r{up}\x1b[J{text}")
        self._stream.flush()
        self._drawn_columns = [cell_len(line) for _, line in shown]

    def _styled(self, style: str, line: str) -> str:
        return line if self._console.no_color or not style else f"{_STYLES[style]}{line}\x1b[0m"


def _cut(text: str, columns: int) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= columns:
        return text
    return f"{set_cell_size(text, columns - 3)}..." if columns > 3 else set_cell_size(text, columns)
