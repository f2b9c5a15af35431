"""`ckptstore ls`: the checkpoints of a store. Reads the log alone, no manifest."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import click

from ckptstore.catalogue import Entry, job_of
from ckptstore.errors import InvalidInput, InvalidMetric, StoreMissing
from ckptstore.extensions.history.past_saves import usage
from ckptstore.format.record import Record
from ckptstore.log import Log
from ckptstore.log.identity import KEPT_BY_CKPTSTORE
from ckptstore.runtime.near import meant, nearest, shown
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import as_json, fast_option, price_option, prices_of, storage_option, tier_at
from ckptstore.tools.cli.output import (
    checkpoint_json,
    echo_table,
    print_json,
    printing_skipped,
    show_some_metrics,
    show_where,
)
from ckptstore.tools.cli.ray_runs import checkpoints_of_ray
from ckptstore.tools.cli.stores_below import MOST_LISTED, MOST_STORES, StoreBelow, stores_below
from ckptstore.tools.cli.targets import opened_store


@click.command()
@click.argument("store", type=STORE)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    show_default="loss first, as many as fit",
    help="Show this metric in a column; repeatable.",
)
@click.option(
    "--sort",
    metavar="NAME",
    help="Sort by number, step, size or a metric, lowest first; --sort=-NAME for highest first.",
)
@click.option(
    "-n", "limit", type=click.IntRange(min=1), metavar="N", help="Show only the N newest, or the first N of --sort."
)
@click.option("--long", "is_long", is_flag=True, help="Show the bytes that the store takes, and its growth per day.")
@price_option
@click.option("--trash", "with_trash", is_flag=True, help="List the checkpoints in the trash, too.")
@fast_option
@storage_option
@as_json
def command(store: str, storage_options: dict[str, Any], as_json: bool, **options: Any) -> None:
    """List the checkpoints of STORE, oldest first.

    The marks are "latest", "pinned" (retention does not remove it), "resumed from" (the running job started from it)
    and "without", with the keys that were dropped from it. Checkpoints that retention has removed are counted at the
    end, until they are deleted from the trash. For a directory above stores, the stores below it are listed; for a run
    of Ray Train that keeps its files itself, what ckptstore.ray.report stored.

    Without --metric, losses and the like are shown first: the store does not know by which metric the job keeps
    checkpoints.

    With --fast the column "where" says whether a checkpoint is in the store, on this node, or both. What no job can
    resume from is left out, with the reason on stderr.
    """
    try:
        with printing_skipped():
            choice = {name: options.pop(name) for name in ("metrics", "sort", "limit")}
            _list_store(store, storage_options, as_json, choice, **options)
    except StoreMissing as missing:
        if any([*choice.values(), *options.values()]):
            raise
        _list_below(store, storage_options, missing, as_json=as_json)


def _list_below(parent: str, storage_options: dict[str, Any], missing: StoreMissing, *, as_json: bool) -> None:
    """List the stores below what is no store itself. Raises `missing` where there is none."""
    found, is_all = stores_below(parent, storage_options)
    if not found:
        raise missing
    if as_json:
        trash = {"count": 0, "size_bytes": 0, "grace_seconds": 0.0}
        stores = [asdict(item) for item in found]
        print_json(uri=parent, checkpoints=[], trash=trash, stores=stores, is_all=is_all)
        return
    echo_table(("store", "checkpoints", "latest", "created"), [_store_row(item) for item in found])
    if not is_all:
        click.echo(
            f"there may be more: at most {MOST_LISTED} files or directories and {MOST_STORES} stores are looked at, and"
            " not every directory may be readable; list a narrower prefix",
            err=True,
        )


def _store_row(item: StoreBelow) -> tuple[str, str, str, str]:
    if item.error or item.kept_by != KEPT_BY_CKPTSTORE:
        return (item.uri, item.error or f"kept by {item.kept_by}", "", "")
    step = "" if item.latest_step is None else str(item.latest_step)
    return (item.uri, str(item.num_checkpoints), step, _age(item.latest_created_at))


def _age(created_at: float | None) -> str:
    return "" if created_at is None else f"{show_duration(max(0.0, time.time() - created_at))} ago"


def _list_store(
    store: str,
    storage_options: dict[str, Any],
    as_json: bool,
    choice: dict[str, Any],
    *,
    with_trash: bool,
    is_long: bool,
    prices: dict[str, float],
    fast_path: str | None,
) -> None:
    is_fast = fast_path is not None
    if prices and not is_long:
        raise InvalidInput("--price means nothing without --long")
    with opened_store(store, storage_options, fast=tier_at(fast_path)) as opened:
        every, trashed = opened.entries(fast=is_fast), removed_at(job_of(opened).log)
        of_ray = checkpoints_of_ray(opened, storage_options) or []
        every += [
            Entry(checkpoint=it, is_pinned=False, is_latest=it is of_ray[-1], is_resume_source=False) for it in of_ray
        ]
        grace_seconds = job_of(opened).config.grace_seconds
        used: dict[str, Any] = {}
        if is_long:
            found, (price,) = usage(job_of(opened).log), prices_of(prices, opened.uri)
            used = {"usage": {**asdict(found), "price_per_month": found.price_per_month(price)}}
        entries = chosen(every, **choice)
        trash_bytes = sum(record.entry.size_bytes for record, _ in trashed)
        if as_json:
            trash: dict[str, Any] = {"count": len(trashed), "size_bytes": trash_bytes, "grace_seconds": grace_seconds}
            if with_trash:
                names = ("number", "step", "size_bytes", "removed_at")
                rows = [(record.number, record.entry.step, record.entry.size_bytes, at) for record, at in trashed]
                trash["checkpoints"] = [dict(zip(names, row, strict=True)) for row in rows]
            print_json(uri=opened.uri, checkpoints=[_to_json(entry) for entry in entries], trash=trash, **used)
            return
    metrics = choice["metrics"]
    if entries:
        where = ("where",) if is_fast else ()
        headers = ("number", "step", "created", "ranks", "size", *where, *(metrics or ("metrics",)), "marks")
        echo_table(headers, [_row(entry, metrics, with_where=is_fast) for entry in entries])
    else:
        click.echo("no checkpoints")
    if of_ray:
        click.echo("Ray keeps them, by its CheckpointConfig; `ckptstore show RUN@STEP` has the directory")
    if len(entries) < len(every):
        click.echo(f"{len(every) - len(entries)} more are {'there' if is_fast else 'live'}")
    if trashed:
        _echo_trash(trashed, grace_seconds=grace_seconds, is_listed=with_trash)
    if used:
        _echo_usage(**used["usage"])


def _echo_usage(
    *, live_bytes: int, trash_bytes: int, bytes_per_day: float | None, price_per_month: float | None
) -> None:
    words = [f"{show_size(live_bytes)} live, {show_size(trash_bytes)} in the trash"]
    if bytes_per_day is not None:
        grows = "grows" if bytes_per_day >= 0 else "shrinks"
        words.append(f"{grows} by {show_size(abs(bytes_per_day))} per day over the last week")
    if price_per_month is not None:
        words.append(f"{price_per_month:.2f} per month")
    click.echo("; ".join(words))


def chosen(entries: Sequence[Entry], *, metrics: Collection[str], sort: str | None, limit: int | None) -> list[Entry]:
    """Return the checkpoints to list, in their order; those without the metric last, equal ones by commit.

    Raises InvalidMetric, with those that exist, for a metric that no checkpoint has.
    """
    names = {name for entry in entries for name in entry.checkpoint.metrics}
    key = (sort or "number").removeprefix("-")
    for name in metrics if key in ("number", "step", "size") else (*metrics, key):
        if entries and name not in names:
            raise InvalidMetric(
                f"No live checkpoint has the metric {name!r}{meant(nearest(name, names))} They have {shown(names)}"
            )
    if sort is None:
        return list(entries[-limit:] if limit else entries)
    sign = -1 if sort.startswith("-") else 1

    def place(entry: Entry) -> tuple[bool, float]:
        checkpoint = entry.checkpoint
        fixed = {"number": checkpoint.number or math.nan, "step": checkpoint.step, "size": checkpoint.size_bytes}
        value = fixed[key] if key in fixed else checkpoint.metrics.get(key, math.nan)
        return (math.isnan(value), 0.0 if math.isnan(value) else sign * value)

    return sorted(entries, key=place)[:limit]


def removed_at(log: Log) -> list[tuple[Record, float]]:
    """Return what is in the trash, each with the time of its removal by the clock of whoever removed it.

    `store.trash()` knows it by the clock of the storage, but has to write for that.
    """
    newest = log.newest()
    state = newest.state.trash if newest else {}
    times = {record.number: record.created_at for record in log.records(sorted(set(state.values())))}
    return [(record, times[state[record.number]]) for record in log.records(sorted(state))]


def _echo_trash(trashed: Sequence[tuple[Record, float]], *, grace_seconds: float, is_listed: bool) -> None:
    size = show_size(sum(record.entry.size_bytes for record, _ in trashed))
    left = [max(0.0, at + grace_seconds - time.time()) for _, at in trashed]
    click.echo(f"{len(trashed)} more in the trash, {size}; `ckptstore restore STORE@STEP` brings one back")
    free = left.count(0.0)
    when = "all now" if free == len(left) else f"{free} now, all in {show_duration(max(left))}"
    click.echo(f"`ckptstore prune` deletes them after {show_duration(grace_seconds)} there: {when}")
    if is_listed:
        click.echo()
        rows = [
            (
                str(record.number),
                str(record.entry.step),
                show_size(record.entry.size_bytes),
                f"in {show_duration(seconds)}" if seconds else "now",
            )
            for (record, _), seconds in zip(trashed, left, strict=True)
        ]
        echo_table(("number", "step", "size", "may be deleted"), rows)


def _to_json(entry: Entry) -> dict[str, Any]:
    return {
        **checkpoint_json(entry.checkpoint),
        "is_latest": entry.is_latest,
        "is_pinned": entry.is_pinned,
        "is_resume_source": entry.is_resume_source,
        "is_durable": entry.is_durable,
        "is_fast": entry.is_fast,
    }


def _row(entry: Entry, metrics: Sequence[str], *, with_where: bool) -> tuple[str, ...]:
    checkpoint = entry.checkpoint
    marks = {"latest": entry.is_latest, "pinned": entry.is_pinned, "resumed from": entry.is_resume_source}
    marks |= {} if checkpoint.thinned is None else {f"without {', '.join(checkpoint.thinned.dropped)}": True}
    known = checkpoint.metrics
    return (
        str(checkpoint.number or ""),
        str(checkpoint.step),
        _age(checkpoint.created_at),
        str(checkpoint.world_size),
        show_size(checkpoint.size_bytes),
        *([show_where(is_durable=entry.is_durable, is_fast=entry.is_fast)] if with_where else []),
        *(
            [f"{known[name]:.6g}" if name in known else "" for name in metrics]
            if metrics
            else [show_some_metrics(known)]
        ),
        ", ".join(mark for mark, is_set in marks.items() if is_set),
    )
