"""`ckptstore ls`: the checkpoints of a store. Reads the log alone, no manifest."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.cli.kinds import STORE
from ckptstore.cli.options import as_json, storage_option
from ckptstore.cli.output import checkpoint_json, echo_table, print_json, show_metrics, show_time
from ckptstore.cli.targets import opened_store
from ckptstore.log import Log
from ckptstore.runtime.shown import show_size
from ckptstore.store import Entry

HEADERS = ("number", "step", "created (UTC)", "ranks", "size", "metrics", "marks")


@click.command()
@click.argument("store", type=STORE)
@storage_option
@as_json
def command(store: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """List the checkpoints of STORE, in the order of their commits.

    Marks: "latest", "pinned", and "resumed from" for the one that the running job started from. What retention dropped
    is counted below, until its grace period is over.
    """
    with opened_store(store, storage_options) as opened:
        entries, trashed = opened.entries(), trashed_sizes(opened._job.log)
        trash_bytes = sum(trashed)
        if as_json:
            print_json(
                uri=opened.uri,
                checkpoints=[_to_json(entry) for entry in entries],
                trash={"count": len(trashed), "size_bytes": trash_bytes},
            )
            return
        if entries:
            echo_table(HEADERS, [_row(entry) for entry in entries])
        else:
            click.echo("no checkpoints")
        if trashed:
            click.echo(f"{len(trashed)} more in the trash, {show_size(trash_bytes)}; `ckptstore prune` deletes them")


def trashed_sizes(log: Log) -> list[int]:
    """The bytes of each checkpoint in the trash. `store.trash()` says more, but has to write to learn the time."""
    newest = log.newest()
    return [record.entry.size_bytes for record in log.records(sorted(newest.state.trash))] if newest else []


def _to_json(entry: Entry) -> dict[str, Any]:
    return {
        **checkpoint_json(entry.checkpoint),
        "is_latest": entry.is_latest,
        "is_pinned": entry.is_pinned,
        "is_resume_source": entry.is_resume_source,
    }


def _row(entry: Entry) -> tuple[str, ...]:
    marks = {"latest": entry.is_latest, "pinned": entry.is_pinned, "resumed from": entry.is_resume_source}
    checkpoint = entry.checkpoint
    return (
        str(checkpoint.number),
        str(checkpoint.step),
        show_time(checkpoint.created_at),
        str(checkpoint.world_size),
        show_size(checkpoint.size_bytes),
        show_metrics(checkpoint.metrics),
        ", ".join(mark for mark, is_set in marks.items() if is_set),
    )
