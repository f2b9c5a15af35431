"""Documents of stores that were never there, of any size: what the page is given, and what its numbers are held to."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ckptstore.tools.report.document import (
    Bounds,
    Health,
    SeenChange,
    SeenCheckpoint,
    SeenFast,
    SeenStore,
    SeenUsage,
    SizePoint,
    TornAttempt,
)

BEGIN = 1_790_000_000.0
MARKUP = "</script><img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
BOUNDS = Bounds(timings=100, trees=8, tree_tensors=400_000, listed_files=200_000, grace_seconds=3600.0)


def document(*stores: dict[str, Any], live: bool = False) -> dict[str, Any]:
    """As the gathering of a report gives it."""
    command = "ckptstore report runs/first --html first.html"
    return {"version": 1, "created_at": BEGIN + 90_000, "command": command, "live": live, "stores": list(stores)}


def timings(world_size: int, *, late: int | None = None, node: str = "node-") -> dict[str, Any]:
    """Of a save of which one rank may have taken a second longer than the others."""
    ranks = []
    for rank in range(min(world_size, 64)):
        upload = 0.8 + 0.01 * (rank % 7) + (1.0 if rank == late else 0.0)
        seconds = {"agree": 0.05, "stage": 0.1, "upload": upload, "wait": (1.9 if late is not None else 0.9) - upload}
        seconds |= {"commit": 0.04} if rank == 0 else {}
        one = {"rank": rank, "node": f"{node}{rank // 8}", "seconds": seconds, "size_bytes": 1 << 20, "requests": 9}
        ranks.append({**one, "retries": int(rank == late), "stalled_seconds": 0.15})
    spread = {"minimum": 0.05, "median": 0.1, "maximum": 0.2, "slowest": [0]}
    whole = {"seconds": 2.1, "phases": {"upload": {**spread, "slowest": [late or 0]}}, "size_bytes": world_size << 20}
    return {**whole, "requests": 9 * world_size, "retries": 1, "stalled": spread, "ranks": ranks}


def checkpoint(number: int, step: int, **more: Any) -> dict[str, Any]:
    """One that is live and kept for no reason yet."""
    loss, at = 4 * math.exp(-step / 2000) + 0.25 + 0.05 * math.sin(step), f"runs/first@{number}"
    lines = {name: f"ckptstore {name} {at}" for name in ("pin", "prune")} | {"cp": f"ckptstore cp {at} /mnt/backup"}
    what: dict[str, Any] = {"epoch": 1, "kind": "state", "status": "live", "world_size": 4, "saves_before": 0}
    what |= {"attempt": f"step-{step:010d}-e0001-{number:08x}", "size_bytes": 50_000_000 + 1000 * number}
    what |= {"created_at": BEGIN + 600 * number, "committed_at": BEGIN + 600 * number + 90, "save_number": number}
    what |= {"metrics": {"accuracy": 1 - loss / 5, "loss": loss}, "commands": lines}
    return {**asdict(SeenCheckpoint(number=number, step=step, **what)), **more}


def store(checkpoints: list[dict[str, Any]], *, uri: str = "runs/first", **more: Any) -> dict[str, Any]:
    """One that holds these and began with a claim."""
    changes = [SeenChange(number=1, at=BEGIN, kind="claim", text="job 1 claims the store", epoch=1)]
    sizes, sums = [], {"live": 0, "trash": 0, "deleted": 0}
    for one in checkpoints:
        at: dict[str, Any] = {"at": one["created_at"], "number": one["number"]}
        text = f"commit step {one['step']}"
        changes.append(SeenChange(**at, kind="commit", text=text, numbers=(one["number"],), epoch=one["epoch"]))
        sums[one["status"]] += one["size_bytes"]
        live, trash, freed = sums.values()
        sizes.append(SizePoint(**at, live_bytes=live, trash_bytes=trash, freed_bytes=freed))
    live, trash, _ = sums.values()
    latest = checkpoints[-1] if checkpoints else {"created_at": None, "step": None}
    commands = {"ls": "ckptstore ls runs/first", "verify": "ckptstore verify --all runs/first"}
    made = SeenStore(
        uri=uri,
        store_id="5f0c2a9e",
        metrics=tuple(sorted({name for one in checkpoints for name in one["metrics"]})),
        metric_modes={"loss": "min"},
        changes=tuple(changes),
        sizes=tuple(sizes),
        usage=SeenUsage(live_bytes=live, trash_bytes=trash, bytes_per_day=1e9, price_per_month=23.0),
        commands=commands,
        bounds=BOUNDS,
        health=Health(
            last_durable_at=latest["created_at"], last_durable_step=latest["step"], stored_bytes=live + trash
        ),
    )
    return {**asdict(made), "checkpoints": checkpoints, **more}


def layout(num_blocks: int, *, per_block: int = 5, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of a model of blocks."""
    names = ("attention.weight", "attention.bias", "mlp.up.weight", "mlp.down.weight", "norm.weight", "norm.bias")
    names += tuple(f"expert.{index}.weight" for index in range(max(0, per_block - len(names))))
    keys, dtypes, shapes, sizes = [], [], [], []
    for block in range(num_blocks):
        for place, name in enumerate(names[:per_block]):
            rows = 64 * (1 + place % 4)
            keys.append(f"model.blocks.{block}.{name}")
            dtypes.append(place % 2)
            shapes.append([rows, 64] if name.endswith("weight") else [rows])
            sizes.append((4 if place % 2 == 0 else 2) * math.prod(shapes[-1]))
    for key in ("model.embed.weight", "optimizer.step", *extra):
        keys.append(key)
        dtypes.append(0)
        shapes.append([1000, 64] if key == "model.embed.weight" else [])
        sizes.append(256_000 if key == "model.embed.weight" else 4)
    return {"keys": keys, "dtypes": dtypes, "shapes": shapes, "size_bytes": sizes}


