"""Copy the whole checkpoints of a damaged store, found by their manifests, without its log or its identity."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointDamaged, CkptstoreError, InvalidInput, NoUsableCheckpoint, StoreMissing
from ckptstore.extensions.exchange.copying import CopiedCheckpoint, CopyReport, copy_all, origin_of
from ckptstore.extensions.exchange.safetensors import ATTEMPT, BASE_ATTEMPT, INDEX_NAME
from ckptstore.format.changes import Annotate, Commit
from ckptstore.format.encoding import parse_json
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, Attempt
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.log import Log
from ckptstore.log.identity import read_identity
from ckptstore.saving.commit import entry_of
from ckptstore.storage.base import Disk, Storage
from ckptstore.transfer.executor import Executor
from ckptstore.transfer.opened import OpenedPlace


@dataclass(frozen=True)
class _FilesOfStore(CheckpointFiles):
    """Files of a checkpoint whose record may be lost."""

    def key_of(self, receipt: Receipt) -> str:
        prefix = self.prefix if receipt.attempt is None else f"{CHECKPOINT_PREFIX}{receipt.attempt}/"
        return prefix + receipt.name


def _place_of(storage: Storage) -> str:
    """Return a storage's location with links resolved and a slash at its end."""
    place = os.path.realpath(storage.local_path("")) if isinstance(storage, Disk) else storage.uri
    return f"{str(place).rstrip('/')}/"


def salvage_store(source: OpenedPlace, target: OpenedPlace, *, executor: Executor | None = None) -> CopyReport:
    """Copy every whole checkpoint, whatever the log says, into a new store, in the order of their saves.

    A checkpoint is a manifest below `checkpoints/` and all its files with their digests. Of one step the last whole one
    counts. Checkpoints that the readable part of the log has in the trash stay out, but for versions of weights to
    which others are deltas; without a log that is unknown, so removed ones may come back. A delta to a version that is
    not whole is left out. Pins are kept if the log has them. `left_out` of the report names the checkpoints that
    were not copied, and why. The source is not changed. Run again, it goes on where it broke off.

    Raises StoreMissing if nothing is left, NoUsableCheckpoint if nothing of it can be copied, InvalidInput when another
    store lives at the target, or the target is the source or lies below it.
    """
    if _place_of(target.storage).startswith(_place_of(source.storage)):
        raise InvalidInput(
            f"{target.storage.uri} is the damaged store, or lies in it", hint="Copy what is left to another place"
        )
    manifests, left_out = _manifests(source)
    identity = _identity(source, manifests)
    if identity is None:
        raise StoreMissing(
            f"There are no checkpoints below {source.storage.uri}/{CHECKPOINT_PREFIX.rstrip('/')} that can be read",
            hint="; ".join(f"{name}: {why}" for name, why in left_out.items()) or None,
        )
    trash, pinned, annotated = _read_log(source)
    by_step: dict[int, list[CopiedCheckpoint]] = {}
    found: list[CopiedCheckpoint] = []
    for name, (manifest, data) in manifests.items():
        attempt = Attempt.parse(name)
        if attempt is None:
            left_out[name] = "its directory has no name of an attempt"
        elif manifest.store_id != identity:
            left_out[name] = "it is of another store"
        else:
            item = _item(source, attempt, manifest, data, is_pinned=name in pinned)
            entry = replace(item.entry, metrics={**item.entry.metrics, **annotated.get(name, {})})
            found.append(item._replace(entry=entry))
            if name in trash:
                left_out[name] = "it was removed"
            else:
                by_step.setdefault(manifest.step, []).append(found[-1])
    chosen = [_last_whole(sorted(items, key=_order), left_out) for items in by_step.values()]
    chosen = _with_bases(chosen, found, left_out)
    above = max((item.entry.epoch for item in found), default=0)
    report = copy_all(sorted(chosen, key=_order), identity, target, executor=executor, above=above, skips=True)
    left_out |= report.left_out
    if not report.steps and not report.present:
        raise NoUsableCheckpoint(
            f"No checkpoint below {source.storage.uri} could be copied: "
            + "; ".join(f"{name}: {why}" for name, why in left_out.items())
        )
    return replace(report, left_out=left_out)


def _with_bases(
    chosen: list[CopiedCheckpoint], found: list[CopiedCheckpoint], left_out: dict[str, str]
) -> list[CopiedCheckpoint]:
    """Return those that were chosen, and the versions to which they are deltas, and so on."""
    by_origin = {origin_of(item.entry): item for item in found}
    all_of_them = {origin_of(item.entry): item for item in chosen}
    unseen = list(chosen)
    while unseen:
        for base in unseen.pop().bases:
            if base in by_origin and base not in all_of_them:
                all_of_them[base] = by_origin[base]
                left_out.pop(by_origin[base].entry.attempt, None)
                unseen.append(by_origin[base])
    return [*all_of_them.values()]


