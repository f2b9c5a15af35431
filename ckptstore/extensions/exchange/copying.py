"""Copy checkpoints and whole stores from one root to another, verified, and resume a copy that broke off.

Between two places of one provider that the same credentials reach, or two disks, the storage copies by itself and every
byte is read back; else the bytes travel through this process.

A copy is itself crash-safe: files first, then the manifest, then, for a store, a record in a log of its own. A file
that exists with its size is read and checked, not copied again.

A copy of a store claims its target as a job does, and its directories carry the claimed epoch. So garbage collection
leaves them alone while the copy may still commit them, and a later claim ends the copy and makes them garbage. Run
again, a copy claims a new epoch and takes over the files of the earlier try.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptstore.catalogue import Catalogue, job_of
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import CheckpointDamaged, CheckpointGone, FileMissing, InvalidInput, StoreMissing
from ckptstore.format.changes import Claim, Commit, Pin
from ckptstore.format.digest import Digest
from ckptstore.format.entry import CheckpointEntry
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, USER_METADATA_NAME, Attempt, record_key
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.format.record import Record
from ckptstore.job import Job, annotation
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.log import Log
from ckptstore.log.identity import read_identity, read_or_create_store_json
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import CopiesFrom, CopiesInside, Storage
from ckptstore.storage.second_look import looked_twice, tell
from ckptstore.transfer.executor import Executor, InProcess
from ckptstore.transfer.moves import PlannedFile, Wanted
from ckptstore.transfer.opened import OpenedPlace
from ckptstore.transfer.sources import Read
from ckptstore.upkeep.prune import delete_attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of a copy."""

    uri: str
    steps: tuple[int, ...]
    """Checkpoints that this copy added."""
    present: tuple[int, ...]
    """Checkpoints that existed before."""
    num_copied: int
    """Files copied."""
    num_found: int
    """Files that an earlier try had copied."""
    copied_bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Directories that were not copied, each with the reason: damaged, or too late for their place in the order."""


class CopiedCheckpoint(NamedTuple):
    """A checkpoint to be copied into another store."""

    entry: CheckpointEntry
    """The source's entry, with `committed_at` set."""
    files: CheckpointFiles
    is_pinned: bool
    bases: tuple[Attempt, ...] = ()
    """The origins of the versions to which these weights are a delta, or of others whose files it has."""


