"""`ckptstore fast`: the fast checkpoints on the disk of this node, looked at and deleted from outside of a job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from ckptstore.catalogue import job_of
from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.upkeep.node_clear import Cleared, Judged, LogView, judge, read_log, sweepable
from ckptstore.extensions.tier.upkeep.node_clear import clear as clear_node
from ckptstore.extensions.tier.upkeep.node_inventory import HeldAttempt, HeldStore, Inventory, take_inventory
from ckptstore.log.identity import read_identity
from ckptstore.runtime.shown import printable, show_duration, show_ranks, show_size
from ckptstore.tools.cli.options import as_json, dry_run, storage_option
from ckptstore.tools.cli.output import echo_table, print_json
from ckptstore.tools.cli.targets import opened_store

_LOSE = "--yes-lose-what-is-not-durable"
_SHOWN = {
    "durable": "durable",
    "superseded": "superseded",
    "void": "void",
    "only-here": "only on nodes",
    "unfinished": "unfinished",
    "damaged": "damaged",
    "foreign": "foreign",
    "unknown": "",
}

directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
stores = click.option("--store", "uris", multiple=True, metavar="STORE", help="Compare with this store; repeatable.")


@click.group()
def command() -> None:
    """List or delete fast checkpoints on the disk of this node.

    DIR is the path of the FastTier of jobs. It may hold checkpoints of several stores.
    """


@command.command("ls")
@directory
@stores
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of fast checkpoints that the job keeps.",
)
@storage_option
@as_json
def ls(directory: Path, uris: tuple[str, ...], keep: int, storage_options: dict[str, Any], as_json: bool) -> None:
    """List the fast checkpoints in DIR, on this node only.

    Names, sizes and certificates are looked at; no digest is compared, and nothing is changed. With --store, also says
    which ones are durable (the store has them), which are void (no job may resume from them), and which ones the job
    that owns the store would delete after it resumes.
    """
    inventory = take_inventory(directory)
    with _views(inventory, uris, storage_options) as views:
        fields = [_fields_of(store, views.get(store.store_id), keep=keep) for store in inventory.stores]
    if as_json:
        print_json(
            directory=inventory.directory,
            privacy_fault=inventory.privacy_fault,
            stores=fields,
            others=_others(inventory),
        )
        return
    if inventory.privacy_fault:
        click.echo(f"warning: {printable(inventory.privacy_fault)}: no job of this user uses it", err=True)
    for item in fields:
        _echo_store(item)
    for name, what in inventory.others.items():
        click.echo(f"no fast checkpoint: {printable(name)}: {what}")
    if not inventory.stores:
        click.echo("no fast checkpoints")


@command.command("clear")
@directory
@click.option(
    "--store-id",
    "store_ids",
    multiple=True,
    metavar="ID",
    help="Only checkpoints of the store with this id, as `fast ls` prints it; repeatable.",
)
@stores
@click.option(
    _LOSE, "lose", is_flag=True, help="Delete checkpoints that are in no store, too: they may be the only copy."
)
@dry_run
@storage_option
@as_json
def clear(
    directory: Path,
    store_ids: tuple[str, ...],
    uris: tuple[str, ...],
    lose: bool,
    dry_run: bool,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Delete fast checkpoints in DIR that no job needs.

    These are the ones that their store has, those that are older than one that it has, and those that no job may resume
    from. Only a store named by --store can tell: without it, none counts as stored. With it, those of other stores are
    left alone, unless --store-id names them. The exit code is 2 if anything was left. Links, and files that are no fast
    checkpoints, are never touched.

    End the job first: this is not checked. A running job may lose a save, or a fast checkpoint that was complete. It
    never loads a damaged one.
    """
    inventory = take_inventory(directory)
    if inventory.privacy_fault:
        raise InvalidInput(
            f"{inventory.privacy_fault}, so what is below it may be somebody else's",
            hint="Nothing was deleted. Clear it as its owner, with mode 700",
        )
    chosen = _chosen(inventory, store_ids)
    with _views(inventory, uris, storage_options) as views:
        if views and not store_ids:
            chosen = [store for store in chosen if store.store_id in views]
        found = clear_node(inventory, chosen, views, lose=lose, dry_run=dry_run)
    broken = {store.store_id: why for store in chosen if (why := store.fault or store.privacy_fault)}
    if as_json:
        print_json(
            directory=inventory.directory,
            dry_run=dry_run,
            deleted=[_cleared(each) for each in found if not each.left],
            left=[{**_cleared(each), "reason": each.left} for each in found if each.left],
            refused=[{"store_id": store_id, "reason": why} for store_id, why in broken.items()],
            others=_others(inventory),
        )
    else:
        _echo_cleared(found, broken, dry_run=dry_run)
    if broken or any(each.left for each in found):
        raise click.exceptions.Exit(InvalidInput.exit_code)


