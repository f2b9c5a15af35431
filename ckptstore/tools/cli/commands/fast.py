"""`ckptstore fast`: the fast checkpoints on the disk of this node, looked at and deleted from outside of a job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ckptstore.catalogue import job_of
from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.upkeep.node_clear import Cleared, Judged, LogView, judge, read_log, sweepable
from ckptstore.extensions.tier.upkeep.node_clear import clear as clear_node
from ckptstore.extensions.tier.upkeep.node_inventory import HeldAttempt, HeldStore, Inventory, take_inventory
from ckptstore.log.identity import read_identity
from ckptstore.runtime.shown import printable, show_size
from ckptstore.tools.cli.command import Answer, Call, command
from ckptstore.tools.cli.options import DRY_RUN, option
from ckptstore.tools.cli.output import numbers_of, picked, table

_LOSE = "--yes-lose-what-is-not-durable"
_DIRECTORY = click.Argument(["directory"], metavar="DIR", type=click.Path(path_type=Path))
_STORES = option("--store STORE ...", "Compare with this store; repeatable.", "uris")


@click.group()
def fast() -> None:
    """List or delete fast checkpoints on the disk of this node.

    DIR is the path of the FastTier of jobs. It may hold checkpoints of several stores.
    """


@command(
    _DIRECTORY,
    _STORES,
    option("--keep N", "Number of fast checkpoints that the job keeps.", type=click.IntRange(1), default=2),
    group=fast,
)
def ls(call: Call) -> Answer:
    """List the fast checkpoints in DIR, on this node only.

    Names, sizes and certificates are looked at; no digest is compared, and nothing is changed. With --store, also says
    which ones are durable (the store has them), which are void (no job may resume from them), and which ones the job
    that owns the store would delete after it resumes.
    """
    inventory = take_inventory(call.directory)
    views = _views(inventory, call)
    stores = [_fields_of(store, views.get(store.store_id), keep=call.keep) for store in inventory.stores]
    yield {**picked(inventory, "directory", "privacy_fault"), "stores": stores, "others": _others(inventory)}
    if inventory.privacy_fault and not call.as_json:
        click.echo(f"warning: {printable(inventory.privacy_fault)}: no job of this user uses it", err=True)
    for store in stores:
        yield from _store_lines(store)
    for name, what in inventory.others.items():
        yield f"no fast checkpoint: {name}: {what}"
    if not stores:
        yield "no fast checkpoints"


@command(
    _DIRECTORY,
    option(
        "--store-id ID ...",
        "Only checkpoints of the store with this id, as `fast ls` prints it; repeatable.",
        "store_ids",
    ),
    _STORES,
    option(_LOSE, "Delete checkpoints that are in no store, too: they may be the only copy.", "lose"),
    DRY_RUN,
    group=fast,
)
def clear(call: Call) -> Answer:
    """Delete fast checkpoints in DIR that no job needs.

    These are the ones that their store has, those that are older than one that it has, and those that no job may resume
    from. Only a store named by --store can tell: without it, none counts as stored. With it, those of other stores are
    left alone, unless --store-id names them. The exit code is 2 if anything was left. Links, and files that are no fast
    checkpoints, are never touched.

    End the job first: this is not checked. A running job may lose a save, or a fast checkpoint that was complete. It
    never loads a damaged one.
    """
    inventory = take_inventory(call.directory)
    if inventory.privacy_fault:
        raise InvalidInput(
            f"{inventory.privacy_fault}, so what is below it may be somebody else's",
            hint="Nothing was deleted. Clear it as its owner, with mode 700",
        )
    chosen = _chosen(inventory, call.store_ids)
    views = _views(inventory, call)
    if views and not call.store_ids:
        chosen = [store for store in chosen if store.store_id in views]
    found = clear_node(inventory, chosen, views, lose=call.lose, dry_run=call.dry_run)
    left = [each for each in found if each.left]
    broken = {store.store_id: why for store in chosen if (why := store.fault or store.privacy_fault)}
    call.exit_code = InvalidInput.exit_code if broken or left else 0
    yield {
        "directory": inventory.directory,
        "dry_run": call.dry_run,
        "deleted": [_cleared(each) for each in found if not each.left],
        "left": [{**_cleared(each), "reason": each.left} for each in left],
        "refused": [{"store_id": store_id, "reason": why} for store_id, why in broken.items()],
        "others": _others(inventory),
    }
    for each in found:
        what = f"{each.store_id}/{each.found.attempt}, {show_size(each.found.size_bytes)}"
        verb = "would be deleted" if call.dry_run else "deleted"
        yield f"left: {what}: {each.left}" if each.left else f"{verb}: {what}"
    for store_id, why in broken.items():
        yield f"left: {store_id}: {why}"
    if not found and not broken:
        yield "nothing to delete"
    if call.as_json:
        return
    if any(each.judged.standing == "unknown" for each in left):
        click.echo("Give --store, to know what is durable", err=True)
    elif any(each.judged.record is None and each.judged.standing != "void" for each in left):
        click.echo(f"Give {_LOSE} to delete the only copies too", err=True)


def _views(inventory: Inventory, call: Call) -> dict[str, LogView]:
    """Open the stores to compare with, and return what their logs say, by the ids of the stores."""
    views: dict[str, LogView] = {}
    for uri in call.uris:
        job = job_of(call.open_store(uri))
        store_id = read_identity(job.storage) or ""
        found = [attempt for store in inventory.stores if store.store_id == store_id for attempt in store.attempts]
        if store_id in views:
            raise InvalidInput(f"{views[store_id].uri} and {job.storage.uri} are one store, or copies", hint="Give one")
        views[store_id] = read_log(job.log, job.storage, store_id, found, newest=job.log.checked_newest())
    return views


def _chosen(inventory: Inventory, store_ids: Sequence[str]) -> list[HeldStore]:
    stores = {store.store_id: store for store in inventory.stores}
    for store_id in store_ids:
        if store_id not in stores:
            raise InvalidInput(
                f"{inventory.directory} has no fast checkpoints of a store with the id {store_id!r}",
                hint=f"There are those of {', '.join(stores) or 'none'}",
            )
    return [store for store in inventory.stores if not store_ids or store.store_id in store_ids]


def _fields_of(store: HeldStore, view: LogView | None, *, keep: int) -> dict[str, Any]:
    swept = sweepable(store.attempts, view, keep=keep) if view else {}
    return {
        **picked(store, "store_id", "privacy_fault", "fault"),
        "uri": view.uri if view else None,
        "size_bytes": sum(found.size_bytes for found in store.attempts),
        "checkpoints": [_checkpoint(found, judge(found, view), swept) for found in store.attempts],
    }


def _checkpoint(found: HeldAttempt, judged: Judged, swept: Mapping[str, str]) -> dict[str, Any]:
    certificate, name = found.certificate, str(found.attempt)
    return {
        "attempt": name,
        **picked(found.attempt, "step", "epoch"),
        "save_number": certificate.save_number if certificate else None,
        "world_size": certificate.manifest.world_size if certificate else None,
        "age_seconds": None if found.changed_seconds is None else max(0.0, time.time() - found.changed_seconds),
        "is_certified": certificate is not None,
        **picked(found, "size_bytes", "fault", "ranks", "missing"),
        **picked(judged, "standing", "reason"),
        "swept_because": swept.get(name),
    }


def _others(inventory: Inventory) -> list[dict[str, str]]:
    return [{"name": name, "what": what} for name, what in inventory.others.items()]


def _cleared(each: Cleared) -> dict[str, Any]:
    return {
        "store_id": each.store_id,
        "attempt": str(each.found.attempt),
        "size_bytes": each.found.size_bytes,
        "standing": each.judged.standing,
    }


def _store_lines(store: Mapping[str, Any]) -> Answer:
    where, found = f" of {store['uri']}" if store["uri"] else "", store["checkpoints"]
    yield f"store {store['store_id']}{where}: {len(found)} directories, {show_size(store['size_bytes'])}"
    for fault in filter(None, (store["privacy_fault"], store["fault"])):
        yield f"  {fault}"
    columns = (
        ("save", "save_number"),
        ("size", "size_bytes"),
        ("ranks", lambda each: numbers_of(each["ranks"])),
        ("age", "age_seconds"),
    )
    yield table(found, "step", "epoch", *columns, ("state", _state))
    for each in found:
        for line in _wrong(each):
            yield f"  step {each['step']}: {line}"


def _state(each: Mapping[str, Any]) -> str:
    state = "certified" if each["is_certified"] else "no certificate"
    if each["fault"]:
        state = "certificate damaged"
    elif each["missing"]:
        state += f", {len(each['missing'])} files missing"
    standing = {"only-here": "only on nodes", "unknown": ""}.get(each["standing"], each["standing"])
    return f"{state}, {standing}" if standing else state


def _wrong(each: Mapping[str, Any]) -> Iterator[str]:
    """Say what is wrong with it, what the store says, and what a sweep would do."""
    if each["fault"]:
        yield each["fault"]
    if each["missing"]:
        more = f" and {len(each['missing']) - 1} more" if len(each["missing"]) > 1 else ""
        yield f"not here with its size: {each['missing'][0]}{more}"
    if each["standing"] in ("void", "foreign"):
        yield each["reason"]
    if each["swept_because"]:
        yield f"the job would delete it: {each['swept_because']}"
