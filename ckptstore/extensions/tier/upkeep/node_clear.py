"""Judge the fast checkpoints of a node by the log, and delete them from outside of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptstore.errors import CkptstoreError
from ckptstore.extensions.tier.candidates import contradicts, foreign, void_reason
from ckptstore.extensions.tier.upkeep.node_inventory import HeldAttempt, HeldStore, Inventory
from ckptstore.extensions.tier.upkeep.sweep import SweepView, sweep
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME
from ckptstore.format.manifest import Manifest, sha256_of
from ckptstore.format.order import SaveOrder
from ckptstore.format.record import Record
from ckptstore.log.reader import LogReader
from ckptstore.storage.base import Storage

Standing = Literal["durable", "superseded", "void", "only-here", "unfinished", "damaged", "foreign", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The records of one store that a judgement of its fast checkpoints needs."""

    uri: str
    store_id: str
    storage: Storage
    newest: Record | None
    """The newest record; None if the log is empty."""
    live: Mapping[str, Record] = field(default_factory=dict)
    """The records of live checkpoints, by attempt."""
    trashed: Mapping[str, Record] = field(default_factory=dict)
    """The records of checkpoints in the trash, by attempt."""
    claims: Mapping[int, Record] = field(default_factory=dict)
    """The records that claimed the epochs of the certificates, by number, as far as they exist."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The standing of a fast checkpoint in its store, and the reason."""

    standing: Standing
    reason: str
    record: Record | None = None
    """The record of the checkpoint in the store that makes this one superfluous: its own, or a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The outcome of `clear` for one attempt directory."""

    store_id: str
    found: HeldAttempt
    judged: Judged
    left: str = ""
    """The reason why it was not deleted; "" if it was, or would be in a dry run."""


def read_log(
    log: LogReader, storage: Storage, store_id: str, found: Iterable[HeldAttempt], *, newest: Record | None
) -> LogView:
    """Read the records of the log that a judgement of these attempts needs.

    For a deletion, `newest` must have been read from the log itself: a hint may be that of a copy of the store. Raises
    CheckpointDamaged when the log cannot be read, StorageError.
    """
    if newest is None:
        return LogView(uri=storage.uri, store_id=store_id, storage=storage, newest=None)
    state = newest.state
    numbers = sorted({each.certificate.claim_number for each in found if each.certificate is not None})
    claims = zip(numbers, log.found(numbers), strict=True)
    return LogView(
        uri=storage.uri,
        store_id=store_id,
        storage=storage,
        newest=newest,
        live={record.entry.attempt: record for record in log.records(state.live)},
        trashed={record.entry.attempt: record for record in log.records(state.trash)},
        claims={number: record for number, record in claims if isinstance(record, Record)},
    )


def judge(found: HeldAttempt, view: LogView | None) -> Judged:
    """Judge an attempt on this node by the log of its store; "unknown" without a view."""
    if view is None:
        return Judged("unknown", "its store was not asked")
    name, certificate = str(found.attempt), found.certificate
    own, order = view.live.get(name), None if certificate is None else certificate.order
    if certificate is not None:
        why = foreign(certificate, view.claims, store_id=view.store_id) or contradicts(certificate, own)
        if why:
            return Judged("foreign", why)
    if own is not None:
        return Judged("durable", f"record {own.number} has it", own)
    if view.newest is not None and (why := void_reason(order, name, view.newest.state, view.trashed)):
        return Judged("void", why)
    newest = max(view.live.values(), key=lambda record: record.entry.order, default=None)
    if newest is not None and (order or SaveOrder(found.attempt.epoch + 1, 0)) < newest.entry.order:
        return Judged("superseded", f"record {newest.number} has step {newest.entry.step}, which is newer", newest)
    if found.fault:
        return Judged("damaged", f"its certificate cannot be read: {found.fault}")
    if certificate is None:
        return Judged("unfinished", "it has no certificate here; another node may have one")
    return Judged("only-here", "the store does not have it")