@contextmanager
def _views(inventory: Inventory, uris: Sequence[str], options: Mapping[str, Any]) -> Iterator[dict[str, LogView]]:
    """Open these stores while the context lasts, and yield what their logs say, by the ids of the stores."""
    with ExitStack() as opened:
        views: dict[str, LogView] = {}
        for uri in uris:
            job = job_of(opened.enter_context(opened_store(uri, options)))
            store_id = read_identity(job.storage) or ""
            found = [attempt for store in inventory.stores if store.store_id == store_id for attempt in store.attempts]
            if store_id in views:
                raise InvalidInput(
                    f"{views[store_id].uri} and {job.storage.uri} are one store, or copies", hint="Give one"
                )
            views[store_id] = read_log(job.log, job.storage, store_id, found, newest=job.log.checked_newest())
        yield views


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
        "store_id": store.store_id,
        "uri": view.uri if view else None,
        "privacy_fault": store.privacy_fault,
        "fault": store.fault,
        "size_bytes": sum(found.size_bytes for found in store.attempts),
        "checkpoints": [_checkpoint(found, judge(found, view), swept) for found in store.attempts],
    }


def _checkpoint(found: HeldAttempt, judged: Judged, swept: Mapping[str, str]) -> dict[str, Any]:
    certificate, name = found.certificate, str(found.attempt)
    return {
        "attempt": name,
        "step": found.attempt.step,
        "epoch": found.attempt.epoch,
        "save_number": certificate.save_number if certificate else None,
        "world_size": certificate.manifest.world_size if certificate else None,
        "size_bytes": found.size_bytes,
        "age_seconds": None if found.changed_seconds is None else max(0.0, time.time() - found.changed_seconds),
        "is_certified": certificate is not None,
        "fault": found.fault,
        "ranks": list(found.ranks),
        "missing": list(found.missing),
        "standing": judged.standing,
        "reason": judged.reason,
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


def _echo_store(fields: Mapping[str, Any]) -> None:
    where = f" of {printable(fields['uri'])}" if fields["uri"] else ""
    size = show_size(fields["size_bytes"])
    click.echo(f"store {fields['store_id']}{where}: {len(fields['checkpoints'])} directories, {size}")
    for fault in filter(None, (fields["privacy_fault"], fields["fault"])):
        click.echo(f"  {printable(fault)}")
    if not fields["checkpoints"]:
        return
    rows = [
        [
            str(each["step"]),
            str(each["epoch"]),
            str(each["save_number"] or ""),
            show_size(each["size_bytes"]),
            _ranks(each["ranks"]),
            "" if each["age_seconds"] is None else show_duration(each["age_seconds"]),
            ", ".join(filter(None, (_certified(each), _SHOWN[each["standing"]]))),
        ]
        for each in fields["checkpoints"]
    ]
    echo_table(["step", "epoch", "save", "size", "ranks", "age", "state"], rows)
    for each in fields["checkpoints"]:
        for line in _lines(each):
            click.echo(f"  step {each['step']}: {printable(line)}")


def _certified(each: Mapping[str, Any]) -> str:
    if each["fault"]:
        return "certificate damaged"
    state = "certified" if each["is_certified"] else "no certificate"
    return f"{state}, {len(each['missing'])} files missing" if each["missing"] else state


def _ranks(ranks: Sequence[int]) -> str:
    return show_ranks(ranks).partition(" ")[2].replace(" and ", ", ") if ranks else ""


def _lines(each: Mapping[str, Any]) -> Iterator[str]:
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


def _echo_cleared(found: Sequence[Cleared], broken: Mapping[str, str], *, dry_run: bool) -> None:
    verb = "would be deleted" if dry_run else "deleted"
    for each in found:
        what = f"{each.store_id}/{each.found.attempt}, {show_size(each.found.size_bytes)}"
        click.echo(f"left: {what}: {printable(each.left)}" if each.left else f"{verb}: {what}")
    for store_id, why in broken.items():
        click.echo(f"left: {store_id}: {printable(why)}")
    if any(each.left and each.judged.standing == "unknown" for each in found):
        click.echo("Give --store, to know what is durable", err=True)
    elif any(each.left and each.judged.record is None and each.judged.standing != "void" for each in found):
        click.echo(f"Give {_LOSE} to delete the only copies too", err=True)
    if not found and not broken:
        click.echo("nothing to delete")
