"""Garbage: what no record names and no job can commit any more, found without a clock.

An attempt directory of an epoch below the highest can never be committed: the log refuses its epoch. Attempts of the
highest epoch belong to the job that claimed it, alive or not; a new claim takes over from a dead one.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError, FileMissing, StoreMissing
from ckptstore.identity import read_identity
from ckptstore.layout import CHECKPOINT_PREFIX, GROUP_PREFIX, MANIFEST_NAME, PROBE_PREFIX, Attempt
from ckptstore.log import Log
from ckptstore.manifest import Manifest
from ckptstore.prune import delete_attempt
from ckptstore.records import Claim, Record
from ckptstore.storage.base import CreatesExclusively, FindsUnfinished, HasLocalFiles, Storage

ENDED_SECONDS = 3600.0
"""Ranks that talk through the storage leave something there far more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What a collection found, and what it removed unless it was a dry run."""

    attempts: dict[str, int] = field(default_factory=dict)
    """Directories that nothing refers to, with their bytes."""
    unfinished: list[str] = field(default_factory=list)
    """Keys of unfinished multipart uploads."""
    exchanges: list[str] = field(default_factory=list)
    """What ranks of ended jobs left when they talked through the storage."""
    left: dict[str, str] = field(default_factory=dict)
    """What was not touched, with the reason."""

    @property
    def size_bytes(self) -> int:
        """Of all attempts."""
        return sum(self.attempts.values())


def collect_garbage(log: Log, storage: Storage, *, claim: bool = False, dry_run: bool = False) -> Garbage:
    """Remove what nothing refers to and nobody can commit any more; a dry run only tells.

    `claim` takes the store over first, which fences a job that still runs. Raises StoreMissing without a store.
    """
    newest = log.newest()
    store_id = read_identity(storage)
    if newest is None or store_id is None:
        raise StoreMissing(f"There is no store at {storage.uri}")
    if claim and not dry_run:
        newest = log.append(lambda _: Claim(start_token=f"gc-{uuid.uuid4().hex}", world_size=1)) or newest
    found = _find(log, storage, newest, store_id, below_epoch=newest.state.epoch + (1 if claim and dry_run else 0))
    if not dry_run:
        for attempt in found.attempts:
            delete_attempt(storage, attempt)
        for prefix in found.exchanges:
            storage.delete([file.key for file in storage.list(prefix)])
        if isinstance(storage, FindsUnfinished):
            for key, upload_id in storage.unfinished(CHECKPOINT_PREFIX):
                if key in found.unfinished:
                    storage.abort_unfinished(key, upload_id)
    return found


def _find(log: Log, storage: Storage, newest: Record, store_id: str, *, below_epoch: int) -> Garbage:
    found = Garbage()
    named = {record.entry.attempt for record in log.records([*newest.state.live, *newest.state.trash])}
    sizes: dict[str, int] = defaultdict(int)
    manifests = set()
    for file in storage.list(CHECKPOINT_PREFIX):
        directory, _, name = file.key.removeprefix(CHECKPOINT_PREFIX).partition("/")
        sizes[directory] += file.size_bytes
        if name == MANIFEST_NAME:
            manifests.add(directory)
    for directory in _directories(storage):
        sizes.setdefault(directory, 0)
    for directory in sorted(sizes.keys() - named):
        reason = _why_left(storage, directory, below_epoch, store_id, has_manifest=directory in manifests)
        if reason is None:
            found.attempts[directory] = sizes[directory]
        else:
            found.left[CHECKPOINT_PREFIX + directory] = reason
    if isinstance(storage, FindsUnfinished):
        for key, _ in storage.unfinished(CHECKPOINT_PREFIX):
            attempt = Attempt.parse(key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0])
            if attempt is not None and attempt.epoch < below_epoch:
                found.unfinished.append(key)
    found.exchanges.extend(_ended_exchanges(log, storage))
    return found


def _directories(storage: Storage) -> list[str]:
    """On a disk: what lies below the root of checkpoints, empty directories too, which no listing shows."""
    if not isinstance(storage, HasLocalFiles):
        return []
    try:
        return [path.name for path in storage.local_path(CHECKPOINT_PREFIX.rstrip("/")).iterdir() if path.is_dir()]
    except OSError:
        return []


def _why_left(storage: Storage, directory: str, below_epoch: int, store_id: str, *, has_manifest: bool) -> str | None:
    """Why a directory that no record names is left alone, None when it may go."""
    attempt = Attempt.parse(directory)
    if attempt is None:
        return "the format does not know this name"
    if attempt.epoch >= below_epoch:
        return "an attempt of the job that owns the store; `gc --claim` takes over from a dead one"
    if not has_manifest:
        return None
    if not isinstance(storage, CreatesExclusively):
        return "it has a manifest, and this storage cannot create-if-absent, so the log may have lost its record"
    try:
        manifest = Manifest.decode(storage.read(f"{CHECKPOINT_PREFIX}{directory}/{MANIFEST_NAME}"))
    except FileMissing:
        return None
    except CkptstoreError as error:
        return f"its manifest cannot be read: {error}"
    return None if manifest.store_id == store_id else f"it belongs to the store {manifest.store_id}"


def _ended_exchanges(log: Log, storage: Storage) -> list[str]:
    """Prefixes that no rank has touched for so long that its job must have ended."""
    last: dict[str, float] = {}
    for file in [*storage.list(GROUP_PREFIX), *storage.list(PROBE_PREFIX)]:
        prefix = "/".join(file.key.split("/")[:2])
        last[prefix] = max(last.get(prefix, 0.0), file.modified_seconds)
    if not last:
        return []
    now_seconds = log.store_now_seconds()
    return sorted(prefix for prefix, seconds in last.items() if now_seconds - seconds > ENDED_SECONDS)