def sweepable(found: Sequence[HeldAttempt], view: LogView, *, keep: int) -> dict[str, str]:
    """Return the attempts that the job that owns the store would delete once it has resumed, with the reasons.

    The attempts that it uses at that moment would stay.
    """
    if view.newest is None:
        return {}
    sight = SweepView(
        newest=view.newest,
        committed=[*view.live.values(), *view.trashed.values()],
        claims=view.claims,
        store_id=view.store_id,
        epoch=view.newest.state.epoch,
    )
    return sweep({each.attempt: each.certificate for each in found}, sight, keep=keep)


def clear(
    inventory: Inventory,
    stores: Sequence[HeldStore],
    views: Mapping[str, LogView],
    *,
    lose: bool = False,
    dry_run: bool = False,
) -> list[Cleared]:
    """Delete attempt directories of these stores, each with its certificate first; return the outcome of each.

    A fast checkpoint is deleted if the store has it or a newer one, with all files and their sizes, or if nobody may
    resume from it. With `lose` all others are deleted too. Nothing is deleted in a directory, or a part of a store,
    that is not private to this user.

    It holds the lock that jobs hold while they delete, and deletes nothing once a job with a later writer epoch has
    marked the disk. It does not know whether a job uses an attempt that it deletes: such a job may lose a save in
    progress, or a complete fast checkpoint. That job never loads a wrong one, for it compares sizes and digests.
    """
    cleared = []
    for store in stores:
        view = views.get(store.store_id)
        unsafe = inventory.privacy_fault or store.privacy_fault
        lacking: dict[int, str] = {}
        for found in store.attempts:
            judged = judge(found, view)
            left = unsafe or _why_left(judged, view, lacking, lose=lose)
            if not left and not dry_run:
                left = _delete(store, found)
            cleared.append(Cleared(store_id=store.store_id, found=found, judged=judged, left=left))
    return cleared


def _why_left(judged: Judged, view: LogView | None, lacking: dict[int, str], *, lose: bool) -> str:
    """Say why an attempt stays; "" if it may be deleted. `lacking` caches `_lacking` by the number of the record."""
    record = judged.record
    if lose or judged.standing == "void":
        return ""
    if record is None or view is None:
        return judged.reason
    if record.number not in lacking:
        lacking[record.number] = _lacking(record, view.storage)
    why = lacking[record.number]
    return f"{judged.reason}, but {why}" if why else ""


def _lacking(record: Record, storage: Storage) -> str:
    """Say what the store lacks of a committed checkpoint, by a listing; "" if it lacks nothing."""
    # A record is not enough: files may have been deleted behind the store's back, and the node may have the last copy.
    entry = record.entry
    try:
        data = storage.read(f"{entry.prefix}{MANIFEST_NAME}")
        if sha256_of(data) != entry.manifest_sha256:
            return "its manifest there is another one"
        manifest = Manifest.decode(data)
        directories = {entry.attempt, *manifest.references}
        listed = (file for name in directories for file in storage.list(f"{CHECKPOINT_PREFIX}{name}/"))
        sizes = {file.key: file.size_bytes for file in listed}
    except CkptstoreError as error:
        return f"it could not be looked at there: {error.message}"
    wanted = {f"{CHECKPOINT_PREFIX}{file.attempt or entry.attempt}/{file.name}": file for file in manifest.files}
    lacking = [file.name for key, file in wanted.items() if sizes.get(key) != file.size_bytes]
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"the store lacks its file {lacking[0]}{more}" if lacking else ""


def _delete(store: HeldStore, found: HeldAttempt) -> str:
    """Delete an attempt. Return the reason why it still exists, "" if it does not."""
    try:
        if not store.disk.delete_as(store.epoch, found.attempt):
            return "somebody reads it now"
    except CkptstoreError as error:
        return error.message
    if store.disk.storage.local_path(found.attempt.prefix.rstrip("/")).exists():
        return "its files were deleted, and its directory is not empty: it has links, or a job writes to it now"
    return ""
