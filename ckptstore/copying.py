"""Copies of checkpoints and of whole stores from one root to another, verified, and resumed where they broke off.

Between two places of one provider that the same credentials reach, or two disks, the storage copies by itself and every
byte is read back; else the bytes travel through this process.

A copy is itself crash-safe: files first, then the manifest, then, for a store, a record in a log of its own. What is
already there with its size is read and checked, not copied again.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidInput, StoreMissing
from ckptstore.executor import Beat, Executor, InProcess
from ckptstore.identity import read_identity, write_identity
from ckptstore.layout import MANIFEST_NAME, USER_METADATA_NAME
from ckptstore.load import CheckpointFiles, attempt_prefix
from ckptstore.log import Log
from ckptstore.manifest import Manifest, Receipt, sha256_of
from ckptstore.plan import PlannedFile
from ckptstore.records import Change, Claim, Commit, Pin, Record
from ckptstore.retried import with_retries
from ckptstore.sources import Read
from ckptstore.storage.base import CopiesFrom, HasLocalFiles, Persists, Storage
from ckptstore.storage.open import open_storage
from ckptstore.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did."""

    uri: str
    steps: tuple[int, ...]
    """Checkpoints that are there now because of this copy."""
    present: tuple[int, ...]
    """Checkpoints that were there already."""
    num_copied: int
    """Files that were copied."""
    num_found: int
    """Files that an earlier try had copied already."""
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class StorageSource:
    """A stored file, to be written to another storage."""

    storage: Storage
    key: str
    size_bytes: int
    payloads: Sequence[tuple[int, int]] = ()
    in_memory: bool = False

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        def read(offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
            view = scratch[:size_bytes]
            self.storage.read_into(self.key, offset, [view])
            return [view]

        yield read


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a copy goes."""

    storage: Storage
    transfer: Transfer
    config: StoreConfig

    def close(self) -> None:
        """Give connections back."""
        self.transfer.close()
        self.storage.close()


def open_target(
    uri: str,
    *,
    storage_options: Mapping[str, Any] | None,
    config: StoreConfig | None = None,
    engine: str | None = None,
) -> Target:
    """Open the root that a copy goes to."""
    config = config or StoreConfig.from_env()
    storage = open_storage(
        uri,
        storage_options=storage_options,
        engine=engine,
        durable=config.transfer.durable,
        direct_io=config.transfer.direct_io,
    )
    storage = with_retries(storage, config.retry)
    return Target(
        storage=storage, transfer=Transfer(storage, config=config.transfer, retry=config.retry), config=config
    )


def copy_checkpoint(
    files: CheckpointFiles, target: Target, *, prefix: str = "", executor: Executor | None = None
) -> CopyReport:
    """Copy one checkpoint to keys below `prefix`: every file, then the manifest, all digests checked on both sides.

    The executor says where the files are copied; the manifest is written here. Raises CheckpointDamaged when the source
    is not what its manifest says; nothing is complete at the target then.
    """
    manifest, data = whole_manifest(files)
    there = {file.key.removeprefix(prefix): file.size_bytes for file in target.storage.list(prefix)}
    _refuse_other_contents(manifest, data, target, prefix, there)
    sources = {receipt.name: files.key_of(receipt) for receipt in files.read_manifest()[0].files}
    share = _Share(files.alone(), target, prefix, sources, there)
    founds = (executor or InProcess()).run(
        share, manifest.files, size_bytes=lambda item: item.size_bytes, beat=_no_beat
    )
    found = set().union(*founds)
    missing = [receipt for receipt in manifest.files if receipt.name not in found]
    if isinstance(target.storage, HasLocalFiles):
        for name in manifest.directories:
            target.storage.make_directory(prefix + name)
    last = {MANIFEST_NAME: data}
    with contextlib.suppress(FileMissing):
        last = {USER_METADATA_NAME: files.storage.read(files.prefix + USER_METADATA_NAME), **last}
    for name, contents in last.items():
        target.storage.write(prefix + name, [memoryview(contents)])
        if isinstance(target.storage, Persists):
            target.storage.persist([prefix + name])
    return CopyReport(
        uri=target.storage.uri,
        steps=(manifest.step,) if missing else (),
        present=() if missing else (manifest.step,),
        num_copied=len(missing),
        num_found=len(found),
        copied_bytes=sum(receipt.size_bytes for receipt in missing),
    )


def _no_beat() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Share:
    """Copies some of the files."""

    files: CheckpointFiles
    target: Target
    prefix: str
    sources: Mapping[str, str]
    """By the name of a file the key from which it comes."""
    there: Mapping[str, int]
    """By name the size of what lies at the target."""

    def __call__(self, receipts: Sequence[Receipt], beat: Beat) -> set[str]:
        """Give the names of those that had been copied before."""
        target, prefix = self.target, self.prefix
        candidates = [receipt for receipt in receipts if self.there.get(receipt.name) == receipt.size_bytes]
        found = _intact(target, prefix, candidates)
        missing = [receipt for receipt in receipts if receipt.name not in found]
        inside = _copy_inside(self.files, self.sources, target, prefix, missing)
        streamed = [receipt for receipt in missing if receipt.name not in inside]
        _copy_files(self.files, self.sources, target, prefix, streamed)
        _check_arrived(target, prefix, streamed)
        return found


def whole_manifest(files: CheckpointFiles) -> tuple[Manifest, bytes]:
    """The manifest of a copy: that of the checkpoint, but that all files lie in its own directory."""
    manifest, data = files.read_manifest()
    whole = manifest.made_whole()
    return whole, data if whole is manifest else whole.encode()


def copy_store(
    log: Log,
    storage: Storage,
    target: Target,
    open_files: Callable[[Record], CheckpointFiles],
    *,
    executor: Executor | None = None,
) -> CopyReport:
    """Copy all live checkpoints of a store to another root, oldest first, with pins, into a log of its own.

    The copy keeps the store's id, so it is the same run at another place; what it already holds is left. Raises
    StoreMissing without a source, InvalidInput when another store lives at the target.
    """
    newest = log.newest()
    store_id = read_identity(storage)
    if newest is None or store_id is None:
        raise StoreMissing(f"There is no store at {storage.uri}")
    if write_identity(target.storage, store_id) != store_id:
        raise InvalidInput(f"Another store lives at {target.storage.uri}", hint="Copy to an empty place")
    own = Log(target.storage, retry=target.config.retry, single_writer=target.config.single_writer)
    records = log.records(newest.state.live)
    total = CopyReport(uri=target.storage.uri, steps=(), present=(), num_copied=0, num_found=0, copied_bytes=0)
    held = _live_attempts(own)
    epoch = _claim(own, above=newest.state.epoch) if any(r.entry.attempt not in held for r in records) else 0
    for record in records:
        if record.entry.attempt in held:
            total = replace(total, present=(*total.present, record.entry.step))
            continue
        report = copy_checkpoint(open_files(record), target, prefix=attempt_prefix(record), executor=executor)
        digest = sha256_of(whole_manifest(open_files(record))[1]) if record.entry.bases else None
        entry = replace(record.entry, epoch=epoch, bases=(), manifest_sha256=digest or record.entry.manifest_sha256)
        committed = own.append(lambda _newest, entry=entry: Commit(entry=entry))  # type: ignore[misc]
        if committed is not None and record.number in newest.state.pinned:
            own.append(lambda _newest, number=committed.number: Pin((number,)))  # type: ignore[misc]
        total = replace(
            total,
            steps=(*total.steps, record.entry.step),
            num_copied=total.num_copied + report.num_copied,
            num_found=total.num_found + report.num_found,
            copied_bytes=total.copied_bytes + report.copied_bytes,
        )
    return total


def _live_attempts(log: Log) -> set[str]:
    newest = log.newest()
    return {record.entry.attempt for record in log.records(newest.state.live)} if newest else set()


def _claim(log: Log, *, above: int) -> int:
    """A writer epoch for the copy that lies above every epoch in the names of what it copies."""

    def change(_newest: Record | None) -> Change:
        return Claim(start_token=f"cp-{uuid.uuid4().hex}", world_size=1, above_epoch=above)

    record = log.append(change)
    assert record is not None  # a claim is always written
    return record.state.epoch


def _refuse_other_contents(
    manifest: Manifest, data: bytes, target: Target, prefix: str, there: Mapping[str, int]
) -> None:
    if not there:
        return
    if MANIFEST_NAME in there:
        found = target.storage.read(prefix + MANIFEST_NAME)
        if found == data:
            return
        if not data.startswith(found):  # else a copy was killed while it wrote this one
            raise InvalidInput(f"Another checkpoint lies at {target.storage.uri}/{prefix}".rstrip("/"))
    foreign = there.keys() - manifest.by_name.keys() - {MANIFEST_NAME, USER_METADATA_NAME}
    if foreign:
        raise InvalidInput(
            f"{target.storage.uri}/{prefix} has {len(foreign)} other files, for instance {min(foreign)}",
            hint="Copy to an empty place",
        )


def _intact(target: Target, prefix: str, receipts: Sequence[Receipt]) -> set[str]:
    wanted = [CheckpointFiles.wanted_at(prefix, receipt) for receipt in receipts if receipt.crc32c is not None]
    checked = target.transfer.check(wanted)
    good = {item.wanted.key for item in checked if item.crc32c == item.wanted.crc32c}
    return {receipt.name for receipt in receipts if prefix + receipt.name in good}


def _copy_inside(
    files: CheckpointFiles,
    sources: Mapping[str, str],
    target: Target,
    prefix: str,
    receipts: Sequence[Receipt],
) -> set[str]:
    """Have the storage copy what it can without this process, and give the names of what arrived whole.

    What did not is left to be streamed: that either mends it or finds that the source is damaged.
    """
    storage = target.storage
    if not isinstance(storage, CopiesFrom):
        return set()

    def copy(receipt: Receipt) -> bool:
        return storage.copy_from(files.storage, sources[receipt.name], prefix + receipt.name)

    known = [receipt for receipt in receipts if receipt.crc32c is not None]
    if not known or not copy(known[0]):
        return set()
    with ThreadPoolExecutor(target.transfer.num_tasks) as pool:
        list(pool.map(copy, known[1:]))
    if isinstance(storage, Persists) and target.config.transfer.durable:
        storage.persist([prefix + receipt.name for receipt in known])
    intact = _intact(target, prefix, known)
    storage.delete([prefix + receipt.name for receipt in known if receipt.name not in intact])
    return intact


def _copy_files(
    files: CheckpointFiles,
    sources: Mapping[str, str],
    target: Target,
    prefix: str,
    receipts: Sequence[Receipt],
) -> None:
    planned = [
        PlannedFile(prefix + receipt.name, StorageSource(files.storage, sources[receipt.name], receipt.size_bytes))
        for receipt in receipts
    ]
    for receipt, stored in zip(receipts, target.transfer.upload(planned), strict=True):
        if receipt.crc32c is not None and stored.crc32c != receipt.crc32c:
            target.storage.delete([prefix + receipt.name])
            raise CheckpointDamaged(
                f"{receipt.name} is damaged at the source: its CRC32C is {stored.crc32c:08x}, the manifest says "
                f"{receipt.crc32c:08x}",
                rank=receipt.rank,
                file=receipt.name,
            )


def _check_arrived(target: Target, prefix: str, receipts: Sequence[Receipt]) -> None:
    missing = {receipt.name for receipt in receipts if receipt.crc32c is not None} - _intact(target, prefix, receipts)
    if missing:
        raise CheckpointDamaged(f"{len(missing)} files did not arrive whole, for instance {min(missing)}")