def torn(attempt: str, step: int | None, epoch: int | None, size_bytes: int, at: float | None, **more: Any) -> Any:
    return asdict(TornAttempt(attempt=attempt, step=step, epoch=epoch, size_bytes=size_bytes, modified_at=at, **more))


def trained() -> dict[str, Any]:
    """A store as training leaves it: retention, a pin, a job that went on from an earlier step, and a torn attempt."""
    found = []
    for index in range(24):
        step, epoch = (index + 1) * 250, 1
        if index >= 16:  # the second job goes on from step 3500
            step, epoch = (index - 1) * 250, 2
        one = checkpoint(index + 2 + (index >= 16), step, epoch=epoch)
        if index < 10:
            one |= {"status": "deleted", "removed_because": "retention of record 14", "removed_at": BEGIN + 9000}
            one["commands"] = {}
        elif index < 15 and index != 13:
            one |= {"status": "trash", "removed_because": "retention of record 20", "removed_at": BEGIN + 12_000}
            one |= {"deletes_at": BEGIN + 100_000}
            one["commands"] = {"restore": f"ckptstore restore runs/first@{one['number']}"}
        else:
            one["kept_because"] = ["newer than what retention drops"]
            one["timings"] = timings(4, late=2 if index == 23 else None)
        found.append(one)
    found[4] |= {"is_pinned": True, "status": "live", "kept_because": ["pinned"]}
    found[13] |= {"resumed_by": [2], "kept_because": ["job 2 resumed from it"]}
    found[15]["metrics"]["loss"] = "NaN"
    found[11]["metrics"]["loss"] = "Infinity"
    found[22] |= {"best_of": ["loss"], "kept_because": ["best by loss"]}
    found[23] |= {"is_latest": True, "kept_because": ["latest"]}
    value = store(found)
    claim = SeenChange(number=18, at=BEGIN + 10_500, kind="claim", text="job 2 claims the store", epoch=2)
    value["changes"] = sorted([*value["changes"], asdict(claim)], key=lambda one: one["number"])
    fenced = {"in_flight": False, "why": "job 1 was fenced before it committed; gc removes it"}
    begun = {"in_flight": True, "why": "the job that owns the store may still commit it"}
    value["torn"] = [
        torn("step-0000004250-e0001-0badf00d", 4250, 1, 12_345_678, BEGIN + 10_300, **fenced),
        torn("step-0000006000-e0002-0badf00e", 6000, 2, 345_678, BEGIN + 89_990, **begun),
    ]
    value["dtype_names"] = ["float32", "bfloat16"]
    value["layouts"] = [layout(6), layout(6, extra=("model.head.bias",))]
    old, new = found[22]["number"], found[23]["number"]
    digests = [f"0/{index:08x}" for index in range(len(value["layouts"][0]["keys"]))]
    newer: list[str | None] = [*digests, "0/feedbeef"]
    newer[0], newer[1], newer[2] = "0/changed", None, "1/divided"
    value["trees"] = {str(old): {"layout": 0, "digests": digests}, str(new): {"layout": 1, "digests": newer}}
    value["health"] |= {"garbage_bytes": 12_345_678, "garbage_files": 3}
    value["health"]["leases"] = [{"holder": "node-3, process 411", "number": new, "age_seconds": 4.5}]
    return value


def fast(step: int, save_number: int | None, standing: str, **more: Any) -> dict[str, Any]:
    """An attempt on a node, which can be used where it has a certificate."""
    own: dict[str, Any] = {"attempt": f"step-{step:010d}-e0002-{step:08x}", "step": step, "epoch": 2, "number": None}
    own |= {"save_number": save_number, "created_at": BEGIN + 600 * 26 + step, "world_size": 4, "num_missing": 0}
    own |= {"size_bytes": 50_000_000, "here_bytes": 25_000_000, "nodes": ["node-1", "node-2"], "metrics": {"loss": 0.5}}
    own |= {"standing": standing, "is_usable": standing in ("only-here", "durable", "superseded")}
    return asdict(SeenFast(**{**own, "reason": "the store does not have it", **more}))


