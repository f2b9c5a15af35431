"""Copies of checkpoints and of whole stores from one root to another, verified, and resumed where they broke off.

A copy is itself crash-safe: files first, then the manifest, then, for a store, a record in a log of its own. What is
already there with its size is read and checked, not copied again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, InvalidInput, StoreMissing
from ckptstore.identity import read_identity, write_identity
from ckptstore.layout import MANIFEST_NAME, USER_METADATA_NAME
from ckptstore.load import CheckpointFiles, attempt_prefix
from ckptstore.log import Log
from ckptstore.manifest import Receipt
from ckptstore.plan import PlannedFile
from ckptstore.records import Change, Claim, Commit, Pin, Record
from ckptstore.sources import Read
from ckptstore.storage.base import HasLocalFiles, Persists, Storage
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

    @contextmanager
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


def open_target(uri: str, *, storage_options: Mapping[str, Any] | None, config: StoreConfig | None = None) -> Target:
    """Open the root that a copy goes to."""
    config = config or StoreConfig.from_env()
    storage = open_storage(uri, storage_options=storage_options, durable=config.transfer.durable)
    return Target(
        storage=storage, transfer=Transfer(storage, config=config.transfer, retry=config.retry), config=config
    )


def copy_checkpoint(files: CheckpointFiles, target: Target, *, prefix: str = "") -> CopyReport:
    """Copy one checkpoint to keys below `prefix`: every file, then the manifest, all digests checked on both sides.

    Raises CheckpointDamaged when the source is not what its manifest says; nothing is complete at the target then.
    """
    manifest, _ = files.read_manifest()
    there = {file.key.removeprefix(prefix): file.size_bytes for file in target.storage.list(prefix)}
    _refuse_other_contents(files, target, prefix, there)
    candidates = [receipt for receipt in manifest.files if there.get(receipt.name) == receipt.size_bytes]
    found = _intact(target, prefix, candidates)
    missing = [receipt for receipt in manifest.files if receipt.name not in found]
    _copy_files(files, target, prefix, missing)
    _check_arrived(target, prefix, missing)
    if isinstance(target.storage, HasLocalFiles):
        for name in manifest.directories:
            target.storage.make_directory(prefix + name)
    for name in (USER_METADATA_NAME, MANIFEST_NAME):
        if any(file.key == files.prefix + name for file in files.storage.list(files.prefix + name)):
            data = files.storage.read(files.prefix + name)
            target.storage.write(prefix + name, [memoryview(data)])
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


def copy_store(
    log: Log,
    storage: Storage,
    target: Target,
    open_files: Callable[[Record], CheckpointFiles],
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
        report = copy_checkpoint(open_files(record), target, prefix=attempt_prefix(record))
        entry = replace(record.entry, epoch=epoch, bases=())
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


def _refuse_other_contents(files: CheckpointFiles, target: Target, prefix: str, there: Mapping[str, int]) -> None:
    if not there:
        return
    if MANIFEST_NAME in there:
        same = target.storage.read(prefix + MANIFEST_NAME) == files.storage.read(files.prefix + MANIFEST_NAME)
        if not same:
            raise InvalidInput(f"Another checkpoint lies at {target.storage.uri}/{prefix}".rstrip("/"))
        return
    manifest, _ = files.read_manifest()
    foreign = there.keys() - manifest.by_name.keys() - {USER_METADATA_NAME}
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


def _copy_files(files: CheckpointFiles, target: Target, prefix: str, receipts: Sequence[Receipt]) -> None:
    planned = [
        PlannedFile(
            prefix + receipt.name, StorageSource(files.storage, files.prefix + receipt.name, receipt.size_bytes)
        )
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
