"""Commands that look at checkpoints: `latest`, `best`, `ls`, which reads the log alone, `show` and `diff`."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ckptstore.catalogue import Entry, job_of
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError, InvalidInput, InvalidMetric, StoreMissing
from ckptstore.extensions.history.past_saves import usage
from ckptstore.format.digest import fields_of
from ckptstore.format.layout import STORE_KEY
from ckptstore.format.manifest import Receipt
from ckptstore.format.timings import Timings
from ckptstore.log import Log
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_store_json
from ckptstore.opening import open_store
from ckptstore.runtime.extras import not_installed
from ckptstore.runtime.near import meant, nearest, nearest_key, shown
from ckptstore.runtime.shown import printable, show_duration, show_size
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.retry import retrying
from ckptstore.tools.cli.command import LATEST, Answer, Best, Call, checkpoint_in, checkpoints_of_ray, command
from ckptstore.tools.cli.options import FAST, PRICE, STORE, complete_metric, complete_target, option, prices_of
from ckptstore.tools.cli.output import (
    Column,
    aligned,
    checkpoint_json,
    cut,
    listed,
    numbers_of,
    picked,
    printing_skipped,
    provenance_texts,
    shape_of,
    show_metrics,
    show_some_metrics,
    show_time,
    table,
)

if TYPE_CHECKING:
    from ckptstore.extensions.exchange.comparing import TensorDifference
    from ckptstore.loading.tensor_view import StoredTensor

Row = dict[str, Any]
MOST_LISTED = 100_000
"""The most files below a prefix to look at, 100 requests on most object stores; on a disk the most directories."""
MOST_STORES = 1000
"""The most stores below a prefix to open, each for some requests."""
_MARK = f"/{STORE_KEY}"


@command(STORE)
def latest(call: Call) -> Answer:
    """Print the URI of the latest checkpoint of STORE."""
    checkpoint = checkpoint_in(call.open_store(), LATEST)
    yield {"checkpoint": checkpoint_json(checkpoint)}
    yield [checkpoint.uri]


@command(
    STORE,
    click.Argument(["metric"], shell_complete=complete_metric),
    option("--mode [min|max]", "Whether lower or higher is better; names such as eval_loss and accuracy tell it."),
)
def best(call: Call) -> Answer:
    """Print the URI of the checkpoint with the best METRIC.

    NaN and infinity are never the best.
    """
    checkpoint = checkpoint_in(call.open_store(), Best(call.metric, call.mode))
    yield {"checkpoint": checkpoint_json(checkpoint)}
    yield [checkpoint.uri]


@command(
    STORE,
    option("--metric NAME ...", "Show this metric in a column; repeatable.", show_default="loss first, as many as fit"),
    option("--sort NAME", "Sort by number, step, size or a metric, lowest first; --sort=-NAME for highest first."),
    option("-n N", "Show only the N newest, or the first N of --sort.", "limit", type=click.IntRange(min=1)),
    option("--long", "Show the bytes that the store takes, and its growth per day."),
    PRICE,
    option("--trash", "List the checkpoints in the trash, too."),
    FAST,
)
def ls(call: Call) -> Answer:
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
    if call.prices and not call.long:
        raise InvalidInput("--price means nothing without --long")
    call.open(printing_skipped())
    try:
        store = call.open_store(fast=call.fast_tier())
    except StoreMissing:
        if any((call.metric, call.sort, call.limit, call.long, call.trash, call.fast)):
            raise
        found, is_all = stores_below(call.store, call.storage_options)
        if not found:
            raise
        yield from _stores(found, is_all, call)
        return
    log, grace_seconds = job_of(store).log, job_of(store).config.grace_seconds
    of_ray = checkpoints_of_ray(store, call.storage_options) or []
    entries = store.entries(fast=call.fast is not None)
    entries += [Entry(checkpoint=it, is_latest=it is of_ray[-1]) for it in of_ray]
    trashed = removed(log)
    rows = _chosen([_fields(entry) for entry in entries], call)
    used: dict[str, Any] = {}
    if call.long:
        taken, (price,) = usage(log), prices_of(call.prices, store.uri)
        used = {"usage": {**asdict(taken), "price_per_month": taken.price_per_month(price)}}
    trash = {"count": len(trashed), "size_bytes": sum(row["size_bytes"] for row in trashed)}
    trash |= {"grace_seconds": grace_seconds, **({"checkpoints": trashed} if call.trash else {})}
    yield {"uri": store.uri, "checkpoints": rows, "trash": trash, **used}
    yield table(rows, *_columns(call)) or "no checkpoints"
    if of_ray:
        yield "Ray keeps them, by its CheckpointConfig; `ckptstore show RUN@STEP` has the directory"
    if len(rows) < len(entries):
        yield f"{len(entries) - len(rows)} more are {'live' if call.fast is None else 'there'}"
    if trashed:
        yield from _trash_lines(trashed, grace_seconds, is_listed=call.trash)
    if used:
        yield "; ".join(_usage_words(**used["usage"]))


def _stores(stores: Sequence[Row], is_all: bool, call: Call) -> Answer:
    """List the stores below what is no store itself."""
    trash = {"count": 0, "size_bytes": 0, "grace_seconds": 0.0}
    yield {"uri": call.store, "checkpoints": [], "trash": trash, "stores": stores, "is_all": is_all}
    for row in stores:
        keeper = "" if row["kept_by"] == KEPT_BY_CKPTSTORE else f"kept by {row['kept_by']}"
        row["checkpoints"] = row["error"] or keeper or row["num_checkpoints"]
    latest = (("latest", "latest_step"), ("created", "latest_created_at"))
    yield table(stores, ("store", "uri"), "checkpoints", *latest)
    if not is_all and not call.as_json:
        click.echo(
            f"there may be more: at most {MOST_LISTED} files or directories and {MOST_STORES} stores are looked at, and"
            " not every directory may be readable; list a narrower prefix",
            err=True,
        )


def stores_below(uri: str, storage_options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the stores below a prefix, by name, each with what its log says, and whether these are all.

    On a disk directories are looked at, except those inside of stores and behind links. An object store lists files
    alone, those of the stores included. Of either no more than MOST_LISTED are looked at. Raises StorageError.
    """
    with closing(open_storage(uri, storage_options=storage_options)) as root:
        found, is_all = _on_disk(root) if isinstance(root, Disk) else _in_bucket(root)
    names = sorted(found)
    return [_summary(f"{uri.rstrip('/')}/{name}", storage_options) for name in names[:MOST_STORES]], (
        is_all and len(names) <= MOST_STORES
    )


