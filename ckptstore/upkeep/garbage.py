"""Find and remove garbage, without a clock: attempts that no record names and no job can commit any more.

The name of an attempt directory, also of a copy, has the writer epoch under which it was begun, and the log accepts no
record with a directory of another epoch than its own. So an attempt of an epoch below the highest can never be
committed. Attempts of the highest epoch belong to the job that claimed it, alive or not; a new claim takes over from a
dead one. Those that were committed in it, and dropped since, are left over from a prune.

Messages of a group are garbage if the log shows that its job was superseded. A group that never claimed may belong to
readers who are alive, so nothing proves that it is dead: its messages go only with `claim`, by which a person says so.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError, FileMissing, StorageError, StoreMissing
from ckptstore.format.changes import Claim
from ckptstore.format.layout import (
    AGAIN,
    CHECKPOINT_PREFIX,
    CURSOR_PREFIX,
    GROUP_PREFIX,
    LEASE_PREFIX,
    LOG_PREFIX,
    MANIFEST_NAME,
    PROBE_PREFIX,
    Attempt,
)
from ckptstore.format.manifest import Manifest
from ckptstore.format.record import Record
from ckptstore.log import Log
from ckptstore.log.identity import read_identity
from ckptstore.storage.base import Bucket, CreatesExclusively, Disk, Storage
from ckptstore.upkeep import leases
from ckptstore.upkeep.prune import attempt_directories, backwards, delete_attempts, dropped_attempts

ENDED_SECONDS = 3600.0
"""The age below which messages and probes stay in any case: a superseded job may not have noticed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """The findings of a collection, which it has removed unless it was a dry run."""

    attempts: dict[str, int] = field(default_factory=dict)
    """The attempt directories that nothing refers to, with their bytes."""
    unfinished: list[str] = field(default_factory=list)
    """The keys of unfinished multipart uploads, and on a disk of files that killed writers left outside of attempts."""
    exchanges: list[str] = field(default_factory=list)
    """The key prefixes of messages that ranks of ended jobs left in the storage, and of old probes."""
    left: dict[str, str] = field(default_factory=dict)
    """The keys that were left alone, with the reason."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all attempts."""
        return sum(self.attempts.values())


@dataclass(slots=True)
class ListedAttempt:
    """One directory below the root of checkpoints, as a listing shows it."""

    size_bytes: int = 0
    num_files: int = 0
    modified_seconds: float | None = None
    """The time of the last write of a file, by the storage's clock; None for an empty directory."""
    has_manifest: bool = False


def listed_attempts(storage: Storage) -> dict[str, ListedAttempt]:
    """Return all directories below the root of checkpoints, of any name; on a disk empty ones too. Costs one listing of
    all their files."""
    found: dict[str, ListedAttempt] = {}
    for file in storage.list(CHECKPOINT_PREFIX):
        directory, _, name = file.key.removeprefix(CHECKPOINT_PREFIX).partition("/")
        attempt = found.setdefault(directory, ListedAttempt())
        attempt.size_bytes += file.size_bytes
        attempt.num_files += 1
        attempt.modified_seconds = max(attempt.modified_seconds or 0.0, file.modified_seconds)
        attempt.has_manifest |= name == MANIFEST_NAME
    for directory in attempt_directories(storage):
        found.setdefault(directory, ListedAttempt())
    return found


def look_for_garbage(
    log: Log, storage: Storage, newest: Record, listed: Mapping[str, ListedAttempt], *, now_seconds: float
) -> Garbage:
    """Return the findings of a dry run of `collect_garbage`, without writing anything.

    `listed` is the result of `listed_attempts`. `now_seconds` stands for the storage's clock, which only a write shows:
    if it is wrong by minutes, files outside of attempts that are about an hour old may be among the findings or not.
    """
    found = _find(
        log,
        storage,
        newest,
        read_identity(storage) or "",
        listed,
        claim=False,
        below_epoch=newest.state.epoch,
        now=lambda: now_seconds,
    )
    _collect_unfinished(storage, found, dry_run=True, now=lambda: now_seconds)
    return found


def collect_garbage(log: Log, storage: Storage, *, claim: bool = False, dry_run: bool = False) -> Garbage:
    """Remove everything that nothing refers to and no job can commit any more; a dry run only finds it.

    `claim` takes the store over first, which fences a job that still runs. Files on a disk that cannot be deleted, such
    as a symbolic link, stay, with the reason in `left`. Raises StoreMissing without a store, StoreForked if the log is
    not one history.
    """
    newest = log.checked_newest()
    store_id = read_identity(storage)
    if newest is None or store_id is None:
        raise StoreMissing(f"There is no store at {storage.uri}")
    if claim and not dry_run:
        newest = log.append(lambda _: Claim(start_token=f"gc-{uuid.uuid4().hex}", world_size=1)) or newest
    found = _find(
        log,
        storage,
        newest,
        store_id,
        listed_attempts(storage),
        claim=claim,
        below_epoch=newest.state.epoch + (claim and dry_run),
        now=log.store_now_seconds,
    )
    if not dry_run:
        for attempt, why in delete_attempts(log, storage, newest, found.attempts).items():
            del found.attempts[attempt]
            found.left[CHECKPOINT_PREFIX + attempt] = why
        for prefix in found.exchanges:
            storage.delete([file.key for file in storage.list(prefix)])
            storage.remove_directories(prefix.rstrip("/"))
        if isinstance(storage, Bucket):
            for key, upload_id in storage.unfinished(CHECKPOINT_PREFIX):
                if key in found.unfinished:
                    storage.abort_unfinished(key, upload_id)
    _collect_unfinished(storage, found, dry_run=dry_run, now=log.store_now_seconds)
    return found


