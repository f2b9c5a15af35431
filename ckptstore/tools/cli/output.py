"""Print the results of commands: as one JSON object, or as lines for people."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.events import CheckpointSkipped, Event, listening
from ckptstore.format.encoding import dump_json
from ckptstore.retention import judging_first
from ckptstore.runtime.shown import printable
from ckptstore.storage.uri import redact
from ckptstore.tools.cli.terminal import is_terminal

_SECRET_OPTIONS = ("--storage-option", "--target-option")


def print_json(**fields: Any) -> None:
    """Print one JSON object, with the version of its schema; a float that JSON lacks as in the store format."""
    click.echo(json.dumps(_plain(fields), indent=2))


def print_json_line(**fields: Any) -> None:
    """Print one JSON object on one line."""
    click.echo(json.dumps(_plain(fields)))


def _plain(fields: Mapping[str, Any]) -> Any:
    return json.loads(dump_json(_valid({"version": 1, **fields}), what="the output"))


def _valid(value: Any) -> Any:
    """Return the value with text that is valid Unicode: names in a store need not be."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid(name): _valid(item) for name, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, list | tuple) else value


def redacted_command_line() -> str:
    """Return the command line without the values of storage options and without secrets in URIs."""
    words: list[str] = []
    for word in sys.argv[1:]:
        is_value = words[-1:] != [] and words[-1] in _SECRET_OPTIONS
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if is_value or (equals and option in _SECRET_OPTIONS):
            words.append(f"{word.partition('=')[0]}=...")
        else:
            words.append(f"{option}{equals}{redact(value)}")
    return shlex.join(["ckptstore", *words])


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of a checkpoint that every command prints."""
    return {
        "step": checkpoint.step,
        "number": checkpoint.number,
        "kind": checkpoint.kind,
        "created_at": checkpoint.created_at,
        "world_size": checkpoint.world_size,
        "size_bytes": checkpoint.size_bytes,
        "thinned": None if checkpoint.thinned is None else checkpoint.thinned.to_json(),
        "metrics": checkpoint.metrics,
        "uri": checkpoint.uri,
    }


def provenance_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what is known of the program that saved a checkpoint, as texts for people by name."""
    found = checkpoint.provenance
    if found is None:
        return {}
    state = " (modified)" if found.is_dirty else ""
    texts = {
        "commit": f"{found.commit}{state}" if found.commit else "",
        "command line": shlex.join(found.argv),
        "hosts": "" if found.num_hosts is None else str(found.num_hosts),
        **{f"{name} version": version for name, version in sorted(found.versions.items())},
    }
    return {printable(name): printable(text) for name, text in texts.items() if text}


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below headers, aligned; a column of numbers to the right. On a terminal each row is one line: the
    widest texts and headers lose their middle. Unprintable characters are escaped."""
    headers, *rows = ([*map(printable, row)] for row in [headers, *rows])
    right = [all(_is_number(row[index]) for row in rows) for index, _ in enumerate(headers)]
    widths = [max(len(row[index]) for row in [headers, *rows]) for index, _ in enumerate(headers)]
    if is_terminal(sys.stdout):
        of_numbers = [max((len(row[index]) for row in rows), default=0) for index, _ in enumerate(headers)]
        _narrow(widths, [most if is_right else 8 for most, is_right in zip(of_numbers, right, strict=True)])
    for row in [headers, *rows]:
        cells = [shortened(cell, width) for cell, width in zip(row, widths, strict=True)]
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        click.echo(click.style(line, bold=True) if row is headers else line)


def _is_number(cell: str) -> bool:
    return cell.removeprefix("-")[:1].isdigit() or cell == ""


def _narrow(widths: list[int], least: Sequence[int]) -> None:
    """Make the widest columns narrower, but none below `least`, until a row fits the terminal."""
    too_wide = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
    for _ in range(too_wide):
        able = [index for index, width in enumerate(widths) if width > least[index]]
        if not able:
            return
        widths[max(able, key=widths.__getitem__)] -= 1


def shortened(text: str, width: int) -> str:
    """Return the text, without its middle where it is longer than that."""
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def echo_fields(fields: Mapping[str, str]) -> None:
    """Print names and values, one to a line. Unprintable characters are escaped."""
    printed = {printable(name): printable(value) for name, value in fields.items()}
    width = max(map(len, printed), default=0)
    for name, value in printed.items():
        click.echo(f"{name.ljust(width)}  {value}".rstrip())


def show_time(seconds: float) -> str:
    """Return a time for people, in UTC: "2026-11-20 12:00:05"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def show_where(*, is_durable: bool, is_fast: bool) -> str:
    """Return the places of a checkpoint: the store, this node, or both."""
    return ", ".join([*(["store"] if is_durable else []), *(["node"] if is_fast else [])])


@contextmanager
def printing_skipped() -> Iterator[None]:
    """Print to stderr what is passed over while the context lasts."""

    def listener(event: Event) -> None:
        if isinstance(event, CheckpointSkipped):
            click.echo(f"left out: step {event.step}: {printable(event.reason)}", err=True)

    with listening(listener, CheckpointSkipped):
        yield


def show_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics for people: "loss=0.25 accuracy=0.9"."""
    return " ".join(f"{printable(name)}={value:.6g}" for name, value in metrics.items())


METRICS_WIDTH = 24
"""The part of a line for metrics that were not chosen by name."""


def show_some_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics that a line has room for, those by which a checkpoint is judged first, and how many more there
    are: "eval_loss=0.25 accuracy=0.9 +3"."""
    names = judging_first(metrics)
    for count in range(len(names), 0, -1):
        more = f" +{len(names) - count}" if count < len(names) else ""
        text = show_metrics({name: metrics[name] for name in names[:count]})
        if len(text) <= METRICS_WIDTH:
            return text + more
    return shortened(text, METRICS_WIDTH) + more if names else ""