def _in_bucket(root: Storage) -> tuple[list[str], bool]:
    # With a bound of its own: retries around a whole listing would read it to its end first.
    listed = retrying(RetryConfig.from_env(), "list", lambda: [*islice(root.list(""), MOST_LISTED + 1)])
    keys = [file.key for file in listed[:MOST_LISTED]]
    return [key.removesuffix(_MARK) for key in keys if key.endswith(_MARK)], len(listed) <= MOST_LISTED


def _on_disk(root: Disk) -> tuple[list[str], bool]:
    top, found, unread = root.local_path(""), list[str](), list[OSError]()
    for number, (path, directories, files) in enumerate(os.walk(top, onerror=unread.append)):
        if number == MOST_LISTED:
            return found, False
        if STORE_KEY in files:
            directories.clear()
            found.append(os.path.relpath(path, top).replace(os.sep, "/"))
    return found, not unread


def _summary(uri: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    found = {"uri": uri, "num_checkpoints": 0, "latest_step": None, "latest_created_at": None}
    found |= {"kept_by": KEPT_BY_CKPTSTORE, "error": ""}
    try:
        with open_store(uri, storage_options=storage_options) as store:
            job = job_of(store)
            identity = read_store_json(job.storage)
            newest = job.log.newest()
            number = newest.state.latest if newest else None
            latest = [] if number is None else job.log.records([number])
            return found | {
                "num_checkpoints": len(newest.state.live) if newest else 0,
                "latest_step": latest[0].entry.step if latest else None,
                "latest_created_at": latest[0].entry.created_at if latest else None,
                "kept_by": identity.kept_by if identity else KEPT_BY_CKPTSTORE,
            }
    except CkptstoreError as error:
        return found | {"error": f"{error.code}: {error.message}"}


def _fields(entry: Entry) -> Row:
    marks = picked(entry, "is_latest", "is_pinned", "is_resume_source", "is_durable", "is_fast")
    return {**checkpoint_json(entry.checkpoint), **marks}


def _columns(call: Call) -> Iterator[Column]:
    yield from ("number", "step", ("created", "created_at"), ("ranks", "world_size"), ("size", "size_bytes"))
    if call.fast is not None:
        places = {"is_durable": "store", "is_fast": "node"}
        yield "where", lambda row: ", ".join(place for name, place in places.items() if row[name])
    yield from ((name, _metric(name)) for name in call.metric)
    if not call.metric:
        yield "metrics", lambda row: show_some_metrics(row["metrics"])
    yield "marks", _marks


def _metric(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row['metrics'][name]:.6g}" if name in row["metrics"] else ""


def _marks(row: Row) -> str:
    marks = {"is_latest": "latest", "is_pinned": "pinned", "is_resume_source": "resumed from"}
    found = [mark for name, mark in marks.items() if row[name]]
    return ", ".join([*found, *([f"without {', '.join(row['thinned']['dropped'])}"] if row["thinned"] else [])])


def _chosen(rows: list[Row], call: Call) -> list[Row]:
    """Return the checkpoints to list, in their order; those without the metric last, equal ones by commit.

    Raises InvalidMetric, with those that exist, for a metric that no checkpoint has.
    """
    names = {name for row in rows for name in row["metrics"]}
    key = (call.sort or "number").removeprefix("-")
    field = {"number": "number", "step": "step", "size": "size_bytes"}.get(key)
    for name in (*call.metric, key) if field is None else call.metric:
        if rows and name not in names:
            raise InvalidMetric(
                f"No live checkpoint has the metric {name!r}{meant(nearest(name, names))} They have {shown(names)}"
            )
    if call.sort is None:
        return rows[-call.limit :] if call.limit else rows
    sign = -1 if call.sort.startswith("-") else 1

    def place(row: Row) -> tuple[bool, float]:
        value = row["metrics"].get(key) if field is None else row[field]
        is_last = value is None or math.isnan(value)
        return is_last, 0.0 if is_last else sign * value

    return sorted(rows, key=place)[: call.limit]


def removed(log: Log) -> list[Row]:
    """Return what is in the trash, each with the time of its removal by the clock of whoever removed it.

    `store.trash()` knows it by the clock of the storage, but has to write for that.
    """
    newest = log.newest()
    state = newest.state.trash if newest else {}
    times = {record.number: record.created_at for record in log.records(sorted(set(state.values())))}
    return [
        {
            "number": record.number,
            **picked(record.entry, "step", "size_bytes"),
            "removed_at": times[state[record.number]],
        }
        for record in log.records(sorted(state))
    ]


def _trash_lines(trashed: Sequence[Row], grace_seconds: float, *, is_listed: bool) -> Answer:
    size = show_size(sum(row["size_bytes"] for row in trashed))
    now = time.time()

    def left_seconds(row: Row) -> float:
        return max(0.0, float(row["removed_at"]) + grace_seconds - now)

    left = [*map(left_seconds, trashed)]
    yield f"{len(trashed)} more in the trash, {size}; `ckptstore restore STORE@STEP` brings one back"
    free = left.count(0.0)
    when = "all now" if free == len(left) else f"{free} now, all in {show_duration(max(left))}"
    yield f"`ckptstore prune` deletes them after {show_duration(grace_seconds)} there: {when}"
    if is_listed:
        yield ""
        due = ("may be deleted", lambda row: f"in {show_duration(left_seconds(row))}" if left_seconds(row) else "now")
        yield table(trashed, "number", "step", ("size", "size_bytes"), due)


def _usage_words(
    *, live_bytes: int, trash_bytes: int, bytes_per_day: float | None, price_per_month: float | None
) -> Iterator[str]:
    yield f"{show_size(live_bytes)} live, {show_size(trash_bytes)} in the trash"
    if bytes_per_day is not None:
        grows = "grows" if bytes_per_day >= 0 else "shrinks"
        yield f"{grows} by {show_size(abs(bytes_per_day))} per day over the last week"
    if price_per_month is not None:
        yield f"{price_per_month:.2f} per month"


@command(
    click.Argument(["target"], required=False, metavar="TARGET", shell_complete=complete_target),
    option(
        "--tensors [PATTERN]",
        "List tensors instead of files: all, or those whose keys match, such as 'model.*'.",
        "pattern",
        is_flag=False,
        flag_value="*",
    ),
    option("--timings", "Show how long the save took, by phase and by rank, instead of files."),
    FAST,
)
def show(call: Call) -> Answer:
    """Show one checkpoint: its metrics, metadata and files.

    For a store without a step, that is its latest checkpoint. With --fast it may be on this node only; files that other
    nodes have are marked.
    """
    target, pattern = call.target, call.pattern
    if target is None and pattern != "*":  # --tensors has taken the word after it
        target, pattern = pattern, "*"
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    if call.timings and pattern is not None:
        raise InvalidInput("--tensors and --timings each take the place of the files", hint="Ask for one of them")
    call.open(printing_skipped())
    checkpoint = call.open_checkpoint(target, fast=call.fast_tier())
    tensors = None if pattern is None else _fitting(checkpoint, pattern)
    timings = checkpoint.timings if call.timings else None
    if call.timings and timings is None:
        raise InvalidInput(
            f"Step {checkpoint.step} has no timings: it was saved by an older version of ckptstore, or by a newer one "
            "that writes them in another way",
            step=checkpoint.step,
        )
    on_node = _files_on_node(checkpoint)
    provenance = checkpoint.provenance
    yield {
        "checkpoint": checkpoint_json(checkpoint),
        "metadata": checkpoint.metadata,
        "files": [_file_json(receipt, on_node) for receipt in checkpoint.files],
        "is_durable": checkpoint.is_durable,
        "provenance": None if provenance is None else provenance.to_json(),
        **({} if tensors is None else {"tensors": [asdict(tensor) for tensor in tensors]}),
        **({} if timings is None else {"timings": timings.to_json()}),
    }
    yield listed(_facts(checkpoint))
    if timings is not None:
        yield from _timing_lines(timings)
        return
    if tensors is not None:
        rows = table(
            tensors,
            ("tensor", "key"),
            ("dtype", lambda it: it.dtype if it.dtype == it.live_dtype else f"{it.dtype} of {it.live_dtype}"),
            ("shape", shape_of),
            ("size", "size_bytes"),
            ("ranks", lambda it: numbers_of(it.ranks) + (", each its own" if it.is_per_rank else "")),
        )
    else:
        last = [] if on_node is None else [("here", lambda receipt: "yes" if receipt in on_node else "no")]
        digest = ("digest", lambda receipt: receipt.digest or "none")
        rows = table(checkpoint.files, ("file", "name"), "rank", ("size", "size_bytes"), digest, *last)
    yield ["", *rows] if rows else []


def _fitting(checkpoint: Checkpoint, pattern: str) -> list[StoredTensor]:
    """Return the tensors that fit. Raises InvalidInput when none fits."""
    found = [tensor for key, tensor in checkpoint.tensors.items() if fnmatchcase(key, pattern)]
    if not found and (pattern != "*" or len(checkpoint.tensors)):
        near = meant(nearest_key(pattern, list(checkpoint.tensors)))
        raise InvalidInput(f"No tensor of step {checkpoint.step} fits {pattern!r}{near}", step=checkpoint.step)
    return found


def _files_on_node(checkpoint: Checkpoint) -> frozenset[Receipt] | None:
    """Return the files of a fast checkpoint that this node has; None for one in a store, which has all."""
    files = files_behind(checkpoint)
    return frozenset(files.receipts_here(files.read_manifest()[0])) if files.is_on_nodes else None


def _file_json(receipt: Receipt, on_node: frozenset[Receipt] | None) -> dict[str, Any]:
    return {
        "name": receipt.name,
        "original_name": receipt.original_name or receipt.name,
        "rank": receipt.rank,
        "size_bytes": receipt.size_bytes,
        **fields_of(receipt.digest),
        "is_here": on_node is None or receipt in on_node,
    }


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    facts = {
        "step": str(checkpoint.step),
        "number": _number(checkpoint),
        "uri": checkpoint.uri,
        "kind": checkpoint.kind,
        "created (UTC)": show_time(checkpoint.created_at),
        "ranks": str(checkpoint.world_size),
        "size": f"{show_size(checkpoint.size_bytes)} in {len(checkpoint.files)} files",
        "metrics": show_metrics(checkpoint.metrics),
    }
    if (thinned := checkpoint.thinned) is not None:
        facts["dropped"] = f"{', '.join(thinned.dropped)}, at {show_time(thinned.thinned_at)} (UTC)"
        facts["size before"] = show_size(thinned.size_bytes)
    facts |= {
        f"metadata.{name}": cut(json.dumps(value, ensure_ascii=False), 100)
        for name, value in checkpoint.metadata.items()
    }
    return facts | provenance_texts(checkpoint)


def _number(checkpoint: Checkpoint) -> str:
    if checkpoint.number is not None:
        return str(checkpoint.number)
    if not files_behind(checkpoint).is_on_nodes:
        return "none, it lies outside of a store"
    return "none yet, it came into the store just now" if checkpoint.is_durable else "none, it is on nodes alone"


def _timing_lines(timings: Timings) -> Answer:
    moved = f"{show_size(timings.size_bytes)} in {timings.requests} requests, {timings.retries} retries"
    yield ["", *listed({"until the manifest": _seconds(timings.seconds), "uploaded": moved}), ""]
    nodes = {one.rank: one.node for one in timings.ranks}
    rows = []
    for name, spread in {**timings.phases, "stalled": timings.stalled}.items():
        slowest = ", ".join(f"rank {rank} on {nodes.get(rank, 'an unknown node')}" for rank in spread.slowest)
        rows.append((name, *map(_seconds, (spread.minimum, spread.median, spread.maximum)), slowest))
    yield aligned(("phase", "shortest", "median", "longest", "longest on"), rows)
    phases = [(phase, lambda one, phase=phase: _seconds(one.seconds.get(phase))) for phase in timings.phases]
    stalled = ("stalled", lambda one: _seconds(one.stalled_seconds))
    last = (stalled, ("uploaded", "size_bytes"), "requests", "retries")
    yield ["", *table(timings.ranks, "rank", "node", *phases, *last)]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f} s"


