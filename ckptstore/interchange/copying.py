"""Copies of checkpoints and of whole stores from one root to another, verified, and resumed where they broke off.

Between two places of one provider that the same credentials reach, or two disks, the storage copies by itself and every
byte is read back; else the bytes travel through this process.

A copy is itself crash-safe: files first, then the manifest, then, for a store, a record in a log of its own. What is
already there with its size is read and checked, not copied again.

A copy of a store claims its target as a job does, and its directories carry the claimed epoch. So garbage collection
leaves them alone while the copy may still commit them, and a later claim ends the copy and makes them garbage. A copy
that is run again claims anew, and takes over the files of the try before.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptstore.catalogue import Catalogue, job_of
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import CheckpointDamaged, CheckpointGone, FileMissing, InvalidInput, StoreMissing
from ckptstore.format.changes import Change, CheckpointEntry, Claim, Commit, Pin
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, USER_METADATA_NAME, Attempt
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.log import Log
from ckptstore.log.identity import read_identity, write_identity
from ckptstore.runtime.beat import Beat, no_beat
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import CopiesFrom, CopiesInside, Disk, Doubts, Storage
from ckptstore.storage.second_look import looked_twice, tell
from ckptstore.transfer.executor import Executor, InProcess
from ckptstore.transfer.opened import OpenedPlace
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.sources import Read
from ckptstore.upkeep.prune import delete_attempts


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
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Directories that were not copied, of a store that is damaged, each with the reason."""


class CopiedCheckpoint(NamedTuple):
    """A checkpoint that goes into another store."""

    entry: CheckpointEntry
    """As in the store that it comes from, but for `committed_at`, which is set."""
    files: CheckpointFiles
    is_pinned: bool


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
            looked_twice(self.storage, self.key, lambda: self.storage.read_into(self.key, offset, [view]))
            return [view]

        yield read


def copy_checkpoint(
    checkpoint: Checkpoint,
    target: OpenedPlace,
    *,
    prefix: str = "",
    earlier: Sequence[str] = (),
    executor: Executor | None = None,
) -> CopyReport:
    """Copy one checkpoint to keys below `prefix`: every file, then the manifest, all digests checked on both sides.

    The executor says where the files are copied; the manifest is written here. What lies below one of the `earlier`
    prefixes of the target is taken over. Raises CheckpointDamaged when the source is not what its manifest says;
    nothing is complete at the target then.
    """
    files = files_behind(checkpoint)
    with files.held():
        return _copy_checkpoint(files, target, prefix, earlier, executor or InProcess())