@dataclass(frozen=True, slots=True)
class StorageSource:
    """A stored file as the source of a write to another storage."""

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

    The executor decides where the files are copied; this process writes the manifest. Files below one of the `earlier`
    prefixes of the target are taken over. Raises CheckpointDamaged when the source does not match its manifest; nothing
    is complete at the target then. Raises InvalidInput for a delta of weights without a `prefix`: alone nobody can read
    it.
    """
    files = files_behind(checkpoint)
    with files.held():
        if not prefix and _is_delta(files):
            raise InvalidInput(
                f"Step {checkpoint.step} is a delta to another version of the weights, and cannot be read without it",
                step=checkpoint.step,
                hint="Copy the whole publication, or bring the version to a directory: `ckptstore pull --version`",
            )
        return _copy_checkpoint(files, target, prefix, earlier, executor or InProcess())


def _copy_checkpoint(
    files: CheckpointFiles, target: OpenedPlace, prefix: str, earlier: Sequence[str], executor: Executor
) -> CopyReport:
    stored, data = files.read_manifest()
    manifest = stored.made_whole()
    data = data if manifest is stored else manifest.encode()
    existing = {file.key.removeprefix(prefix): file.size_bytes for file in target.storage.list(prefix)}
    _refuse_other_contents(manifest, data, target, prefix, existing)
    sources = {receipt.name: files.key_of(receipt) for receipt in stored.files}
    tried = {
        file.key.removeprefix(other): (file.key, file.size_bytes)
        for other in earlier
        for file in target.storage.list(other)
    }
    share = _Share(files.alone(), target, prefix, sources, existing, tried)
    founds = executor.run(share, manifest.files, size_bytes=lambda item: item.size_bytes)
    found = set().union(*founds)
    missing = [receipt for receipt in manifest.files if receipt.name not in found]
    for name in manifest.directories:
        target.storage.make_directory(prefix + name)
    last = {MANIFEST_NAME: data}
    with contextlib.suppress(FileMissing):
        last = {USER_METADATA_NAME: files.storage.read(files.prefix + USER_METADATA_NAME), **last}
    for name, contents in last.items():
        target.storage.write(prefix + name, [memoryview(contents)])
        target.storage.persist([prefix + name])
    return CopyReport(
        uri=target.storage.uri,
        steps=(manifest.step,) if missing else (),
        present=() if missing else (manifest.step,),
        num_copied=len(missing),
        num_found=len(found),
        copied_bytes=sum(receipt.size_bytes for receipt in missing),
    )


def _is_delta(files: CheckpointFiles) -> bool:
    """Return True for a version of weights that is applied to another one, which its manifest does not name."""
    bases = () if files.record is None else files.record.entry.bases
    return bool(bases) and not files.read_manifest()[0].references


def copy_store(store: Catalogue, target: OpenedPlace, *, executor: Executor | None = None) -> CopyReport:
    """Copy all live checkpoints of a store to another root, oldest first, with pins, into a log of its own.

    Versions of weights in the trash to which live ones are deltas are copied too, and are live in the copy. The copy
    keeps the store's id, so it is the same run at another place; checkpoints that it holds already are left. Raises
    StoreMissing without a source, InvalidInput when another store lives at the target.
    """
    job = job_of(store)
    log, newest, store_id = job.log, job.log.newest(), read_identity(job.storage)
    if newest is None or store_id is None:
        raise StoreMissing(f"There is no store at {store.uri}")
    _refuse_itself(job.storage, newest, target)
    records = log.annotated(_needed(job, newest), newest)
    times = log.commit_times(records)
    origins = {record.number: origin_of(record.entry) for record in records}
    items = [
        CopiedCheckpoint(
            entry=replace(record.entry, committed_at=times[record.number]),
            files=files_of(job, record),
            is_pinned=record.number in newest.state.pinned,
            bases=tuple(origins[number] for number in record.entry.bases if number in origins),
        )
        for record in records
    ]
    return copy_all(items, store_id, target, executor=executor, above=newest.state.epoch)


def _refuse_itself(source: Storage, newest: Record, target: OpenedPlace) -> None:
    """Raise InvalidInput if the target is the place of the source, however it is spelt: a copy has a log of its own."""
    key = record_key(newest.number)
    if target.storage.read_if_there(key) == newest.encode():
        raise InvalidInput(
            f"{target.storage.uri} is the store {source.uri} itself: nothing is to be copied",
            hint="Give another place",
        )


def _needed(job: Job, newest: Record) -> list[Record]:
    """Return the records of the live checkpoints, and of those that their deltas are applied to, in their order."""
    found = {record.number: record for record in job.log.records(newest.state.live)}
    unseen = list(found.values())
    while unseen:
        record = unseen.pop()
        lacking = [number for number in record.entry.bases if number not in found]
        if lacking and _is_delta(files_of(job, record)):
            bases = job.log.records(lacking)
            found.update((base.number, base) for base in bases)
            unseen += bases
    return [found[number] for number in newest.state.in_order(found)]


def copy_all(
    items: Sequence[CopiedCheckpoint],
    store_id: str,
    target: OpenedPlace,
    *,
    executor: Executor | None,
    above: int,
    skips: bool = False,
) -> CopyReport:
    """Copy checkpoints to the store with this id, created if missing; checkpoints that it holds already are left.

    One that the target lacks, and of which it holds a later one, is left out and reported: it would become the latest
    there. Those that it holds are pinned as the source's are, and no pin is taken away.

    Its writer epoch lies above `above`. With `skips`, a checkpoint that is not whole is left out and reported; else it
    raises CheckpointDamaged. Raises InvalidInput when another store lives at the target.
    """
    own = Log(target.storage, single_writer=target.config.single_writer)
    total = CopyReport(uri=target.storage.uri, steps=(), present=(), num_copied=0, num_found=0, copied_bytes=0)
    newest = own.newest()
    if newest is None:
        own.try_creates()
        own.check_safe()  # before anything is written
    if read_or_create_store_json(target.storage, store_id=store_id).store_id != store_id:
        raise InvalidInput(f"Another store lives at {target.storage.uri}", hint="Copy to an empty place")
    present = {*newest.state.live, *newest.state.bases} if newest else ()  # those that its deltas need, too
    copies = own.annotated(own.records(sorted(present)), newest)
    held = {origin_of(record.entry): record for record in copies}
    pinned = newest.state.pinned if newest else frozenset[int]()
    places = [place for place, item in enumerate(items) if origin_of(item.entry) in held]
    late = {origin_of(item.entry) for item in items[: places[-1] if places else 0]} - held.keys()
    kept = {origin_of(item.entry) for item in items}
    epoch = 0
    if any(origin_of(item.entry) not in {*held, *late} for item in items):  # above every epoch in the copied names
        claim = Claim(start_token=f"cp-{uuid.uuid4().hex}", world_size=1, above_epoch=above)
        epoch = own.append(lambda _newest: claim).state.epoch
    for item in items:
        entry, origin = item.entry, origin_of(item.entry)
        if (copy := held.get(origin)) is not None:
            _annotate_copy(own, copy, entry.metrics)
            if item.is_pinned and copy.number not in pinned:  # by now, or before a copy was interrupted
                own.append(lambda _newest, number=copy.number: Pin((number,)))  # type: ignore[misc]
            total = replace(total, present=(*total.present, entry.step))
            continue
        if origin in late:
            reason = f"{target.storage.uri} holds a later one already, and this one would become its latest"
            total = replace(total, left_out={**total.left_out, entry.attempt: reason})
            continue
        attempt = replace(origin, epoch=epoch)
        try:
            copied = replace(entry, epoch=epoch, attempt=str(attempt), **_dependence(item, held))
            stale = {record.number for made, record in held.items() if made not in kept}
            report, held[origin] = _copy_and_commit(copied, item.files, own, target, stale, executor)
        except (CheckpointDamaged, CheckpointGone) as error:
            if not skips:
                raise
            total = replace(total, left_out={**total.left_out, entry.attempt: error.message})
            continue
        if item.is_pinned:
            own.append(lambda _newest, number=held[origin].number: Pin((number,)))  # type: ignore[misc]
        total = replace(
            total,
            steps=(*total.steps, entry.step),
            num_copied=total.num_copied + report.num_copied,
            num_found=total.num_found + report.num_found,
            copied_bytes=total.copied_bytes + report.copied_bytes,
        )
    return total


def _dependence(item: CopiedCheckpoint, held: Mapping[Attempt, Record]) -> dict[str, Any]:
    """Return the fields of an entry that say what its copy needs of others: nothing, where it has all files itself; the
    copies of the same versions, where a delta of weights is applied to others.

    Raises CheckpointGone if one of those is not copied.
    """
    if not (item.bases or item.entry.bases):
        return {}
    manifest = item.files.read_manifest()[0]
    if manifest.references:
        return {"bases": (), "own_bytes": None, "manifest_sha256": sha256_of(manifest.made_whole().encode())}
    for base in item.bases:
        if base not in held:
            raise CheckpointGone(
                f"Step {item.entry.step} is a delta to version {base.step}, which is not copied: nobody could read it",
                step=item.entry.step,
            )
    return {"bases": tuple(held[base].number for base in item.bases)}


def _annotate_copy(own: Log, copy: Record, metrics: Mapping[str, float]) -> None:
    """Give a copy the metrics that its original was annotated with since it was copied."""
    known = copy.entry.metrics
    late = {name: value for name, value in metrics.items() if name not in known or repr(known[name]) != repr(value)}
    if late:
        own.append(lambda newest: annotation(own, newest, copy.place, late, epoch=None))


def _copy_and_commit(
    entry: CheckpointEntry,
    files: CheckpointFiles,
    own: Log,
    target: OpenedPlace,
    stale: Collection[int],
    executor: Executor | None,
) -> tuple[CopyReport, Record]:
    """Copy one checkpoint. Of the `stale` ones, which the source has no more, it replaces those of its step."""
    attempt = Attempt.of(entry.attempt)
    earlier = _earlier_tries(target.storage, own, attempt)
    prefixes = [try_.prefix for try_ in earlier]
    report = copy_checkpoint(Checkpoint(files), target, prefix=attempt.prefix, earlier=prefixes, executor=executor)

    def change(newest: Record | None) -> Commit:
        live = own.records(newest.state.live) if newest else []
        replaced = {record.number for record in live if record.entry.step == entry.step} & {*stale}
        number = newest.state.save_number + 1 if newest else 1
        return Commit(entry=replace(entry, save_number=number), replaces=tuple(sorted(replaced)))

    committed = own.append(change)
    delete_attempts(own, target.storage, committed, [str(try_) for try_ in earlier])
    return report, committed


def origin_of(entry: CheckpointEntry) -> Attempt:
    """Return the attempt without its epoch, which a checkpoint shares with its copies and with its thinned form."""
    return replace(Attempt.of(entry.thinned.attempt if entry.thinned else entry.attempt), epoch=0)


def _earlier_tries(storage: Storage, own: Log, attempt: Attempt) -> list[Attempt]:
    """List directories of broken-off copies of the same checkpoint. Their epochs are over, so nobody commits them."""
    newest = own.checked_newest()
    named = {
        record.entry.attempt for record in own.records([*newest.state.live, *newest.state.trash] if newest else ())
    }
    step = str(attempt).partition("-e")[0]
    names = {file.key.split("/")[1] for file in storage.list(f"{CHECKPOINT_PREFIX}{step}-e")}
    tries = [try_ for name in names - named if (try_ := Attempt.parse(name))]
    return sorted(try_ for try_ in tries if try_.suffix == attempt.suffix and try_.epoch < attempt.epoch)


def _refuse_other_contents(
    manifest: Manifest, data: bytes, target: OpenedPlace, prefix: str, existing: Mapping[str, int]
) -> None:
    if not existing:
        return
    if MANIFEST_NAME in existing:
        found = target.storage.read(prefix + MANIFEST_NAME)
        if found == data:
            return
        if not data.startswith(found):  # else a copy was killed while it wrote this one
            raise InvalidInput(f"Another checkpoint lies at {target.storage.uri}/{prefix}".rstrip("/"))
    foreign = existing.keys() - manifest.by_name.keys() - {MANIFEST_NAME, USER_METADATA_NAME}
    if foreign:
        raise InvalidInput(
            f"{target.storage.uri}/{prefix} has {len(foreign)} other files, for instance {min(foreign)}",
            hint="Copy to an empty place",
        )


@dataclass(frozen=True, slots=True)
class _Share:
    """Copies some of the files."""

    files: CheckpointFiles
    target: OpenedPlace
    prefix: str
    sources: Mapping[str, str]
    """Maps names of files to their keys at the source."""
    existing: Mapping[str, int]
    """Maps names of files at the target to their sizes."""
    tried: Mapping[str, tuple[str, int]]
    """Maps names of files from an earlier try to their keys and sizes at the target."""

    def __call__(self, receipts: Sequence[Receipt]) -> set[str]:
        """Copy the files, and return the names of those that existed."""
        found = self._intact([receipt for receipt in receipts if self.existing.get(receipt.name) == receipt.size_bytes])
        found |= self._take_over([receipt for receipt in receipts if receipt.name not in found])
        missing = [receipt for receipt in receipts if receipt.name not in found]
        with self.files.missing_is_damage():
            inside = self._copy_inside(missing)
            streamed = [receipt for receipt in missing if receipt.name not in inside]
            self._copy_files(streamed)
        lost = {receipt.name for receipt in streamed if receipt.digest is not None} - self._intact(streamed)
        if lost:
            raise CheckpointDamaged(f"{len(lost)} files did not arrive whole, for instance {min(lost)}")
        return found

    def _intact(self, receipts: Sequence[Receipt]) -> set[str]:
        """Return the names of the files that are whole at the target."""
        wanted = [Wanted(self.prefix + it.name, it.size_bytes, it.digest) for it in receipts if it.digest is not None]
        checked = self.target.transfer.check(wanted)
        good = {item.wanted.key for item in checked if item.digest == item.wanted.digest}
        return {receipt.name for receipt in receipts if self.prefix + receipt.name in good}

    def _keep_intact(self, receipts: Sequence[Receipt]) -> set[str]:
        """Persist the storage's own copies, delete those that are not whole, and return the names of the rest."""
        storage = self.target.storage
        if receipts and self.target.config.transfer.durable:
            storage.persist([self.prefix + receipt.name for receipt in receipts])
        intact = self._intact(receipts)
        storage.delete([self.prefix + receipt.name for receipt in receipts if receipt.name not in intact])
        return intact

    def _take_over(self, receipts: Sequence[Receipt]) -> set[str]:
        """Copy files of an earlier try inside the storage, and return the names of the whole ones."""
        storage = self.target.storage
        if not isinstance(storage, CopiesInside):
            return set()
        taken = []
        for receipt in receipts:
            key, size_bytes = self.tried.get(receipt.name, ("", -1))
            if size_bytes == receipt.size_bytes and receipt.digest is not None:
                # Copied, not linked: the try may still be writing them.
                with contextlib.suppress(FileMissing):  # it is garbage, and may be collected meanwhile
                    storage.copy(key, self.prefix + receipt.name)
                    taken.append(receipt)
        return self._keep_intact(taken)

    def _copy_inside(self, receipts: Sequence[Receipt]) -> set[str]:
        """Have the storage copy the files by itself, and return the names of those that arrived whole.

        The others are left to be streamed, which either repairs them or proves that the source is damaged.
        """
        storage = self.target.storage
        if not isinstance(storage, CopiesFrom):
            return set()

        def copy(receipt: Receipt) -> bool:
            return storage.copy_from(self.files.storage, self.sources[receipt.name], self.prefix + receipt.name)

        known = [receipt for receipt in receipts if receipt.digest is not None]
        if not known or not copy(known[0]):
            return set()
        mapped(copy, known[1:], num_threads=self.target.transfer.num_tasks, name="ckptstore-copy")
        return self._keep_intact(known)

    def _copy_files(self, receipts: Sequence[Receipt]) -> None:
        source, wrong = self.files.storage, self._streamed(receipts)
        if wrong:  # believed only after a second look in another way
            for receipt in wrong:
                source.doubt(self.sources[receipt.name])
            still = self._streamed([*wrong])
            for receipt in wrong.keys() - still.keys():
                tell(source, self.sources[receipt.name], f"its {wrong[receipt].title} was another one")
            wrong = still
        for receipt, found in wrong.items():
            self.target.storage.delete([self.prefix + receipt.name])
            raise CheckpointDamaged(
                f"{receipt.name} is damaged at the source: its {found.title} is {found.hex}, the manifest says "
                f"{receipt.digest and receipt.digest.hex}",
                rank=receipt.rank,
                file=receipt.name,
            )

    def _streamed(self, receipts: Sequence[Receipt]) -> dict[Receipt, Digest]:
        """Copy files, and return those whose digest was wrong, with the digest found."""
        planned = [
            PlannedFile(
                self.prefix + receipt.name,
                StorageSource(self.files.storage, self.sources[receipt.name], receipt.size_bytes),
                receipt.digest and receipt.digest.algorithm,
            )
            for receipt in receipts
        ]
        found = zip(receipts, self.target.transfer.upload(planned), strict=True)
        return {
            receipt: stored.digest
            for receipt, stored in found
            if receipt.digest is not None and stored.digest != receipt.digest
        }
