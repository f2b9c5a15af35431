"""What is left of a store that has lost its log, its identity or checkpoints: found by manifests, copied if whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ckptstore.errors import CkptstoreError, StoreMissing
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, Attempt
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.interchange.copying import CopiedCheckpoint, CopyReport, copy_all
from ckptstore.loading.story import CheckpointFiles
from ckptstore.log import Log
from ckptstore.log.identity import read_identity
from ckptstore.saving.commit import entry_of
from ckptstore.storage.retry import retrying
from ckptstore.transfer.executor import Executor
from ckptstore.transfer.opened import OpenedPlace


@dataclass(frozen=True)
class _FilesOfStore(CheckpointFiles):
    """Files of a checkpoint in a store whose record of it may be lost."""

    def key_of(self, receipt: Receipt) -> str:
        prefix = self.prefix if receipt.attempt is None else f"{CHECKPOINT_PREFIX}{receipt.attempt}/"
        return prefix + receipt.name


@dataclass(frozen=True, slots=True)
class _Known:
    """What can still be read in the log."""

    trash: frozenset[str]
    """Directories that were removed."""
    pinned: frozenset[str]


def salvage_store(source: OpenedPlace, target: OpenedPlace, *, executor: Executor | None = None) -> CopyReport:
    """Copy every checkpoint that is whole, whatever the log says, into a new store, in the order of their saves.

    A checkpoint is what has a manifest below `checkpoints/` and all files with the digests of it. Of one step the last
    one counts. What the log, as far as it can be read, has in the trash stays out; without a log that is not known, so
    checkpoints that had been removed may come back. Pins are kept where the log tells of them. `left_out` of the report
    says what was not copied, and why. The source is not changed. Run again, it goes on where it broke off.

    Raises StoreMissing where nothing is left, InvalidInput when another store lives at the target.
    """
    manifests, left_out = _manifests(source)
    known = _read_log(source)
    identity = _identity(source, manifests)
    if identity is None:
        raise StoreMissing(
            f"There are no checkpoints below {source.storage.uri}/{CHECKPOINT_PREFIX.rstrip('/')} that can be read",
            hint="; ".join(f"{name}: {why}" for name, why in left_out.items()) or None,
        )
    chosen: dict[int, tuple[Attempt, CopiedCheckpoint]] = {}
    for name, (manifest, data) in manifests.items():
        attempt = Attempt.parse(name)
        if attempt is None or manifest.store_id != identity or name in known.trash:
            other = "it is of another store" if manifest.store_id != identity else "it was removed"
            left_out[name] = "its directory has no name of an attempt" if attempt is None else other
            continue
        whole = manifest.made_whole()
        entry = replace(entry_of(whole, data if whole is manifest else whole.encode()), attempt=name)
        key = f"{entry.prefix}{MANIFEST_NAME}"
        written = retrying(source.config.retry, f"stat {key}", lambda key=key: source.storage.stat(key))  # type: ignore[misc]
        item = CopiedCheckpoint(
            entry=replace(entry, committed_at=written.modified_seconds),
            files=_FilesOfStore(
                storage=source.storage,
                transfer=source.transfer,
                config=source.config,
                prefix=entry.prefix,
                record=None,
            ),
            is_pinned=name in known.pinned,
        )
        before = chosen.get(manifest.step)
        if before is None or _order(before[0], before[1]) < _order(attempt, item):
            chosen[manifest.step] = attempt, item
        if before is not None:
            first = min((before, (attempt, item)), key=lambda pair: _order(*pair))
            left_out[first[1].entry.attempt] = f"a later save of step {manifest.step} is there"
    items = [item for _, item in sorted(chosen.values(), key=lambda pair: _order(*pair))]
    report = copy_all(items, identity, target, executor=executor, above=_highest(manifests), skips=True)
    return replace(report, left_out={**left_out, **report.left_out})


def _order(attempt: Attempt, item: CopiedCheckpoint) -> tuple[int, float, int]:
    return attempt.epoch, item.entry.created_at, item.entry.step


def _highest(names: dict[str, tuple[Manifest, bytes]]) -> int:
    return max((attempt.epoch for name in names if (attempt := Attempt.parse(name))), default=0)


def _manifests(source: OpenedPlace) -> tuple[dict[str, tuple[Manifest, bytes]], dict[str, str]]:
    """By directory what can be read, and why the rest cannot."""
    names = sorted({file.key.split("/")[1] for file in source.storage.list(CHECKPOINT_PREFIX)})
    found: dict[str, tuple[Manifest, bytes]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            key = f"{CHECKPOINT_PREFIX}{name}/{MANIFEST_NAME}"
            data = retrying(source.config.retry, f"read {key}", lambda key=key: source.storage.read(key))  # type: ignore[misc]
            found[name] = Manifest.decode(data, file=key), data
        except CkptstoreError as error:
            left_out[name] = error.message
    return found, left_out


def _identity(source: OpenedPlace, manifests: dict[str, tuple[Manifest, bytes]]) -> str | None:
    """The id of the store: what its `store.json` says, or most of the manifests."""
    try:
        identity = read_identity(source.storage)
    except CkptstoreError:
        identity = None
    ids = Counter(manifest.store_id for manifest, _ in manifests.values())
    if not ids:
        return None
    return identity if identity in ids else ids.most_common(1)[0][0]


def _read_log(source: OpenedPlace) -> _Known:
    log = Log(source.storage, retry=source.config.retry, single_writer=source.config.single_writer)
    try:
        newest = log.newest()
    except CkptstoreError:
        newest = None
    if newest is None:
        return _Known(frozenset(), frozenset())
    numbers = [*newest.state.trash, *newest.state.pinned]
    attempts = {
        number: found.entry.attempt
        for number, found in zip(numbers, log.found(numbers), strict=True)
        if found is not None and not isinstance(found, CkptstoreError)
    }
    return _Known(
        frozenset(attempts[number] for number in newest.state.trash if number in attempts),
        frozenset(attempts[number] for number in newest.state.pinned if number in attempts),
    )
