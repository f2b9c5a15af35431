"""Show the looks of `watch`: as JSON, or as a picture for people."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from ckptstore.errors import CkptstoreError
from ckptstore.runtime.shown import printable, show_duration, show_size, show_speed
from ckptstore.tools.cli.output import print_json_line, show_some_metrics
from ckptstore.tools.cli.terminal import Row
from ckptstore.tools.watching.look import Look, SeenAttempt, SeenCommit, SeenOnNode, SeenSigns

_MOST_ATTEMPTS = 8
"""More attempts are only counted in a picture."""
_BAR_COLUMNS = 24


def print_look(look: Look, error: CkptstoreError | None = None) -> None:
    """Print a look as one line of JSON; with the error of a later one that failed, as its trouble."""
    fields = dataclasses.asdict(look)
    fields["durable"] = None if look.durable is None else _commit_json(look.durable, look.at)
    if look.on_node is not None:
        ages = {"age_seconds": look.on_node.created_at, "not_durable_seconds": look.on_node.not_durable_since}
        fields["on_node"] |= {name: None if at is None else max(0.0, look.at - at) for name, at in ages.items()}
    fields["commits"] = [_commit_json(commit, look.at) for commit in look.commits]
    if error is not None:
        fields["changes"] = []
    print_json_line(**fields, trouble=None if error is None else error.message)


def _commit_json(commit: SeenCommit, now: float) -> dict[str, Any]:
    return {**dataclasses.asdict(commit), "age_seconds": max(0.0, now - commit.created_at)}


class Picture:
    """The last look, and the error of a later one that failed. Ages go on between looks."""

    def __init__(self, look: Look, interval_seconds: float) -> None:
        self.seen: tuple[Look, CkptstoreError | None] = look, None
        """Both in one: the picture is drawn on another thread."""
        self._end = f"every {interval_seconds:g} s; Ctrl-C ends"

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the picture now. A terminal that is too low shows the first ones."""
        now, (look, error) = time.time(), self.seen
        if error is not None:
            ago = show_duration(max(0.0, now - look.at))
            words = f"the last look that succeeded was {ago} ago, it is tried again: {printable(error.message)}"
            yield "red", "trouble", words
        yield "dim", "", self._end
        yield from look_rows(look, now=now)


def look_rows(look: Look, *, now: float) -> Iterator[Row]:
    """Yield the rows of a look, as it is `now`: seconds since the epoch by the clock of whoever watches."""
    later_seconds = max(0.0, now - look.at)
    yield "bold", "store", printable(look.uri)
    words = "no checkpoint yet"
    if look.durable is not None:
        words = f"step {look.durable.step}, {_age(look.durable, now)}, number {look.durable.number}"
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
    files = ["1 file" if attempt.num_files == 1 else f"{attempt.num_files} files"]
    if attempt.num_uploads:
        files.append("1 upload begun" if attempt.num_uploads == 1 else f"{attempt.num_uploads} uploads begun")
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
    ranks = "1 rank" if commit.world_size == 1 else f"{commit.world_size} ranks"
    size = show_size(commit.size_bytes)
    lacks = f"  without {printable(', '.join(commit.dropped))}" if commit.dropped else ""
    return [f"step {commit.step}", _age(commit, now), size, ranks, show_some_metrics(commit.metrics) + lacks]


def _age(commit: SeenCommit, now: float) -> str:
    return f"{show_duration(max(0.0, now - commit.created_at))} ago"


def _node_words(seen: SeenOnNode, now: float) -> str:
    if seen.step is None or seen.created_at is None:
        return "no fast checkpoint"
    words = f"step {seen.step}, {show_duration(max(0.0, now - seen.created_at))} ago"
    if seen.not_durable_since is None:
        return f"{words}, and the store is not behind"
    return f"{words}; the store has been behind for {show_duration(max(0.0, now - seen.not_durable_since))}"


def _sign_words(signs: SeenSigns, later_seconds: float) -> str:
    ranks = "1 rank" if signs.num_ranks == 1 else f"{signs.num_ranks} ranks"
    words = f"{ranks}, last {show_duration(signs.last_seconds + later_seconds)} ago"
    if signs.num_ranks > 1:
        words += f", rank {signs.oldest_rank} {show_duration(signs.oldest_seconds + later_seconds)} ago"
    return words