def with_fast_tier() -> dict[str, Any]:
    """The same store, of a job that saves to its nodes first: its last save is not in the store yet."""
    value = trained()
    value["fast_directory"] = "/mnt/nvme/ckpt"
    value["fast"] = [
        fast(5250, 24, "superseded", reason="record 26 has step 5500, which is newer"),
        fast(5500, 26, "durable", number=26),
        fast(5600, 27, "only-here"),
        fast(5650, 28, "only-here", num_missing=2, is_usable=False),
        fast(5700, None, "unfinished", world_size=None, nodes=[], metrics={}, reason="it has no certificate here"),
    ]
    source = value["checkpoints"][13]
    resume = {"number": 19, "at": BEGIN + 10_600, "epoch": 2, "attempt": source["attempt"]}
    lost = {"number": 20, "at": BEGIN + 10_700, "epoch": 3, "attempt": "step-0000003600-e0001-0badf00d"}
    value["resumes"] = [
        {**resume, "step": source["step"], "source": source["number"]},
        {**lost, "step": 3600, "source": None},
        {**resume, "number": 21, "attempt": "", "step": None, "source": None},
    ]
    value["checkpoints"][23]["saves_before"] = 2
    at = value["fast"][2]["created_at"]
    value["health"] |= {"last_fast_at": at, "last_fast_step": 5600, "not_durable_since": at}
    return value


def large(num_checkpoints: int, num_tensors: int) -> dict[str, Any]:
    """One of the size at which the page must still be quick."""
    found = [checkpoint(index + 2, (index + 1) * 10) for index in range(num_checkpoints)]
    for one in found[:-200]:
        one |= {"status": "deleted", "removed_because": "retention", "commands": {}}
    for one in found[-100:]:
        one["timings"] = timings(64, late=5)
    found[-1] |= {"is_latest": True, "kept_because": ["latest"]}
    value = store(found, uri="runs/large", dtype_names=["float32", "bfloat16"])
    value["layouts"] = [layout(num_tensors // 100, per_block=100)]
    num_keys = len(value["layouts"][0]["keys"])
    for number in (one["number"] for one in found[-4:]):
        digests = [f"0/{number * index:016x}" for index in range(num_keys)]
        value["trees"][str(number)] = {"layout": 0, "digests": digests}
    return value


def hostile() -> dict[str, Any]:
    """A store in which every text is markup, and names are those that every object of a script has."""
    found = []
    for index in range(6):
        one = checkpoint(index + 2, index + 1, attempt=MARKUP, removed_because=MARKUP, kept_because=[MARKUP])
        one["metrics"] = {MARKUP: 1.0 + index, "__proto__": index, "constructor": "-Infinity"}
        one["metrics"]["toString"] = 1e308 * (-1) ** index
        one |= {"best_of": [MARKUP], "held_by": [MARKUP], "timings": timings(2, late=1, node=MARKUP)}
        one["commands"] = {MARKUP: f"ckptstore pin {MARKUP}", "pin": "ckptstore pin 'a\u2028b'"}
        found.append(one)
    value = store(found, uri=MARKUP, store_id=MARKUP, dtype_names=[MARKUP, "bfloat16"])
    keys = ["__proto__", "constructor.prototype", MARKUP, f"a.{MARKUP}", "..", "", "\udc80.\u202e.x", "a"]
    size = len(keys)
    value["layouts"] = [{"keys": keys, "dtypes": [0] * size, "shapes": [[2]] * size, "size_bytes": [8] * size}]
    value["trees"] = {str(one["number"]): {"layout": 0, "digests": [MARKUP] * size} for one in found[-2:]}
    value["changes"] = [{**one, "text": MARKUP} for one in value["changes"]]
    value["torn"] = [torn(MARKUP, step, None, 0, None, in_flight=False, why=MARKUP) for step in (3, None)]
    lease = {"holder": MARKUP, "number": 2, "age_seconds": 1.0}
    value["fast_directory"] = MARKUP
    names = {"attempt": MARKUP, "reason": MARKUP, "nodes": [MARKUP], "metrics": {MARKUP: 2.0, "__proto__": 1.0}}
    value["fast"] = [fast(7, 1, "only-here", **names), fast(8, 2, "foreign", **names)]
    value["resumes"] = [{"number": 2, "at": BEGIN, "epoch": 1, "attempt": MARKUP, "step": 3, "source": None}]
    value |= {"commands": {MARKUP: MARKUP}, "needs_options": [MARKUP]}
    value["health"] |= {"gaps": [MARKUP], "trouble": [MARKUP], "leases": [lease]}
    return value
