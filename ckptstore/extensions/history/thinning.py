"""Thin a checkpoint: drop some keys of its state, mostly those of the optimizer, and keep the rest.

The thinned checkpoint is written into a directory of its own, and one record of the log puts it in the place of the
whole one, which goes to the trash. So a crash leaves the whole one or the thinned one, never a mixture: before the
record the new directory is garbage, and after it the old one is trash like any other, which a prune deletes and
`restore` brings back.

Files with nothing but dropped items are left behind, and files with none are linked on a disk, and copied inside other
storages. A file that has both is written again on a disk, every byte checked. Elsewhere that would download it, so it
is copied as a whole, and frees nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ckptstore.errors import CheckpointGone, CkptstoreError, FileMissing, InvalidInput, StorageError, StoreFenced
from ckptstore.extensions.history.stock_thin import StockLeft, check_frame
from ckptstore.extensions.history.thinned_index import CutFile, PartThinner, dropped_keys, thinned_outline
from ckptstore.format.changes import Commit
from ckptstore.format.digest import Digest
from ckptstore.format.entry import CheckpointEntry, Thinning
from ckptstore.format.layout import DCP_METADATA_NAME, MANIFEST_NAME, USER_METADATA_NAME, Attempt, check_step
from ckptstore.format.manifest import Receipt, sha256_of, sorted_receipts
from ckptstore.format.record import Record
from ckptstore.job import Job, record_of_step
from ckptstore.loading.checkpoint_files import CheckpointFiles, CommittedFiles, files_of
from ckptstore.loading.index_read import read_whole
from ckptstore.loading.load_state import open_any
from ckptstore.loading.restoring import check_has_trash
from ckptstore.retention import Verdict
from ckptstore.runtime.shown import show_size
from ckptstore.state.index.outline import INDEX_NAME, part_name
from ckptstore.state.index.part import Part
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.tensors.segments import SegmentSource
from ckptstore.storage.base import Disk, adopt
from ckptstore.storage.second_look import created, has_bytes
from ckptstore.transfer import RangeRead
from ckptstore.transfer.moves import PlannedFile, write_small
from ckptstore.upkeep import leases
from ckptstore.upkeep.prune import delete_attempt

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinReport:
    """The result of thinning a checkpoint, or of a dry run."""

    step: int
    dropped: tuple[str, ...]
    """The patterns."""
    num_keys: int
    """The keys of tensors and plain values that fit them."""
    size_bytes: int
    """The bytes of the files before."""
    left_bytes: int
    """The bytes of the files of the thinned checkpoint. In a dry run the small files of the index count as before."""
    shared_bytes: int
    """The bytes of dropped tensors that stay in files which other tensors need, because this storage cannot cut files
    without a download."""

    @property
    def freed_bytes(self) -> int:
        """The bytes that a prune frees once the whole checkpoint has been in the trash for the grace period."""
        return self.size_bytes - self.left_bytes


def thin(job: Job, step: int, patterns: Any, *, force: bool = False, dry_run: bool = False) -> ThinReport:
    """Drop the keys that fit a pattern from the live checkpoint of a step; see `Catalogue.thin`."""
    step = check_step(step)
    if (
        not isinstance(patterns, Collection)
        or not patterns
        or not all(isinstance(one, str) and one for one in patterns)
    ):
        raise InvalidInput(f"drop is {patterns!r}, it must be one or several patterns", hint='Such as "optimizer.*"')
    check_has_trash(job)
    newest = job.log.newest()
    if newest is not None and job.epoch is not None and newest.state.epoch != job.epoch:
        raise StoreFenced(f"A later job has claimed the store (writer epoch {newest.state.epoch}): nothing was thinned")
    record = record_of_step(job.log, newest, step)
    if record.entry.thinned is not None and set(patterns) <= {*record.entry.thinned.dropped}:
        raise InvalidInput(f"Step {step} {record.entry.thinned}: nothing is left to drop", step=step)
    _refuse(job, newest, record, force=force)
    if not force and (count := _readers(job).get(record.number, 0)):
        raise InvalidInput(
            f"Step {step} was not thinned: {count} readers hold a lease",
            step=step,
            hint="Wait for them, or for 10 minutes if they were killed. With force it is thinned, and they go on",
        )
    files = files_of(job, record)
    with files.held():
        work = _Thinning(job, files, tuple(patterns))
        report = work.report()
        if report.freed_bytes <= 0:
            shared = f"{show_size(report.shared_bytes)} lie in files with what stays, and "
            raise InvalidInput(
                f"Thinning step {step} would free nothing: {shared if report.shared_bytes else ''}"
                f"{job.storage.uri} has no way to cut files without a download",
                step=step,
                hint="Saves of a store whose retention thins keep what it drops in files of its own",
            )
        if dry_run or newest is None:
            return report
        attempt = Attempt(step, newest.state.epoch, secrets.token_hex(4))
        with _removed_on_error(job, attempt):
            entry = work.write(attempt)
        with _removed_on_error(job, attempt, unless_unknown=True):
            committed = _commit(job, record, entry, force=force)
    logger.info("step %d was thinned: %s dropped, %d bytes less", step, ", ".join(patterns), report.freed_bytes)
    return replace(report, left_bytes=committed.entry.size_bytes)


def thin_as_decided(job: Job, verdicts: Sequence[Verdict], *, dry_run: bool = False) -> dict[int, CkptstoreError]:
    """Thin the checkpoints that are to be, and return the errors by step; a dry run only finds those of bad patterns.

    Checkpoints of files, which have no keys, stay as they are, and so do those with files that others refer to, and
    those that somebody reads, as long as these do. One that failed is not tried again by this process.
    """
    failed: dict[int, CkptstoreError] = {}
    wanted = {verdict.number: verdict for verdict in verdicts if verdict.drops and verdict.number not in job.unthinned}
    for record in job.log.records(wanted):
        entry, verdict = record.entry, wanted[record.number]
        drops = [one for one in verdict.drops if entry.thinned is None or one not in entry.thinned.dropped]
        newest = job.log.newest()
        if entry.kind != "state" or not drops or newest is None or newest.state.bases.get(record.number):
            continue
        if record.number in _readers(job):
            continue
        try:
            if entry.thinned is not None:  # by other patterns, which may have dropped the same keys
                keys = open_any(files_of(job, record)).all_keys()
                drops = [one for one in drops if any(fnmatchcase(key, one) for key in keys)]
            if not drops:
                job.unthinned.add(record.number)
            elif record_of_step(job.log, newest, entry.step).number == record.number:
                thin(job, entry.step, drops, dry_run=dry_run)
        except (CheckpointGone, StoreFenced):
            raise
        except CkptstoreError as error:
            job.unthinned.add(record.number)
            failed[entry.step] = error
    return failed


def _readers(job: Job) -> dict[int, int]:
    """Return the number of readers with a fresh lease by the number of what they read."""
    return leases.fresh(job.storage, now_seconds=job.log.store_now_seconds())


@contextmanager
def _removed_on_error(job: Job, attempt: Attempt, *, unless_unknown: bool = False) -> Iterator[None]:
    """Remove the directory of the attempt after an error, unless it may have been committed."""
    try:
        yield
    except CkptstoreError as error:
        if not unless_unknown or error.committed is False:
            with suppress(CkptstoreError):  # then it is garbage after the next claim
                delete_attempt(job.storage, str(attempt))
        raise


def _refuse(job: Job, newest: Record | None, record: Record, *, force: bool) -> None:
    """Raise InvalidInput if a checkpoint must stay whole."""
    if newest is None:
        return
    state, number, step = newest.state, record.number, record.entry.step
    reasons = state.protected(latest=state.latest)
    is_needed = number in (state.latest, state.resume_from)
    why = reasons.get(number, "") if is_needed or not force else ""
    users = [] if force else [user.entry.step for user in job.log.records(state.bases.get(number, ()))]
    why = why or (f"step {', '.join(map(str, users))} refers to its files" if users else "")
    if why:
        raise InvalidInput(
            f"Step {step} was not thinned: {why}",
            step=step,
            hint="A job must be able to resume from it" if is_needed else "With force it is thinned all the same",
        )


def _commit(job: Job, record: Record, entry: CheckpointEntry, *, force: bool) -> Record:
    """Put the thinned checkpoint in the place of the whole one."""

    def change(newest: Record | None) -> Commit:
        found = record_of_step(job.log, newest, entry.step)
        if found.number != record.number:
            raise InvalidInput(f"Step {entry.step} was saved again while it was thinned", step=entry.step)
        _refuse(job, newest, found, force=force)
        return Commit(entry, thins=record.number)

    return job.log.append(change, commits=Attempt.of(entry.attempt))


class _FilePlan:
    """The fate of one data file."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self.num_chunks = self.num_left = self.dropped_bytes = self.left_bytes = self.num_parts = 0
        self.frames: set[tuple[int, int]] = set()
        """Offset and length of the frames of plain values that stay."""
        self.is_cut = False
        """True if it is written again without what is dropped."""

    @property
    def stays(self) -> bool:
        """True if anything in it stays."""
        return bool(self.num_left or self.frames)


