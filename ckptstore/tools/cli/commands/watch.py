"""`ckptstore watch`: a store while it is written to. Reads only."""

from __future__ import annotations

import errno
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from ckptstore.errors import CkptstoreError, InvalidInput, StoreMissing
from ckptstore.opening import open_store
from ckptstore.runtime.shown import printable, show_duration, show_size, show_speed
from ckptstore.storage.base import Disk
from ckptstore.tools.cli import INTERRUPTED
from ckptstore.tools.cli.command import Call, command, parse_target
from ckptstore.tools.cli.options import DURATION, FAST, STORAGE_OPTION, STORE, option
from ckptstore.tools.cli.output import counted, json_text, show_age, show_some_metrics
from ckptstore.tools.cli.terminal import Row, can_redraw, print_rows, redrawn, sigterm
from ckptstore.tools.watching.look import Look, SeenAttempt, SeenCommit, SeenOnNode, SeenSigns
from ckptstore.tools.watching.store_watcher import StoreWatcher

_DISK_SECONDS, _SERVER_SECONDS = 2.0, 5.0
_SHORTEST_SECONDS = 0.1
_TICK_SECONDS = 0.25
"""The longest time until it ends after nobody reads any more."""
_PATIENCE_SECONDS = 2.0
"""The longest wait at the end for a look that goes on."""
_MOST_ATTEMPTS = 8
"""More attempts are only counted in a picture."""
_BAR_COLUMNS = 24


@command(
    STORE,
    option("--interval TIME", "Time between two looks.", type=DURATION, show_default="2s on a disk, else 5s"),
    option("--once", "Look once, and exit."),
    FAST,
    common=(STORAGE_OPTION, option("--json", "Print each look as a line of JSON; the default in a pipe.", "as_json")),
)
def watch(call: Call) -> None:
    """Follow the saves into STORE as they happen.

    Shows the latest checkpoint, each save in progress with its speed and an estimate of the time left, and the last
    commits. On a terminal the picture is updated in place; in a pipe each look is one line of JSON. A store that does
    not exist yet is waited for, unless --once is given.

    The estimate goes by the speed so far and the size of the checkpoint before. Nothing is written to the store, and no
    job notices. With --fast, the newest checkpoint on this node is shown too, and how long the store has been behind
    it.
    """
    if call.interval is not None and call.once:
        raise InvalidInput("--interval means nothing with --once", hint="Leave one of them out")
    if call.interval is not None and call.interval < _SHORTEST_SECONDS:
        raise InvalidInput(f"--interval is {call.interval:g} s, it must be at least {_SHORTEST_SECONDS:g} s")
    with open_store(call.store, storage_options=call.storage_options):
        pass  # it refuses what can never become a store
    tier = call.fast_tier()
    fast_directory = "" if tier is None else os.fspath(tier.path)
    watcher = StoreWatcher.at(call.store, call.storage_options, fast_directory=fast_directory)
    seconds = call.interval or (_DISK_SECONDS if isinstance(watcher.storage, Disk) else _SERVER_SECONDS)
    try:
        with sigterm(lambda number, _frame: sys.exit(128 + number)), _Looks(watcher, seconds) as looks:
            first = looks.first(waits=not call.once and parse_target(call.store).step is None)
            if call.once and not call.as_json:
                print_rows(look_rows(first, now=time.time()))
            elif call.as_json or not can_redraw():
                for look, error in [(first, None)] if call.once else looks.after(first):
                    print_look(look, error)
            else:
                seen: tuple[Look, CkptstoreError | None] = first, None
                end = f"every {seconds:g} s; Ctrl-C ends"
                with redrawn(lambda: look_rows(*seen, now=time.time(), end=end)) as draw:
                    for latest in looks.after(first):
                        seen = latest
                        draw()
    except KeyboardInterrupt:  # how one ends it; nothing was interrupted
        call.exit_code = INTERRUPTED


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

    def after(self, look: Look) -> Iterator[tuple[Look, CkptstoreError | None]]:
        """Yield a look and those that follow, each with the error of a later one that failed, for ever."""
        result: Look | CkptstoreError | None = look
        while True:
            if isinstance(result, Look):
                look = result
                yield look, None
            elif result is not None:
                yield look, result
            result = self.next()

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


def print_look(look: Look, error: CkptstoreError | None = None) -> None:
    """Print a look as one line of JSON; with the error of a later one that failed, as its trouble."""
    fields = asdict(look)
    fields["durable"] = None if look.durable is None else _commit_json(look.durable, look.at)
    if look.on_node is not None:
        ages = {"age_seconds": look.on_node.created_at, "not_durable_seconds": look.on_node.not_durable_since}
        fields["on_node"] |= {name: None if at is None else max(0.0, look.at - at) for name, at in ages.items()}
    fields["commits"] = [_commit_json(commit, look.at) for commit in look.commits]
    if error is not None:
        fields["changes"] = []
    click.echo(json_text({**fields, "trouble": None if error is None else error.message}))


