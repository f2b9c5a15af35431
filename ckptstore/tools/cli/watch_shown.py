"""The three forms in which `watch` shows its looks: a picture on a terminal, lines in a pipe, JSON."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any, Protocol

import click

from ckptstore.errors import CkptstoreError
from ckptstore.runtime.shown import printable, show_duration
from ckptstore.tools.cli.output import print_json_line, show_time
from ckptstore.tools.cli.terminal import Line, Redrawn
from ckptstore.tools.cli.watch_words import age_words, attempt_facts, commit_facts, node_words, sign_words
from ckptstore.tools.watching.look import Happening, Look, SeenAttempt, SeenCommit

_MOST_ATTEMPTS = 8
"""That a terminal shows."""
_ONCE_COLUMNS = 100
_LABEL_COLUMNS = 11
_BAR_COLUMNS = 24
_DRAW_SECONDS = 1.0


class WatchForm(Protocol):
    """What shows looks."""

    def show(self, look: Look) -> None:
        """A look succeeded."""

    def show_trouble(self, error: CkptstoreError) -> None:
        """A look failed; another one follows."""

    def tick(self) -> None:
        """Some time has passed since the last look."""


class JsonLines:
    """One object for each look. After a look that failed it holds what the last one saw, and what the trouble is."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}

    def show(self, look: Look) -> None:
        """See `WatchForm.show`."""
        fields = dataclasses.asdict(look)
        fields["durable"] = None if look.durable is None else _commit_json(look.durable, look.at)
        if look.on_node is not None:
            ages = {"age_seconds": look.on_node.created_at, "not_durable_seconds": look.on_node.not_durable_since}
            fields["on_node"] |= {name: None if at is None else max(0.0, look.at - at) for name, at in ages.items()}
        fields["commits"] = [_commit_json(commit, look.at) for commit in look.commits]
        self._fields = _valid(fields)
        print_json_line(**self._fields, trouble=None)

    def show_trouble(self, error: CkptstoreError) -> None:
        """See `WatchForm.show_trouble`."""
        print_json_line(**{**self._fields, "changes": []}, trouble=_valid(error.message))

    def tick(self) -> None:
        """See `WatchForm.tick`."""


def _commit_json(commit: SeenCommit, now: float) -> dict[str, Any]:
    return {**dataclasses.asdict(commit), "age_seconds": max(0.0, now - commit.created_at)}


def _valid(value: Any) -> Any:
    """The value with text that is valid Unicode: names in a store need not be."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid(name): _valid(item) for name, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, list | tuple) else value


class TextLines:
    """A line for each thing that changes, and for each attempt that has grown."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, int]] = {}
        self._is_first = True
        self._trouble = ""
        self._notes: set[str] = set()
        self._on_node: tuple[int | None, bool] | None = None

    def show(self, look: Look) -> None:
        """See `WatchForm.show`."""
        if self._is_first:
            self._echo(look.at, f"watching {printable(look.uri)}: {_durable_words(look)}")
            self._is_first = False
        if self._trouble:
            self._echo(look.at, "the store answers again")
            self._trouble = ""
        for change in look.changes:
            if change.kind != "begin":  # the line of the attempt says it
                self._echo(look.at, _change_words(change, look))
        begun = {change.step for change in look.changes if change.kind == "begin"}
        for attempt in look.attempts:
            self._show_attempt(attempt, look.at, is_begun=attempt.step in begun)
        self._shown = {name: shown for name, shown in self._shown.items() if name in _names(look)}
        self._show_node(look)
        for note in look.notes:
            if note not in self._notes:
                self._notes.add(note)
                self._echo(look.at, printable(note))

    def _show_node(self, look: Look) -> None:
        """A line for each fast checkpoint that is the newest here when somebody looks."""
        seen = look.on_node
        if seen is not None and (seen.step, seen.is_durable) != self._on_node:
            self._on_node = seen.step, seen.is_durable
            self._echo(look.at, f"on this node: {node_words(seen, now=look.at)}")

    def _show_attempt(self, attempt: SeenAttempt, at: float, *, is_begun: bool) -> None:
        known, present = self._shown.get(attempt.attempt), (attempt.status, attempt.size_bytes)
        if known != present:
            self._shown[attempt.attempt] = present
            begun = "begins, " if known is None and is_begun else ""
            self._echo(at, f"step {attempt.step}: {begun}{', '.join(attempt_facts(attempt))}")

    def show_trouble(self, error: CkptstoreError) -> None:
        """See `WatchForm.show_trouble`; the same trouble is told once."""
        if error.message != self._trouble:
            self._trouble = error.message
            self._echo(time.time(), f"no look succeeds, it is tried again: {printable(error.message)}")

    def tick(self) -> None:
        """See `WatchForm.tick`."""

    @staticmethod
    def _echo(at: float, text: str) -> None:
        click.echo(f"{show_time(at)}  {text}")


def _names(look: Look) -> set[str]:
    return {attempt.attempt for attempt in look.attempts}


