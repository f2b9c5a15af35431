"""Draw on a terminal: progress bars, pictures that are drawn again in their place. The only importer of rich."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ckptstore.events import BytesMoved, Event, listening
from ckptstore.runtime.shown import show_duration, show_size, show_speed


def is_terminal(stream: Any) -> bool:
    """Return True if somebody looks at the stream while it is written."""
    return stream is not None and bool(stream.isatty())  # None: it was closed before Python began


_LINE_SECONDS = 10.0
"""The pause between two lines about progress, where there is no terminal."""


@contextmanager
def progress(description: str, *, quiet: bool, total_bytes: int | None = None) -> Iterator[None]:
    """Show the bytes that this process moves on stderr, while the context lasts: as a bar with the time left on a
    terminal, else as a line now and then; nothing if it is to be `quiet`.

    `total_bytes` is what will be moved, where that is known.
    """
    if quiet:
        yield
        return
    if not is_terminal(sys.stderr):
        said_seconds = 0.0

        def say(moved_bytes: int, _total_bytes: int, seconds: float) -> None:
            nonlocal said_seconds
            if seconds - said_seconds < _LINE_SECONDS:
                return
            said_seconds = seconds
            text = f"{description}: {show_size(moved_bytes)}"
            if total_bytes:
                left_seconds = max(0, total_bytes - moved_bytes) * seconds / moved_bytes
                text += f" of {show_size(total_bytes)}, {show_duration(left_seconds)} left"
            print(f"{text}, {show_speed(moved_bytes, seconds)}", file=sys.stderr, flush=True)

        with listening(Moved(say, total_bytes)):
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
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total_bytes, speed="")

        def draw(moved_bytes: int, total_bytes: int, seconds: float) -> None:
            bar.update(task, completed=moved_bytes, total=total_bytes, speed=show_speed(moved_bytes, seconds))

        with listening(Moved(draw, total_bytes)):
            yield


class Moved:
    """A listener that adds up the bytes that several threads move, and shows them with their total and the seconds."""

    def __init__(self, show: Callable[[int, int, float], None], total_bytes: int | None) -> None:
        self._show, self._total_bytes = show, total_bytes
        self._moved_bytes, self._started = 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, BytesMoved):
            with self._lock:
                self._moved_bytes += event.size_bytes
                total_bytes = max(self._total_bytes or event.total_bytes, self._moved_bytes)
                self._show(self._moved_bytes, total_bytes, time.monotonic() - self._started)


@contextmanager
def sigterm(handler: Callable[[int, Any], Any] = signal.default_int_handler) -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C while the context lasts, or by a handler: what is open is closed then too."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def counting() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr while the context lasts, moved by calls with a description, how much is done, of how much.
    It is shown on a terminal only."""
    if not is_terminal(sys.stderr):
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


Row = tuple[str, str, str]
"""The style ("", "bold", "dim", "red" or "green"), the label and the text, with nothing in it that moves a terminal."""


def can_redraw() -> bool:
    """Return True if stdout is a terminal on which a cursor moves; TERM=dumb says that it does not."""
    from rich.console import Console

    return is_terminal(sys.stdout) and not Console().is_dumb_terminal


def print_rows(rows: Iterable[Row], *, columns: int = 100) -> None:
    """Print a picture to stdout; `columns` is its width where that is no terminal."""
    from rich.console import Console

    Console(width=None if is_terminal(sys.stdout) else columns).print(_picture(rows))


@contextmanager
def redrawn(rows: Callable[[], Iterable[Row]]) -> Iterator[Callable[[], None]]:
    """Draw a picture in its place on the terminal, once a second and at each call of what the context gives."""
    from rich.live import Live

    with Live(get_renderable=lambda: _picture(rows()), refresh_per_second=1, redirect_stderr=False) as live:
        live.refresh()
        yield live.refresh


def _picture(rows: Iterable[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=9, no_wrap=True)
    table.add_column(overflow="fold")
    for style, label, text in rows:
        table.add_row(Text(label, style), Text(text, style))
    return table