def _item(
    source: OpenedPlace, attempt: Attempt, manifest: Manifest, data: bytes, *, is_pinned: bool
) -> CopiedCheckpoint:
    """Describe a checkpoint for the copy, with the epoch of its directory, which may be a copy."""
    whole = manifest.made_whole()
    key = f"{attempt.prefix}{MANIFEST_NAME}"
    written = source.storage.stat(key)
    entry = entry_of(whole, data if whole is manifest else whole.encode())
    files = _FilesOfStore(storage=source.storage, transfer=source.transfer, config=source.config, prefix=attempt.prefix)
    index = manifest.by_name.get(INDEX_NAME)
    return CopiedCheckpoint(
        replace(entry, attempt=str(attempt), epoch=attempt.epoch, committed_at=written.modified_seconds),
        files,
        is_pinned,
        () if index is None else _bases_of(attempt, files, index),
    )


def _bases_of(attempt: Attempt, files: CheckpointFiles, index: Receipt) -> tuple[Attempt, ...]:
    """Return the origin of the version to which these weights are a delta, as far as their index says it.

    A directory with a version of some publication, which was saved as it is, is a checkpoint like any other.
    """
    try:
        metadata = parse_json(files.read_file(index))["metadata"]
        own, base = (Attempt.parse(str(metadata.get(name, ""))) for name in (ATTEMPT, BASE_ATTEMPT))
    except (CheckpointDamaged, ValueError, LookupError, TypeError, AttributeError):
        return ()  # the copy says what is damaged, or it is no publication
    if own is None or base is None or replace(own, epoch=attempt.epoch) != attempt:
        return ()
    return (replace(base, epoch=0),)


def _order(item: CopiedCheckpoint) -> tuple[int, float, int, bool]:
    entry = item.entry
    epoch = entry.epoch if entry.thinned is None else Attempt.of(entry.thinned.attempt).epoch
    return epoch, entry.created_at, entry.step, entry.thinned is None


def _last_whole(items: list[CopiedCheckpoint], left_out: dict[str, str]) -> CopiedCheckpoint:
    """Return the last whole one of several saves of a step, or the last one. A single save is not read."""
    chosen = next((item for item in reversed(items) if _is_whole(item)), items[-1]) if len(items) > 1 else items[0]
    for item in items:
        if item is not chosen:
            left_out[item.entry.attempt] = f"{chosen.entry.attempt} is of step {item.entry.step} too"
    return chosen


def _is_whole(item: CopiedCheckpoint) -> bool:
    try:
        return Checkpoint(item.files).verify().ok
    except CkptstoreError:
        return False


def _manifests(source: OpenedPlace) -> tuple[dict[str, tuple[Manifest, bytes]], dict[str, str]]:
    """Read the manifests by directory, and the reasons why others are unreadable."""
    names = sorted({file.key.split("/")[1] for file in source.storage.list(CHECKPOINT_PREFIX)})
    found: dict[str, tuple[Manifest, bytes]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            key = f"{CHECKPOINT_PREFIX}{name}/{MANIFEST_NAME}"
            data = source.storage.read(key)
            found[name] = Manifest.decode(data, file=key), data
        except CkptstoreError as error:
            left_out[name] = error.message
    return found, left_out


def _identity(source: OpenedPlace, manifests: dict[str, tuple[Manifest, bytes]]) -> str | None:
    """Return the id of the store: that of `store.json` if a manifest has it, or that of most manifests."""
    try:
        identity = read_identity(source.storage)
    except CkptstoreError:
        identity = None
    ids = Counter(manifest.store_id for manifest, _ in manifests.values())
    if not ids:
        return None
    return identity if identity in ids else ids.most_common(1)[0][0]


def _read_log(source: OpenedPlace) -> tuple[set[str], set[str], dict[str, Mapping[str, float]]]:
    """Return the removed and the pinned directories, and the metrics that directories were annotated with, as far as
    the log can be read."""
    log = Log(source.storage, single_writer=source.config.single_writer)
    try:
        newest = log.newest()
    except CkptstoreError:
        newest = None
    if newest is None:
        return set(), set(), {}
    state = newest.state
    numbers = [*state.trash, *state.pinned, *state.annotated, *state.thinned]
    attempts = {
        number: found.entry.attempt for number, found in _records(log, numbers) if isinstance(found.change, Commit)
    }
    trash, pinned = ({attempts[it] for it in part if it in attempts} for part in (state.trash, state.pinned))
    annotations = [found.change for _, found in _records(log, [*state.annotated.values()])]
    metrics = {change.number: change.metrics for change in annotations if isinstance(change, Annotate)}
    annotated = {
        attempt: metrics[place] for number, attempt in attempts.items() if (place := state.place(number)) in metrics
    }
    return trash, pinned, annotated


def _records(log: Log, numbers: Sequence[int]) -> Iterator[tuple[int, Record]]:
    """Yield the records with these numbers that can be read."""
    for number, found in zip(numbers, log.found(numbers), strict=True):
        if isinstance(found, Record):
            yield number, found
