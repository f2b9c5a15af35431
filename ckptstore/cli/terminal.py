"""What only a terminal gets to see: progress bars and tables with lines. The only importer of rich."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.events import BytesMoved, Event, listening


def is_terminal(stream: Any) -> bool:
    """Whether somebody looks at the stream while it is written."""
    return bool(stream.isatty())


@contextmanager
def progress(description: str, *, shown: bool | None = None) -> Iterator[None]:
    """Show the bytes that this process moves as a bar on stderr, while the context lasts.

    It is shown on a terminal only, unless `shown` says otherwise.
    """
    if not (is_terminal(sys.stderr) if shown is None else shown):
        yield
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
    )
    with (
        bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        listening(_Bar(bar, description)),
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

    def __init__(self, bar: Any, description: str) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=None)
        self._moved_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, BytesMoved):
            with self._lock:
                self._moved_bytes += event.size_bytes
                total = max(event.total_bytes, self._moved_bytes)
                self._bar.update(self._task, completed=self._moved_bytes, total=total)


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
