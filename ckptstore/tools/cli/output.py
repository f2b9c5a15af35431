"""Print the results of commands: as one JSON object, or as lines for people."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.events import CheckpointSkipped, Event, listening
from ckptstore.format.encoding import dump_json
from ckptstore.retention import judging_first
from ckptstore.runtime.shown import printable, show_duration, show_ranks, show_size
from ckptstore.storage.uri import redact
from ckptstore.tools.cli.terminal import is_terminal

if TYPE_CHECKING:
    from ckptstore.loading.tensor_view import StoredTensor

_SECRET_OPTIONS = ("--storage-option", "--target-option")


def json_text(fields: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return one JSON object, with the version of its schema; a float that JSON lacks as in the store format."""
    return json.dumps(json.loads(dump_json(_valid({"version": 1, **fields}), what="the output")), indent=indent)


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


def picked(item: object, *names: str) -> dict[str, Any]:
    """Return these attributes by their names."""
    return {name: getattr(item, name) for name in names}


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of a checkpoint that every command prints."""
    names = ("step", "number", "kind", "created_at", "world_size", "size_bytes", "metrics", "uri")
    return {
        **picked(checkpoint, *names),
        "thinned": None if checkpoint.thinned is None else checkpoint.thinned.to_json(),
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


Column = str | tuple[str, str | Callable[[Any], object]]
"""A field of each row, with a header of its own if it has another name; or a header and a function of the row."""


def table(rows: Iterable[Any], *columns: Column) -> list[str]:
    """Return rows below a header as lines; no line without rows. A field is shown by the unit in its name, and None as
    an empty cell."""
    pairs = [(column, column) if isinstance(column, str) else column for column in columns]
    return aligned([header for header, _ in pairs], [[_cell(row, field) for _, field in pairs] for row in rows])


def _cell(row: Any, field: str | Callable[[Any], object]) -> str:
    if callable(field):
        value = field(row)
        return "" if value is None else str(value)
    value = row[field] if isinstance(row, Mapping) else getattr(row, field)
    shown = {"bytes": show_size, "seconds": show_duration, "at": show_age}.get(field.rpartition("_")[2], str)
    return "" if value is None else shown(value)


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows below headers as lines, aligned; a column of numbers to the right. On a terminal each row is one
    line: the widest texts and headers lose their middle. Unprintable characters are escaped."""
    if not rows:
        return []
    headers, *rows = ([*map(printable, row)] for row in [headers, *rows])
    columns = [*zip(headers, *rows, strict=True)]
    right = [all(map(_is_number, cells)) for _, *cells in columns]
    widths = [max(map(len, cells)) for cells in columns]
    if is_terminal(sys.stdout):
        least = [max(map(len, cells)) if is_right else 8 for (_, *cells), is_right in zip(columns, right, strict=True)]
        _narrow(widths, least)
    lines = []
    for row in [headers, *rows]:
        cells = (
            shortened(cell, width).rjust(width) if is_right else shortened(cell, width).ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return [click.style(lines[0], bold=True), *lines[1:]]


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


def listed(fields: Mapping[str, str]) -> list[str]:
    """Return names and values as lines. Unprintable characters are escaped."""
    printed = {printable(name): printable(value) for name, value in fields.items()}
    width = max(map(len, printed), default=0)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in printed.items()]


def show_time(seconds: float) -> str:
    """Return a time for people, in UTC: "2026-11-20 12:00:05"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def show_age(created_at: float, now: float | None = None) -> str:
    """Return a time for people, as long as it is ago: "2 h ago"."""
    return f"{show_duration(max(0.0, (time.time() if now is None else now) - created_at))} ago"


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def numbers_of(ranks: Sequence[int]) -> str:
    """Return ranks without those between: "0-3, 5"."""
    return show_ranks(ranks).partition(" ")[2].replace(" and ", ", ") if ranks else ""


def cut(text: str, width: int) -> str:
    """Return the text, without its end where it is longer than that."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def shape_of(tensor: StoredTensor) -> str:
    """Return the shape of a tensor: "2x3", or "scalar"."""
    return "x".join(map(str, tensor.shape)) or "scalar"


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


_METRICS_WIDTH = 24
"""The part of a line for metrics that were not chosen by name."""


def show_some_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics that a line has room for, those by which a checkpoint is judged first, and how many more there
    are: "eval_loss=0.25 accuracy=0.9 +3"."""
    names = judging_first(metrics)
    for count in range(len(names), 0, -1):
        more = f" +{len(names) - count}" if count < len(names) else ""
        text = show_metrics({name: metrics[name] for name in names[:count]})
        if len(text) <= _METRICS_WIDTH:
            return text + more
    return shortened(text, _METRICS_WIDTH) + more if names else ""