class _Thinning:
    """The work on one checkpoint."""

    def __init__(self, job: Job, files: CommittedFiles, patterns: tuple[str, ...]) -> None:
        self._job, self._files, self._patterns = job, files, patterns
        self._storage = job.storage
        self._entry = replace(files.record, annotated={}).entry  # annotations are those of its place
        self._manifest, _ = files.read_manifest()
        index = read_whole(files, self._manifest)
        if index is None or index.outline is None:
            raise InvalidInput(
                f"Step {files.step} is a checkpoint of files, and has no keys to drop", step=files.step,
                hint="Remove it as a whole, with `ckptstore rm`",
            )  # fmt: skip
        self._index, self._outline = index, index.outline
        self._dropped = dropped_keys(index, patterns)
        self._parts = [PartThinner(part, self._dropped) for part in index.parts]
        self._algorithm = index.parts[0].algorithm
        self._stock = self._read_stock()
        self._plans = self._plan()

    def _read_stock(self) -> StockLeft | None:
        """Return the part of `.metadata` that stays; None without one."""
        receipt = self._manifest.by_name.get(DCP_METADATA_NAME)
        if receipt is None:
            return None
        values = {*self._index.common_values(), *self._index.value_ranks()}
        found = StockLeft.of(self._files.read_file(receipt), self._index, values, self._dropped)
        if found is None:
            logger.warning("step %d: torch's own DCP cannot read the thinned checkpoint", self._entry.step)
        return found

    def _plan(self) -> dict[str, _FilePlan]:
        """Return the fate of each file with data."""
        by_name = self._manifest.by_name
        plans = {name: _FilePlan(by_name[name]) for name in by_name if name.endswith(".distcp")}
        plans |= {name: _FilePlan(by_name[name]) for name in self._index.files}
        for thinner in self._parts:
            sizes = thinner.part.chunk_bytes
            for file in thinner.files:
                plan, left = plans[file.name], set(file.left)
                plan.num_parts += 1
                plan.num_chunks += len(file.chunks)
                plan.num_left += len(left)
                places = {chunk: int(thinner.part.chunk_offset[chunk]) for chunk in file.chunks}  # tied ones share one
                needed = {places[chunk]: int(sizes[chunk]) for chunk in left}
                every = {places[chunk]: int(sizes[chunk]) for chunk in file.chunks}
                plan.left_bytes += sum(needed.values())
                plan.dropped_bytes += sum(every.values()) - sum(needed.values())
        for name, offset, length in [] if self._stock is None else self._stock.values.values():
            if name in plans:
                plans[name].frames.add((offset, length))
        for plan in plans.values():
            can_cut = isinstance(self._storage, Disk) or not plan.num_left  # frames of values are small
            plan.is_cut = plan.stays and plan.num_left < plan.num_chunks and plan.num_parts == 1 and can_cut
        return plans

    @property
    def _others(self) -> list[Receipt]:
        """The files that hold no data and stay as they are."""
        made = {INDEX_NAME, DCP_METADATA_NAME, *self._part_names.values()}
        return [
            receipt
            for receipt in self._manifest.files
            if receipt.name not in self._plans
            and receipt.name not in made
            and not (receipt.name.startswith("digests-rank=") and receipt.name.endswith(".json"))
        ]

    @property
    def _part_names(self) -> dict[int, str]:
        outline = self._outline
        ranks = () if outline.is_packed else range(outline.world_size)
        return {rank: part_name(rank, outline.num_prefixes) for rank in ranks}

    def report(self) -> ThinReport:
        """Return what thinning would do."""
        plans = self._plans.values()
        left = sum(plan.left_bytes if plan.is_cut else plan.receipt.size_bytes for plan in plans if plan.stays)
        own = {plan.receipt.name for plan in plans}
        left += sum(receipt.size_bytes for receipt in self._manifest.files if receipt.name not in own)
        return ThinReport(
            step=self._entry.step,
            dropped=self._patterns,
            num_keys=len(self._dropped),
            size_bytes=self._manifest.size_bytes,
            left_bytes=left,
            shared_bytes=sum(plan.dropped_bytes for plan in plans if plan.stays and not plan.is_cut),
        )

    def write(self, attempt: Attempt) -> CheckpointEntry:
        """Write the thinned checkpoint into its directory, with its manifest, and return its entry."""
        whole = [plan.receipt for plan in self._plans.values() if plan.stays and not plan.is_cut]
        receipts = self._taken_over(attempt, [*whole, *self._others])
        new_files, cut = self._cut(attempt)
        parts = [thinner.encode(new_files) for thinner in self._parts]
        outline = thinned_outline(self._outline, parts, self._parts, self._dropped)
        index = TensorIndex([Part.decode(part, rank=rank, file=INDEX_NAME) for rank, part in enumerate(parts)], outline)
        receipts += cut
        index.check_files({receipt.name: receipt.size_bytes for receipt in receipts})
        index.check_complete()
        written = {INDEX_NAME: (outline.encode() + b"".join(parts if outline.is_packed else ()), 0)}
        written |= {name: (parts[rank], rank) for rank, name in self._part_names.items()}
        if self._stock is not None:
            moved = {name: new.frames for name, new in new_files.items()}
            stock = self._stock.encode(
                index, lambda place: (place[0], moved.get(place[0], {}).get(place[1], place[1]), place[2])
            )
            written[DCP_METADATA_NAME] = stock, 0
        receipts += write_small(self._job.transfer.upload, attempt, written, algorithm=self._algorithm)
        return self._publish(attempt, receipts)

    def _publish(self, attempt: Attempt, receipts: Sequence[Receipt]) -> CheckpointEntry:
        """Write the manifest, once all files are there."""
        before, storage = self._manifest.thinned, self._storage
        thinned = Thinning(
            dropped=tuple(dict.fromkeys((*(before.dropped if before else ()), *self._patterns))),
            attempt=before.attempt if before else self._entry.attempt,
            size_bytes=before.size_bytes if before else self._manifest.size_bytes,
            thinned_at=time.time(),
        )
        manifest = replace(
            self._manifest,
            epoch=attempt.epoch,
            attempt=str(attempt),
            files=tuple(sorted_receipts(receipts)),
            thinned=thinned,
        )
        data = manifest.encode()
        contents = b""
        with suppress(FileMissing):
            contents = storage.read(self._files.prefix + USER_METADATA_NAME)
        for name in manifest.directories:
            storage.make_directory(attempt.key(name))
        storage.persist([attempt.key(name) for name in (*(one.name for one in receipts), *manifest.directories)])
        stored = CheckpointFiles(
            storage=storage, transfer=self._job.transfer, config=self._job.config, prefix=attempt.prefix
        )
        stored.check_complete(manifest)
        if contents:
            storage.write(attempt.key(USER_METADATA_NAME), [memoryview(contents)])
            storage.persist([attempt.key(USER_METADATA_NAME)])
        key = attempt.key(MANIFEST_NAME)
        created(storage, key, data)  # whole where it can: gc leaves a torn one alone
        storage.persist([key])
        if not has_bytes(storage, key, data):
            raise StorageError(f"{key} does not hold what {storage.uri} has said is stored", file=key, committed=False)
        times = self._job.log.commit_times([self._files.record])
        return replace(
            self._entry,
            attempt=str(attempt),
            manifest_sha256=sha256_of(data),
            size_bytes=manifest.size_bytes,
            num_files=len(manifest.files),
            bases=(),
            own_bytes=None,
            committed_at=times[self._files.record.number],
            thinned=thinned,
        )

    def _taken_over(self, attempt: Attempt, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Link files, or copy them inside the storage. No file is read."""
        storage = self._storage
        moves = [(self._files.key_of(receipt), attempt.key(receipt.name)) for receipt in receipts]
        if adopt(storage, moves, num_threads=self._job.transfer.num_tasks):
            raise InvalidInput(
                f"{storage.uri} cannot copy files by itself, so thinning would download and upload what stays",
                step=self._entry.step,
            )
        return [receipt._replace(attempt=None) for receipt in receipts]

    def _cut(self, attempt: Attempt) -> tuple[dict[str, CutFile], list[Receipt]]:
        """Write the files again that have both, and return what is new of them, and their receipts."""
        new_files: dict[str, CutFile] = {}
        for name, plan in self._plans.items():
            if not plan.is_cut:
                continue
            owner, file = next((one, file) for one in self._parts for file in one.files if file.name == name)
            key = self._files.key_of(plan.receipt)

            def read_into(offset: int, target: memoryview, key: str = key) -> None:
                self._files.read([RangeRead(key, offset, (target,))])

            new = new_files[name] = owner.new_file(file, self._read, read_into)
            for offset, length in sorted(plan.frames):
                frame = self._read(name, offset, length, ())
                check_frame(frame, file=name)
                new.frames[offset] = new.size_bytes
                new.add_bytes(frame)
        planned = [
            PlannedFile(attempt.key(name), SegmentSource(new.segments, new.regions), self._algorithm)
            for name, new in new_files.items()
        ]
        receipts = []
        for (name, new), stored in zip(new_files.items(), self._job.transfer.upload(planned), strict=True):
            new.written(stored.block_digests)
            plan = self._plans[name]
            receipts.append(plan.receipt._replace(size_bytes=stored.size_bytes, digest=stored.digest, attempt=None))
        return new_files, receipts

    def _read(self, name: str, offset: int, size_bytes: int, checks: Sequence[tuple[int, Digest]]) -> memoryview:
        data = memoryview(bytearray(size_bytes))
        key = self._files.key_of(self._manifest.by_name[name])
        self._files.read([RangeRead(key, offset, (data,), tuple(checks))])
        return data
