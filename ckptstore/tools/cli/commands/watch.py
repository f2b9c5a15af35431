"""`ckptstore watch`: a store while it is written to. Reads only."""

from __future__ import annotations

import errno
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ckptstore.errors import CkptstoreError, InvalidInput, StoreMissing
from ckptstore.opening import open_store
from ckptstore.runtime.shown import printable
from ckptstore.storage.base import Disk
from ckptstore.tools.cli import INTERRUPTED
from ckptstore.tools.cli.kinds import DURATION, STORE
from ckptstore.tools.cli.options import fast_option, storage_option, tier_at
from ckptstore.tools.cli.targets import parse_target
from ckptstore.tools.cli.terminal import can_redraw, print_rows, redrawn
from ckptstore.tools.cli.watch_shown import Picture, look_rows, print_look
from ckptstore.tools.watching.look import Look
from ckptstore.tools.watching.store_watcher import StoreWatcher

_DISK_SECONDS, _SERVER_SECONDS = 2.0, 5.0
_SHORTEST_SECONDS = 0.1
_TICK_SECONDS = 0.25
"""The longest time until it ends after nobody reads any more."""
_PATIENCE_SECONDS = 2.0
"""The longest wait at the end for a look that goes on."""


@click.command()
@click.argument("store", type=STORE)
@click.option(
    "--interval", type=DURATION, metavar="TIME", show_default="2s on a disk, else 5s", help="Time between two looks."
)
@click.option("--once", is_flag=True, help="Look once, and exit.")
@fast_option
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print each look as a line of JSON; the default in a pipe.")
def command(
    store: str,
    interval: float | None,
    once: bool,
    fast_path: str | None,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Follow the saves into STORE as they happen.

    Shows the latest checkpoint, each save in progress with its speed and an estimate of the time left, and the last
    commits. On a terminal the picture is updated in place; in a pipe each look is one line of JSON. A store that does
    not exist yet is waited for, unless --once is given.

    The estimate goes by the speed so far and the size of the checkpoint before. Nothing is written to the store, and no
    job notices. With --fast, the newest checkpoint on this node is shown too, and how long the store has been behind
    it.
    """
    if interval is not None and once:
        raise InvalidInput("--interval means nothing with --once", hint="Leave one of them out")
    if interval is not None and interval < _SHORTEST_SECONDS:
        raise InvalidInput(f"--interval is {interval:g} s, it must be at least {_SHORTEST_SECONDS:g} s")
    with open_store(store, storage_options=storage_options):
        pass  # it refuses what can never become a store
    tier = tier_at(fast_path)
    watcher = StoreWatcher.at(store, storage_options, fast_directory="" if tier is None else os.fspath(tier.path))
    seconds = interval or (_DISK_SECONDS if isinstance(watcher.storage, Disk) else _SERVER_SECONDS)
    try:
        with _ended_by_sigterm(), _Looks(watcher, seconds) as looks:
            first = looks.first(waits=not once and parse_target(store).step is None)
            if once and not as_json:
                print_rows(look_rows(first, now=time.time()))
            elif as_json or not can_redraw():
                _print_all(looks, first, once=once)
            else:
                _draw_all(looks, first, seconds)
    except KeyboardInterrupt:  # how one ends it; nothing was interrupted
        click.get_current_context().exit(INTERRUPTED)


def _print_all(looks: _Looks, look: Look, *, once: bool) -> None:
    print_look(look)
    while not once:
        result = looks.next()
        if isinstance(result, Look):
            look = result
            print_look(look)
        elif result is not None:
            print_look(look, result)


def _draw_all(looks: _Looks, first: Look, interval_seconds: float) -> None:
    picture = Picture(first, interval_seconds)
    with redrawn(picture.rows) as draw:
        while True:
            result = looks.next()
            if isinstance(result, Look):
                picture.seen = result, None
            elif result is not None:
                picture.seen = picture.seen[0], result
            if result is not None:
                draw()


def _check_read() -> None:
    """Raise BrokenPipeError when nobody reads stdout any more: else the next change would find it out."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # it is no file of the system
        return
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")


class _Looks:
    """Looks on a thread of their own: a storage that does not answer holds up neither the picture nor Ctrl-C."""

    def __init__(self, watcher: StoreWatcher, interval_seconds: float) -> None:
        self._watcher = watcher
        self._interval_seconds = interval_seconds
        self._results: queue.Queue[Look | Exception] = queue.Queue(maxsize=1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptstore-watch", daemon=True)

    def __enter__(self) -> _Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_PATIENCE_SECONDS)
        if not self._thread.is_alive():
            self._watcher.close()

    def first(self, *, waits: bool) -> Look:
        """Return the first look; with `waits` that of a store that does not exist yet, once it does. Raises what the
        look raises."""
        is_waiting = False
        while not isinstance(result := self.next(), Look):
            if isinstance(result, StoreMissing) and waits:
                if not is_waiting:
                    click.echo(f"{printable(result.message)} yet: waiting for its first save; Ctrl-C ends", err=True)
                is_waiting = True
            elif result is not None:
                raise result
        return result

    def next(self) -> Look | CkptstoreError | None:
        """Return the next look or its error, None when there is none soon. Raises BrokenPipeError when nobody reads."""
        _check_read()
        try:
            result = self._results.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return None
        if isinstance(result, Look | CkptstoreError):
            return result
        raise result

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                result: Look | Exception = self._watcher.look()
            except Exception as error:  # whoever waits for the look raises it
                result = error
            while not self._ended.is_set():
                try:
                    self._results.put(result, timeout=_TICK_SECONDS)
                    break
                except queue.Full:
                    continue
            self._ended.wait(self._interval_seconds)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind, so that connections are closed; the exit code is the one of shells for it."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