def _commit_json(commit: SeenCommit, now: float) -> dict[str, Any]:
    return {**asdict(commit), "age_seconds": max(0.0, now - commit.created_at)}


def look_rows(look: Look, error: CkptstoreError | None = None, *, now: float, end: str = "") -> Iterator[Row]:
    """Yield the rows of a look, as it is `now`: seconds since the epoch by the clock of whoever watches. A terminal
    that is too low shows the first ones: the error of a later look that failed, and how it `end`s."""
    if error is not None:
        words = f"the last look that succeeded was {show_age(look.at, now)}, it is tried again"
        yield "red", "trouble", f"{words}: {printable(error.message)}"
    if end:
        yield "dim", "", end
    later_seconds = max(0.0, now - look.at)
    yield "bold", "store", printable(look.uri)
    words = "no checkpoint yet"
    if look.durable is not None:
        words = f"step {look.durable.step}, {show_age(look.durable.created_at, now)}, number {look.durable.number}"
    yield "", "durable", words
    if look.on_node is not None:
        yield "", "this node", _node_words(look.on_node, now)
    for attempt in look.attempts[:_MOST_ATTEMPTS]:
        style, label = ("red", "silent") if attempt.status == "silent" else ("green", "in flight")
        yield style, label, f"step {attempt.step}{_progress(attempt)}"
        yield from (("", "", line) for line in _attempt_lines(attempt, later_seconds))
    if len(look.attempts) > _MOST_ATTEMPTS:
        yield "", "", f"{len(look.attempts) - _MOST_ATTEMPTS} more attempts"
    if not look.attempts:
        yield "", "in flight", "nothing"
    if look.signs is not None:
        yield "", "signs", _sign_words(look.signs, later_seconds)
    commits = [_commit_facts(commit, now) for commit in look.commits]
    widths = [max(map(len, column)) for column in zip(*commits, strict=True)]
    for index, facts in enumerate(commits):
        line = "  ".join(fact.ljust(width) for fact, width in zip(facts, widths, strict=True)).rstrip()
        yield "", "" if index else "commits", line
    for note in look.notes:
        yield "dim", "note", printable(note)


def _progress(attempt: SeenAttempt) -> str:
    if not attempt.expected_bytes or attempt.status != "writing":
        return ""
    share = min(1.0, attempt.size_bytes / attempt.expected_bytes)
    return f"  [{'#' * int(share * _BAR_COLUMNS):-<{_BAR_COLUMNS}}] {share:4.0%}"


def _attempt_lines(attempt: SeenAttempt, later_seconds: float) -> Iterator[str]:
    size = show_size(attempt.size_bytes)
    files = [counted(attempt.num_files, "file")]
    if attempt.num_uploads:
        files.append(f"{counted(attempt.num_uploads, 'upload')} begun")
    if attempt.status != "writing":
        silent = f"no sign of life for {show_duration(attempt.silent_seconds + later_seconds)}"
        first = silent if attempt.status == "silent" else "all is stored, the commit comes next"
        yield ", ".join([first, size, *files])
        return
    if attempt.expected_bytes is not None:
        size += f" of about {show_size(attempt.expected_bytes)}"
        files.append(f"the size of step {attempt.expected_as_step} is expected")
    facts = [size]
    if attempt.bytes_per_second is not None:
        facts.append(show_speed(attempt.bytes_per_second, 1.0))
    if attempt.left_seconds is not None:
        facts.append(f"about {show_duration(attempt.left_seconds)} left")
    yield ", ".join(facts)
    yield ", ".join(files)


def _commit_facts(commit: SeenCommit, now: float) -> list[str]:
    size, ranks = show_size(commit.size_bytes), counted(commit.world_size, "rank")
    lacks = f"  without {printable(', '.join(commit.dropped))}" if commit.dropped else ""
    return [
        f"step {commit.step}",
        show_age(commit.created_at, now),
        size,
        ranks,
        show_some_metrics(commit.metrics) + lacks,
    ]


def _node_words(seen: SeenOnNode, now: float) -> str:
    if seen.step is None or seen.created_at is None:
        return "no fast checkpoint"
    words = f"step {seen.step}, {show_age(seen.created_at, now)}"
    if seen.not_durable_since is None:
        return f"{words}, and the store is not behind"
    return f"{words}; the store has been behind for {show_duration(max(0.0, now - seen.not_durable_since))}"


def _sign_words(signs: SeenSigns, later_seconds: float) -> str:
    words = f"{counted(signs.num_ranks, 'rank')}, last {show_duration(signs.last_seconds + later_seconds)} ago"
    if signs.num_ranks > 1:
        words += f", rank {signs.oldest_rank} {show_duration(signs.oldest_seconds + later_seconds)} ago"
    return words