def _collect_unfinished(storage: Storage, found: Garbage, *, dry_run: bool, now: Callable[[], float]) -> None:
    """On a disk: remove the files that killed writers left outside of attempts. A writer that is still alive fails, but
    does no harm."""
    if not isinstance(storage, Disk):
        return
    now_seconds = now()
    if not dry_run:
        leases.fresh(storage, now_seconds=now_seconds)  # removes the leases of killed readers
    before_seconds = now_seconds - ENDED_SECONDS
    prefixes = ["", LOG_PREFIX, LEASE_PREFIX, PROBE_PREFIX, CURSOR_PREFIX, *_group_prefixes(storage)]
    for prefix in prefixes:
        key = prefix.rstrip("/")
        try:
            found.unfinished.extend(storage.remove_unfinished(key, before_seconds=before_seconds, dry_run=dry_run))
        except StorageError as error:
            found.left[prefix] = str(error)


def _group_prefixes(storage: Disk) -> list[str]:
    """On a disk: return the key prefixes of all groups that have a directory, also of empty ones."""
    try:
        paths = list(storage.local_path(GROUP_PREFIX.rstrip("/")).iterdir())
        return [f"{GROUP_PREFIX}{path.name}/" for path in paths if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _find(
    log: Log,
    storage: Storage,
    newest: Record,
    store_id: str,
    listed: Mapping[str, ListedAttempt],
    *,
    claim: bool,
    below_epoch: int,
    now: Callable[[], float],
) -> Garbage:
    found = Garbage()
    named = {record.entry.attempt for record in log.records([*newest.state.live, *newest.state.trash])}
    unnamed = listed.keys() - named
    dropped = set(dropped_attempts(log, newest, unnamed))
    for directory in sorted(unnamed):
        reason = None
        if directory not in dropped:
            reason = _why_left(storage, directory, below_epoch, store_id, has_manifest=listed[directory].has_manifest)
        if reason is None:
            reason = _why_not_ours(storage, directory)
        if reason is None:
            found.attempts[directory] = listed[directory].size_bytes
        else:
            found.left[CHECKPOINT_PREFIX + directory] = reason
    if isinstance(storage, Bucket):
        for key, _ in storage.unfinished(CHECKPOINT_PREFIX):
            attempt = Attempt.parse(key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0])
            if attempt is not None and attempt.epoch < below_epoch:
                found.unfinished.append(key)
    _find_exchanges(log, storage, newest, found, claim=claim, now=now)
    return found


def _why_left(storage: Storage, directory: str, below_epoch: int, store_id: str, *, has_manifest: bool) -> str | None:
    """Return the reason to leave a directory that no record names; None if it may be removed."""
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


def _why_not_ours(storage: Storage, directory: str) -> str | None:
    """On a disk: return a reason if the directory is reached by a symbolic link, so that a dry run says what a deletion
    would refuse; else None."""
    if not isinstance(storage, Disk):
        return None
    path = storage.local_path(CHECKPOINT_PREFIX + directory)
    linked = next((part for part in (path.parent, path) if part.is_symlink()), None)
    return None if linked is None else f"{linked} is a symbolic link, and nothing is deleted through one"


def _find_exchanges(
    log: Log, storage: Storage, newest: Record, found: Garbage, *, claim: bool, now: Callable[[], float]
) -> None:
    """Find old probes, and messages of ranks whose job was superseded according to the log."""
    last: dict[str, float] = {}
    for file in [*storage.list(GROUP_PREFIX), *storage.list(PROBE_PREFIX)]:
        parts = file.key.split("/")
        prefix = "/".join(parts[:2]) + ("/" if len(parts) > 2 else "")
        last[prefix] = max(last.get(prefix, 0.0), file.modified_seconds)
    if isinstance(storage, Disk):
        for prefix in _group_prefixes(storage):
            with contextlib.suppress(OSError):  # its ranks are alive and have removed it
                last.setdefault(prefix, storage.local_path(prefix.rstrip("/")).lstat().st_mtime)
    if not last:
        return
    now_seconds = now()
    old = {prefix for prefix, seconds in last.items() if now_seconds - seconds > ENDED_SECONDS}
    groups = {_token_in(prefix) for prefix in old if prefix.startswith(GROUP_PREFIX)}
    owner, superseded = _claims_of(log, newest, groups)
    for prefix in sorted(old):
        token = _token_in(prefix)
        if claim or not prefix.startswith(GROUP_PREFIX) or token in superseded:
            found.exchanges.append(prefix)
        elif token != owner:
            found.left[prefix] = "of ranks that never claimed the store, perhaps readers; `gc --claim` takes it"


def _token_in(group_prefix: str) -> str:
    return group_prefix.removeprefix(GROUP_PREFIX).rstrip("/").partition(AGAIN)[0]


def _claims_of(log: Log, newest: Record, tokens: AbstractSet[str]) -> tuple[str | None, set[str]]:
    """Return the start token of the newest claim, and those of `tokens` that earlier claims have."""
    owner: str | None = None
    superseded: set[str] = set()
    for record in backwards(log, newest) if tokens else ():
        if isinstance(record.change, Claim):
            if owner is None:
                owner = record.change.start_token
            elif record.change.start_token != owner:
                superseded.add(record.change.start_token)
        if owner is not None and superseded >= tokens - {owner}:
            break
    return owner, superseded & set(tokens)