@command(
    click.Argument(["a"], shell_complete=complete_target),
    click.Argument(["b"], shell_complete=complete_target),
    option("--values", "Read the tensors, and print the largest difference of each."),
)
def diff(call: Call) -> Answer:
    """Compare two checkpoints: metrics, metadata, files, tensors.

    A and B are TARGETs of one store or of two. A delta is B minus A. The programs that saved them are compared too.
    Files and tensors are compared by size and digest. What has no digests, or digests by different algorithms, is
    "unknown". Tensors below 1 MiB share their digests with others, so they may be read. A larger tensor is "unknown"
    also if it was divided differently among the ranks; --values reads it.
    """
    options = call.options_by_place(call.a, call.b)
    first, second = both = [call.open_checkpoint(*pair) for pair in zip((call.a, call.b), options, strict=True)]
    files = file_differences(first, second)
    values = {
        "metric": differences(first.metrics, second.metrics),
        "metadata": differences(flat(first.metadata), flat(second.metadata)),
        "provenance": differences(provenance_texts(first), provenance_texts(second)),
    }
    num_equal = len(first.files) - sum(row["a_bytes"] is not None for row in files)
    tensors, num_equal_tensors, not_compared = compared_tensors(first, second, values=call.values)
    yield {
        "a": checkpoint_json(first),
        "b": checkpoint_json(second),
        "num_equal_files": num_equal,
        "files": files,
        "tensors": None if not_compared else [_tensor_json(item) for item in tensors],
        "num_equal_tensors": num_equal_tensors,
        "metrics": values["metric"],
        "metadata": values["metadata"],
        "provenance": values["provenance"],
    }
    named = [*zip("ab", both, strict=True)]
    rows = [(name, str(one.step), show_size(one.size_bytes), one.uri) for name, one in named]
    yield aligned(("", "step", "size", "uri"), rows)
    for name, one in named:
        if one.thinned is not None:
            yield f"{name} {one.thinned}"
    yield ""
    for what, found in values.items():
        if found:
            sides = (("a", lambda row: _text(row["a"])), ("b", lambda row: _text(row["b"])))
            yield [*table(found, (what, "name"), *sides, ("b - a", _delta)), ""]
    yield table(files, ("file", "name"), "change", ("a", "a_bytes"), ("b", "b_bytes"), ("b - a", _delta_bytes))
    num_unknown = sum(row["change"] == "unknown" for row in files)
    unknown = f"{num_unknown} unknown, " if num_unknown else ""
    yield f"files: {len(files) - num_unknown} differ, {unknown}{num_equal} equal"
    if not_compared:
        yield f"tensors are not compared: {not_compared}"
        return
    columns: list[Column] = [("tensor", "key"), "change", ("dtype and shape", _shapes)]
    if call.values:
        columns += [("largest difference", lambda item: None if item.largest is None else f"{item.largest:.7g}")]
    if tensors:
        yield ["", *table(tensors, *columns)]
    counts = Counter(item.change for item in tensors)
    yield f"tensors: {', '.join([*(f'{counts[change]} {change}' for change in counts), f'{num_equal_tensors} equal'])}"
    if counts["unknown"]:
        yield "--values reads the unknown ones"