def _copy_checkpoint(
    files: CheckpointFiles, target: OpenedPlace, prefix: str, earlier: Sequence[str], executor: Executor
) -> CopyReport:
    manifest, data = whole_manifest(files)
    there = {file.key.removeprefix(prefix): file.size_bytes for file in target.storage.list(prefix)}
    _refuse_other_contents(manifest, data, target, prefix, there)
    sources = {receipt.name: files.key_of(receipt) for receipt in files.read_manifest()[0].files}
    tried = {
        file.key.removeprefix(other): (file.key, file.size_bytes)
        for other in earlier
        for file in target.storage.list(other)
    }
    share = _Share(files.alone(), target, prefix, sources, there, tried)
    founds = executor.run(share, manifest.files, size_bytes=lambda item: item.size_bytes, beat=no_beat)
    found = set().union(*founds)
    missing = [receipt for receipt in manifest.files if receipt.name not in found]
    if isinstance(target.storage, Disk):
        for name in manifest.directories:
            target.storage.make_directory(prefix + name)
    last = {MANIFEST_NAME: data}
    with contextlib.suppress(FileMissing):
        last = {USER_METADATA_NAME: files.storage.read(files.prefix + USER_METADATA_NAME), **last}
    for name, contents in last.items():
        target.storage.write(prefix + name, [memoryview(contents)])
        if isinstance(target.storage, Disk):
            target.storage.persist([prefix + name])
    return CopyReport(
        uri=target.storage.uri,
        steps=(manifest.step,) if missing else (),
        present=() if missing else (manifest.step,),
        num_copied=len(missing),
        num_found=len(found),
        copied_bytes=sum(receipt.size_bytes for receipt in missing),
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """Copies some of the files."""

    files: CheckpointFiles
    target: OpenedPlace
    prefix: str
    sources: Mapping[str, str]
    """By the name of a file the key from which it comes."""
    there: Mapping[str, int]
    """By name the size of what lies at the target."""
    tried: Mapping[str, tuple[str, int]]
    """By name the key and size of what an earlier try has left elsewhere at the target."""

    def __call__(self, receipts: Sequence[Receipt], beat: Beat) -> set[str]:
        """Give the names of those that had been copied before."""
        target, prefix = self.target, self.prefix
        candidates = [receipt for receipt in receipts if self.there.get(receipt.name) == receipt.size_bytes]
        found = _intact(target, prefix, candidates)
        found |= _take_over(target, prefix, [item for item in receipts if item.name not in found], self.tried)
        missing = [receipt for receipt in receipts if receipt.name not in found]
        with self.files.missing_is_damage():
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


def copy_store(store: Catalogue, target: OpenedPlace, *, executor: Executor | None = None) -> CopyReport:
    """Copy all live checkpoints of a store to another root, oldest first, with pins, into a log of its own.

    The copy keeps the store's id, so it is the same run at another place; what it already holds is left. Raises
    StoreMissing without a source, InvalidInput when another store lives at the target.
    """
    job = job_of(store)
    log, newest, store_id = job.log, job.log.newest(), read_identity(job.storage)
    if newest is None or store_id is None:
        raise StoreMissing(f"There is no store at {store.uri}")
    records = log.records(newest.state.live)
    times = log.commit_times(records)
    items = [
        CopiedCheckpoint(
            entry=replace(record.entry, committed_at=times[record.number]),
            files=files_of(job, record),
            is_pinned=record.number in newest.state.pinned,
        )
        for record in records
    ]
    return copy_all(items, store_id, target, executor=executor, above=newest.state.epoch)


def copy_all(
    items: Sequence[CopiedCheckpoint],
    store_id: str,
    target: OpenedPlace,
    *,
    executor: Executor | None,
    above: int,
    skips: bool = False,
) -> CopyReport:
    """Copy checkpoints to a store with this id, created where there is none; what it holds already is left.

    Its writer epoch lies above `above`. With `skips` a checkpoint that is not whole is left out, and the report says
    why; else it raises CheckpointDamaged. Raises InvalidInput when another store lives at the target.
    """
    if write_identity(target.storage, store_id) != store_id:
        raise InvalidInput(f"Another store lives at {target.storage.uri}", hint="Copy to an empty place")
    own = Log(target.storage, retry=target.config.retry, single_writer=target.config.single_writer)
    total = CopyReport(uri=target.storage.uri, steps=(), present=(), num_copied=0, num_found=0, copied_bytes=0)
    there = own.newest()
    held = {_origin(record.entry) for record in own.records(there.state.live if there else ())}
    epoch = _claim(own, above=above) if any(_origin(item.entry) not in held for item in items) else 0
    for entry, files, is_pinned in items:
        if _origin(entry) in held:
            total = replace(total, present=(*total.present, entry.step))
            continue
        attempt = replace(_origin(entry), epoch=epoch)
        try:
            copied = replace(entry, epoch=epoch, attempt=str(attempt))
            report, committed = _copy_and_commit(copied, files, own, target, attempt, executor)
        except (CheckpointDamaged, CheckpointGone) as error:
            if not skips:
                raise
            total = replace(total, left_out={**total.left_out, entry.attempt: error.message})
            continue
        if is_pinned:
            own.append(lambda _newest, number=committed.number: Pin((number,)))  # type: ignore[misc]
        total = replace(
            total,
            steps=(*total.steps, entry.step),
            num_copied=total.num_copied + report.num_copied,
            num_found=total.num_found + report.num_found,
            copied_bytes=total.copied_bytes + report.copied_bytes,
        )
    return total


def _copy_and_commit(
    entry: CheckpointEntry,
    files: CheckpointFiles,
    own: Log,
    target: OpenedPlace,
    attempt: Attempt,
    executor: Executor | None,
) -> tuple[CopyReport, Record]:
    earlier = _earlier_tries(target.storage, own, attempt)
    prefixes = [try_.prefix for try_ in earlier]
    report = copy_checkpoint(Checkpoint(files), target, prefix=attempt.prefix, earlier=prefixes, executor=executor)
    if entry.bases:
        entry = replace(entry, bases=(), manifest_sha256=sha256_of(whole_manifest(files)[1]))

    def change(newest: Record | None) -> Commit:
        return Commit(entry=replace(entry, save_number=newest.state.save_number + 1 if newest else 1))

    committed = own.append(change)
    assert committed is not None  # a commit is always written
    delete_attempts(own, target.storage, committed, [str(try_) for try_ in earlier])
    return report, committed


def _origin(entry: CheckpointEntry) -> Attempt:
    """What a checkpoint has in common with its copies: they differ in the epoch."""
    attempt = Attempt.parse(entry.attempt)
    assert attempt is not None  # an entry has checked it
    return replace(attempt, epoch=0)


def _earlier_tries(storage: Storage, own: Log, attempt: Attempt) -> list[Attempt]:
    """Directories of copies of the same checkpoint that broke off. Their epochs are over, so nobody commits them."""
    newest = own.checked_newest()
    named = {
        record.entry.attempt for record in own.records([*newest.state.live, *newest.state.trash] if newest else ())
    }
    step = str(attempt).partition("-e")[0]
    names = {file.key.split("/")[1] for file in storage.list(f"{CHECKPOINT_PREFIX}{step}-e")}
    tries = [try_ for name in names - named if (try_ := Attempt.parse(name))]
    return sorted(try_ for try_ in tries if try_.suffix == attempt.suffix and try_.epoch < attempt.epoch)


def _claim(log: Log, *, above: int) -> int:
    """A writer epoch for the copy that lies above every epoch in the names of what it copies."""

    def change(_newest: Record | None) -> Change:
        return Claim(start_token=f"cp-{uuid.uuid4().hex}", world_size=1, above_epoch=above)

    record = log.append(change)
    assert record is not None  # a claim is always written
    return record.state.epoch


def _refuse_other_contents(
    manifest: Manifest, data: bytes, target: OpenedPlace, prefix: str, there: Mapping[str, int]
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


def _intact(target: OpenedPlace, prefix: str, receipts: Sequence[Receipt]) -> set[str]:
    wanted = [CheckpointFiles.wanted_at(prefix, receipt) for receipt in receipts if receipt.crc32c is not None]
    checked = target.transfer.check(wanted)
    good = {item.wanted.key for item in checked if item.crc32c == item.wanted.crc32c}
    return {receipt.name for receipt in receipts if prefix + receipt.name in good}


def _keep_intact(target: OpenedPlace, prefix: str, receipts: Sequence[Receipt]) -> set[str]:
    """Make durable what the storage has copied by itself, delete what is not whole, and give the names of the rest."""
    storage = target.storage
    if receipts and isinstance(storage, Disk) and target.config.transfer.durable:
        storage.persist([prefix + receipt.name for receipt in receipts])
    intact = _intact(target, prefix, receipts)
    storage.delete([prefix + receipt.name for receipt in receipts if receipt.name not in intact])
    return intact


def _take_over(
    target: OpenedPlace, prefix: str, receipts: Sequence[Receipt], tried: Mapping[str, tuple[str, int]]
) -> set[str]:
    """Copy files of an earlier try inside the storage, and give the names of what is whole. The try may still be
    writing them, so they are no links."""
    storage = target.storage
    if not isinstance(storage, CopiesInside):
        return set()
    taken = []
    for receipt in receipts:
        key, size_bytes = tried.get(receipt.name, ("", -1))
        if size_bytes == receipt.size_bytes and receipt.crc32c is not None:
            with contextlib.suppress(FileMissing):  # it is garbage, and may be collected meanwhile
                storage.copy(key, prefix + receipt.name)
                taken.append(receipt)
    return _keep_intact(target, prefix, taken)


def _copy_inside(
    files: CheckpointFiles,
    sources: Mapping[str, str],
    target: OpenedPlace,
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
    mapped(copy, known[1:], num_threads=target.transfer.num_tasks, name="ckptstore-copy")
    return _keep_intact(target, prefix, known)


def _copy_files(
    files: CheckpointFiles,
    sources: Mapping[str, str],
    target: OpenedPlace,
    prefix: str,
    receipts: Sequence[Receipt],
) -> None:
    wrong = _streamed(files, sources, target, prefix, receipts)
    if wrong and isinstance(files.storage, Doubts):  # it is believed after a second look in another way
        for receipt in wrong:
            files.storage.doubt(sources[receipt.name])
        still = _streamed(files, sources, target, prefix, [*wrong])
        for receipt in wrong.keys() - still.keys():
            tell(files.storage, sources[receipt.name], "its CRC32C was another one")
        wrong = still
    for receipt, found in wrong.items():
        target.storage.delete([prefix + receipt.name])
        raise CheckpointDamaged(
            f"{receipt.name} is damaged at the source: its CRC32C is {found:08x}, the manifest says "
            f"{receipt.crc32c:08x}",
            rank=receipt.rank,
            file=receipt.name,
        )


def _streamed(
    files: CheckpointFiles,
    sources: Mapping[str, str],
    target: OpenedPlace,
    prefix: str,
    receipts: Sequence[Receipt],
) -> dict[Receipt, int]:
    """Copy files, and return those that did not have their digest, with the one that they had."""
    planned = [
        PlannedFile(prefix + receipt.name, StorageSource(files.storage, sources[receipt.name], receipt.size_bytes))
        for receipt in receipts
    ]
    found = zip(receipts, target.transfer.upload(planned), strict=True)
    return {
        receipt: stored.crc32c
        for receipt, stored in found
        if receipt.crc32c is not None and stored.crc32c != receipt.crc32c
    }


def _check_arrived(target: OpenedPlace, prefix: str, receipts: Sequence[Receipt]) -> None:
    missing = {receipt.name for receipt in receipts if receipt.crc32c is not None} - _intact(target, prefix, receipts)
    if missing:
        raise CheckpointDamaged(f"{len(missing)} files did not arrive whole, for instance {min(missing)}")