def _durable_words(look: Look) -> str:
    if look.durable is None:
        return "no checkpoint yet"
    facts = [f"step {look.durable.step}", age_words(look.durable, now=look.at), *commit_facts(look.durable)]
    return f"last durable {', '.join(facts)}"


def _change_words(change: Happening, look: Look) -> str:
    commit = next((item for item in look.commits if item.number == change.number), None)
    return change.text if commit is None else f"{change.text}: {', '.join(commit_facts(commit))}"


class OnePicture:
    """A look on its own, not for a terminal alone."""

    def show(self, look: Look) -> None:
        """See `WatchForm.show`."""
        for _, line in picture_lines(look, now=look.at, columns=_ONCE_COLUMNS):
            click.echo(line.rstrip())

    def show_trouble(self, error: CkptstoreError) -> None:
        """The first look fails or is the only one."""

    def tick(self) -> None:
        """See `WatchForm.tick`."""


class Picture:
    """The last look, drawn again in its place; ages go on between looks."""

    def __init__(self, *, interval_seconds: float) -> None:
        self._terminal = Redrawn(sys.stdout)
        self._ends = f"every {interval_seconds:g} s; Ctrl-C ends"
        self._look: Look | None = None
        self._trouble = ""
        self._drawn_at = 0.0

    def show(self, look: Look) -> None:
        """See `WatchForm.show`."""
        self._look, self._trouble = look, ""
        self._draw()

    def show_trouble(self, error: CkptstoreError) -> None:
        """See `WatchForm.show_trouble`."""
        self._trouble = printable(error.message)
        self._draw()

    def tick(self) -> None:
        """See `WatchForm.tick`."""
        if time.monotonic() - self._drawn_at >= _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._look is not None:
            now = time.time()
            lines = list(picture_lines(self._look, now=now, columns=self._terminal.columns))
            if self._trouble:
                ago = show_duration(max(0.0, now - self._look.at))
                words = f"the last look that succeeded was {ago} ago, it is tried again: {self._trouble}"
                lines += [("red", line) for line in _wrapped("trouble", words, self._terminal.columns)]
            self._terminal.draw([*lines, ("dim", self._ends)])


def picture_lines(look: Look, *, now: float, columns: int) -> Iterator[Line]:
    """A look in lines of that width, as it is `now`: seconds since the epoch by the clock of whoever watches."""
    later_seconds = max(0.0, now - look.at)
    uri = printable(look.uri)
    yield "bold", uri if len(uri) <= columns else f"...{uri[3 - columns :]}"
    words = "no checkpoint yet"
    if look.durable is not None:
        words = f"step {look.durable.step}, {age_words(look.durable, now=now)}, number {look.durable.number}"
    yield from _styled("", "durable", words, columns)
    if look.on_node is not None:
        yield from _styled("", "this node", node_words(look.on_node, now=now), columns)
    for attempt in look.attempts[:_MOST_ATTEMPTS]:
        yield from _attempt_lines(attempt, later_seconds, columns)
    if len(look.attempts) > _MOST_ATTEMPTS:
        yield from _styled("", "", f"{len(look.attempts) - _MOST_ATTEMPTS} more attempts", columns)
    if not look.attempts:
        yield from _styled("", "in flight", "nothing", columns)
    if look.signs is not None:
        yield from _styled("", "signs", sign_words(look.signs, later_seconds=later_seconds), columns)
    for index, commit in enumerate(look.commits):
        words = "  ".join([f"step {commit.step}", age_words(commit, now=now), *commit_facts(commit)])
        yield "", f"{('commits' if index == 0 else ''):{_LABEL_COLUMNS}}{words}"
    for note in look.notes:
        yield from _styled("dim", "note", printable(note), columns)


def _attempt_lines(attempt: SeenAttempt, later_seconds: float, columns: int) -> Iterator[Line]:
    facts = attempt_facts(attempt, silent_seconds=attempt.silent_seconds + later_seconds)
    style, label = ("red", "silent") if attempt.status == "silent" else ("green", "in flight")
    head = f"step {attempt.step}"
    if attempt.expected_bytes and attempt.status == "writing":
        share = min(1.0, attempt.size_bytes / attempt.expected_bytes)
        room = min(_BAR_COLUMNS, columns - _LABEL_COLUMNS - len(head) - 10)
        if room >= 4:
            head += f"  [{'#' * int(share * room):-<{room}}]"
        head += f" {share:4.0%}"
    yield style, f"{label:{_LABEL_COLUMNS}}{head}"
    yield from _styled("", "", ", ".join(facts), columns)


def _styled(style: str, label: str, words: str, columns: int) -> Iterator[Line]:
    yield from ((style, line) for line in _wrapped(label, words, columns))


def _wrapped(label: str, words: str, columns: int) -> list[str]:
    """Words behind a label, broken into lines of that width."""
    lines = textwrap.wrap(words, max(8, columns - _LABEL_COLUMNS)) or [""]
    return [f"{label if index == 0 else '':{_LABEL_COLUMNS}}{line}" for index, line in enumerate(lines)]