def file_differences(first: Checkpoint, second: Checkpoint) -> list[dict[str, Any]]:
    """Return the files that are in one only, differ in size or digest, or may differ, by name."""
    ours, theirs = ({file.name: file for file in checkpoint.files} for checkpoint in (first, second))
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            change = "removed" if one else "added"
        elif one.size_bytes != other.size_bytes:
            change = "changed"
        elif one.digest is None or other.digest is None or one.digest.algorithm != other.digest.algorithm:
            change = "unknown"
        elif one.digest != other.digest:
            change = "changed"
        else:
            continue
        a_bytes, b_bytes = (file.size_bytes if file else None for file in (one, other))
        found.append({"name": name, "change": change, "a_bytes": a_bytes, "b_bytes": b_bytes})
    return found


def compared_tensors(first: Checkpoint, second: Checkpoint, *, values: bool) -> tuple[list[TensorDifference], int, str]:
    """Return the tensors that differ, how many are equal, and why they are not compared; "" when they are."""
    for name, checkpoint in (("a", first), ("b", second)):
        if checkpoint.kind != "state":
            return [], 0, f"{name} is a directory of files"
    try:
        from ckptstore.extensions.exchange.comparing import tensor_differences

        return *tensor_differences(first, second, values=values), ""
    except ModuleNotFoundError as error:
        missing = not_installed(error)
        if missing is None or values:
            raise
        return [], 0, str(missing)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items that the two mappings do not share, None where one is missing; two NaN are equal."""
    names = sorted(first.keys() | second.keys())
    pairs = [{"name": name, "a": first.get(name), "b": second.get(name)} for name in names]
    return [pair for pair in pairs if repr(pair["a"]) != repr(pair["b"])]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with paths for keys: {"a": {"b": 1}} is {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{prefix}{name}.")
        else:
            found[prefix + name] = item
    return found


def _delta(row: dict[str, Any]) -> str:
    sides = (row["a"], row["b"])
    is_number = all(isinstance(side, int | float) and not isinstance(side, bool) for side in sides)
    return _text(row["b"] - row["a"]) if is_number else ""


def _delta_bytes(row: dict[str, Any]) -> str:
    if row["a_bytes"] is None or row["b_bytes"] is None or row["a_bytes"] == row["b_bytes"]:
        return ""
    more = row["b_bytes"] - row["a_bytes"]
    return f"{'-' if more < 0 else ''}{show_size(abs(more))}"


def _shapes(item: TensorDifference) -> str:
    return " -> ".join(dict.fromkeys(f"{tensor.dtype} {shape_of(tensor)}" for tensor in (item.a, item.b) if tensor))


def _tensor_json(item: TensorDifference) -> dict[str, Any]:
    sides = {"a": item.a, "b": item.b}
    dtypes = {f"{name}_dtype": side and side.dtype for name, side in sides.items()}
    shapes = {f"{name}_shape": side and list(side.shape) for name, side in sides.items()}
    return {"key": item.key, "change": item.change, "largest_difference": item.largest, **dtypes, **shapes}


def _text(value: Any) -> str:
    text = "" if value is None else f"{value:.7g}" if isinstance(value, float) else printable(str(value))
    return cut(text, 60)
