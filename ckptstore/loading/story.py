"""The load story: from a committed checkpoint to a path on this node.

Tensors go another way, straight into memory (`ckptstore.state`).
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ckptstore.config import StoreConfig
from ckptstore.errors import (
    CacheError,
    CheckpointDamaged,
    CheckpointGone,
    FileMissing,
    InvalidInput,
    StorageError,
    StorageFull,
)
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.held_storage import HeldStorage
from ckptstore.fast.node_disk import NodeDisk
from ckptstore.format.layout import CHECKPOINT_PREFIX, DCP_METADATA_NAME, MANIFEST_NAME
from ckptstore.format.manifest import Manifest, Receipt, sha256_of, sorted_receipts
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.load_watch import LoadWatch, watched
from ckptstore.log import Log
from ckptstore.node_cache import NodeCache, copy_key
from ckptstore.runtime.beat import Beat, no_beat
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.second_look import looked_twice
from ckptstore.storage.uri import local_path
from ckptstore.transfer import RangeRead, Transfer, Wanted
from ckptstore.transfer.opened import OpenedPlace
from ckptstore.upkeep import leases


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of one checkpoint, wherever they lie."""

    storage: Storage
    transfer: Transfer
    config: StoreConfig
    prefix: str
    """Of their keys: "checkpoints/<attempt>/" in a store, "" for a checkpoint directory on its own."""
    record: Record | None
    """The record that committed it, None outside of a store."""
    job: Job | None = None
    """Whose ranks load a state together, None outside of a store."""
    given_group: object = None
    """The same outside of a store, as for `find_group`."""
    certificate: Certificate | None = None
    """Of a fast checkpoint: then the storage is the disk of this node, and has the files of some ranks."""

    @staticmethod
    def at(
        place: OpenedPlace, *, prefix: str = "", record: Record | None = None, given_group: object = None
    ) -> CheckpointFiles:
        """The files below `prefix` in a place that was opened for them."""
        return CheckpointFiles(
            storage=place.storage,
            transfer=place.transfer,
            config=place.config,
            prefix=prefix,
            record=record,
            given_group=given_group,
        )

    @property
    def step(self) -> int:
        """The step that was saved, as the record or certificate says; that of the manifest elsewhere."""
        if self.record is not None:
            return self.record.entry.step
        return self.read_manifest()[0].step

    @property
    def number(self) -> int | None:
        """That of the record; None where there is none."""
        return None if self.record is None else self.record.number

    @property
    def uri(self) -> str:
        """Where the files lie."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    def read_manifest(self) -> tuple[Manifest, bytes]:
        """The manifest, and its bytes as they are stored. A directory that torch's DCP wrote on its own has none; then
        it is made from a listing, and has no digests.

        Raises CheckpointGone when it is not there, CheckpointDamaged when it is not the one that was committed.
        """
        if self.certificate is not None:
            return self.certificate.manifest, self.certificate.manifest_data
        key = self.prefix + MANIFEST_NAME
        try:
            data = looked_twice(self.storage, key, lambda: self._manifest_bytes(key))
        except FileMissing:
            stock = _stock_manifest(self) if self.record is None else None
            if stock is None:
                raise CheckpointGone(
                    f"{self.uri} has no manifest: it was removed, or it was never complete", file=MANIFEST_NAME
                ) from None
            return stock, stock.encode()
        return Manifest.decode(data, file=key), data

    def _manifest_bytes(self, key: str) -> bytes:
        data = self.storage.read(key)
        digest = sha256_of(data)
        if self.record is not None and digest != self.record.entry.manifest_sha256:
            raise CheckpointDamaged(
                f"The manifest of {self.uri} has SHA-256 {digest}, the log says {self.record.entry.manifest_sha256}",
                step=self.record.entry.step,
                file=MANIFEST_NAME,
            )
        return data

    def alone(self) -> CheckpointFiles:
        """The same for a process that works on its own: it can be pickled."""
        return replace(self, job=None, given_group=None)

    @contextmanager
    def held(self, *, is_handed_out: bool = False) -> Iterator[None]:
        """Keep a prune away while the context lasts: by a lease on a disk; elsewhere the grace period has to do. What
        lies on the disk of this node is locked, so that no process of the node deletes it.

        Raises CheckpointGone when a prune was first. `is_handed_out` as for `leases.hold`.
        """
        if self.certificate is not None:  # also where it is durable too: the files are those on the nodes
            with ExitStack() as stack:
                if self.job is not None and self.job.fast is not None:
                    stack.enter_context(self.job.fast.using(str(self.certificate.attempt)))
                stack.enter_context(self._read_lock(self.certificate))
                yield
            return
        if self.record is None or not isinstance(self.storage, Disk):
            yield
            return
        with leases.hold(self.storage, self.record.number, is_handed_out=is_handed_out):
            # A prune looks at leases after its record. So where the log has no such record yet, it will see this one.
            log = self.job.log if self.job else Log(self.storage, retry=self.config.retry)
            newest = log.newest()
            if newest is None or self.record.number not in {*newest.state.live, *newest.state.trash}:
                raise CheckpointGone(f"Step {self.record.entry.step} was removed", step=self.record.entry.step)
            yield

    def _read_lock(self, certificate: Certificate) -> AbstractContextManager[None]:
        if isinstance(self.storage, HeldStorage):
            return self.storage.held()
        return NodeDisk(cast(LocalStorage, self.storage), "").reading(certificate.attempt)

    @contextmanager
    def missing_is_damage(self) -> Iterator[None]:
        """Of whatever reads files of the checkpoint: one that is missing raises CheckpointDamaged, or CheckpointGone
        when the checkpoint was removed meanwhile."""
        try:
            yield
        except FileMissing as error:
            step = self.record.entry.step if self.record else None
            manifest = self.storage.list(self.prefix + MANIFEST_NAME)
            if self.record is not None and self.certificate is None and not any(True for _ in manifest):
                raise CheckpointGone(f"Step {step} was removed while it was read", step=step) from error
            if self.certificate is not None and isinstance(self.storage, HeldStorage) and self.storage.is_gone():
                step = self.certificate.manifest.step
                text = f"Step {step} was deleted from the disk of this node, and the store does not have it"
                raise CheckpointGone(text, step=step, hint="Newer ones took its place: look again") from error
            name = (error.file or "").removeprefix(self.prefix)
            raise CheckpointDamaged(f"{name or 'A file'} is missing: {error.message}", step=step, file=name) from error

    def read(self, ranges: Sequence[RangeRead], *, beat: Beat = no_beat) -> None:
        """`Transfer.read`, but that a missing file is damage."""
        with self.missing_is_damage():
            self.transfer.read(ranges, beat=beat)

    def check_complete(self, manifest: Manifest) -> None:
        """Raise CheckpointDamaged unless every file is there with its size. One listing."""
        looked_twice(self.storage, self.prefix, lambda: self._check_listed(manifest))

    def _check_listed(self, manifest: Manifest) -> None:
        stored = self.stored_sizes(manifest)
        for receipt in manifest.files:
            found = stored.get(receipt.name)
            if found is None and isinstance(self.storage, HeldStorage):
                raise self.storage.unreachable(receipt)
            if found != receipt.size_bytes:
                what = "is missing" if found is None else f"has {found} bytes"
                raise CheckpointDamaged(
                    f"{receipt.name} {what}, the manifest says {receipt.size_bytes} bytes",
                    step=manifest.step,
                    rank=receipt.rank,
                    file=receipt.name,
                )

    def receipts_here(self, manifest: Manifest) -> tuple[Receipt, ...]:
        """The files that should be here: all, but of a fast checkpoint those that this process reaches."""
        if isinstance(self.storage, HeldStorage):
            return self.storage.receipts_here()
        if self.certificate is None or self.job is None or self.job.fast is None or not isinstance(self.storage, Disk):
            return manifest.files
        ranks = self.certificate.holders.get(self.job.fast.disk.node, ())
        return tuple(receipt for receipt in manifest.files if receipt.rank in ranks)

    def stored_sizes(self, manifest: Manifest) -> dict[str, int]:
        """The size of every file that is there, by name: its own, listed or not, and those that lie elsewhere."""
        sizes = {file.key.removeprefix(self.prefix): file.size_bytes for file in self.storage.list(self.prefix)}
        elsewhere = {self.key_of(receipt): receipt.name for receipt in manifest.files if receipt.attempt is not None}
        for attempt in manifest.references:
            for file in self.storage.list(f"{CHECKPOINT_PREFIX}{attempt}/"):
                if file.key in elsewhere:
                    sizes[elsewhere[file.key]] = file.size_bytes
        return sizes

    def key_of(self, receipt: Receipt) -> str:
        """Where a file lies. Raises CheckpointDamaged when that is another checkpoint and this is not in a store."""
        if receipt.attempt is None:
            return self.prefix + receipt.name
        if self.record is None:
            raise CheckpointDamaged(
                f"{receipt.name} lies in the directory {receipt.attempt} of the store that this was copied from",
                file=receipt.name,
                hint="Copy checkpoints that refer to others with `ckptstore cp`, which makes them whole",
            )
        return f"{CHECKPOINT_PREFIX}{receipt.attempt}/{receipt.name}"

    def wanted(self, receipt: Receipt) -> Wanted:
        """What the transfer is to fetch or check for a receipt."""
        return Wanted(self.key_of(receipt), receipt.size_bytes, receipt.crc32c)

    @staticmethod
    def wanted_at(prefix: str, receipt: Receipt) -> Wanted:
        """The same for a copy whose keys begin with `prefix`."""
        return Wanted(prefix + receipt.name, receipt.size_bytes, receipt.crc32c)

    def read_file(self, receipt: Receipt) -> bytes:
        """A whole file, checked. For files that fit in memory many times over."""
        data = bytearray(receipt.size_bytes)
        checks = () if receipt.crc32c is None else ((receipt.size_bytes, receipt.crc32c),)
        self.read([RangeRead(self.key_of(receipt), 0, (memoryview(data),), checks)])
        return bytes(data)


def _stock_manifest(files: CheckpointFiles) -> Manifest | None:
    """What the manifest of a directory of stock DCP would say, None for any other directory."""
    listed = {file.key.removeprefix(files.prefix): file for file in files.storage.list(files.prefix)}
    if DCP_METADATA_NAME not in listed:
        return None
    name = files.uri.rpartition("/")[2]
    step = re.search(r"(\d{1,10})$", name)
    ranks = [int(match[1]) for file in listed if (match := re.fullmatch(r"__(\d+)_\d+\.distcp", file))]
    return Manifest(
        store_id="",
        step=int(step[1]) if step else 0,
        epoch=0,
        attempt=name,
        kind="state",
        world_size=max(ranks, default=0) + 1,
        created_at=max(file.modified_seconds for file in listed.values()),
        files=tuple(sorted_receipts(Receipt(key, file.size_bytes, None, 0) for key, file in listed.items())),
    )


class NodeCopies:
    """Single files of a checkpoint, each downloaded once per node when one of its processes wants it first."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest, stack: ExitStack) -> None:
        """The copies are held until `stack` is left."""
        self._files = files
        self._manifest = manifest
        self._digest = _content_of(files, manifest, manifest.encode())
        self._stack = stack
        self._paths: dict[str, Path] = {}
        self._lock = threading.Lock()
        self.root = files.config.cache.cache_dir.absolute()

    def path(self, name: str) -> Path:
        """The copy of a file on this node; downloaded and checked first, if nobody has."""
        with self._lock:
            if name not in self._paths:
                receipt = self._manifest.by_name[name]

                def download(path: Path) -> None:
                    download_files(self._files, self._manifest, [receipt], path, cached=True, with_directories=False)

                fetched = NodeCache(self._files.config.cache).fetch_once(
                    copy_key(f"{self._digest}/{name}"),
                    step=self._manifest.step,
                    size_bytes=receipt.size_bytes,
                    download=download,
                    expected={name: receipt.size_bytes},
                )
                self._paths[name] = self._stack.enter_context(fetched) / name
            return self._paths[name]

    @contextmanager
    def lost_is_told(self) -> Iterator[None]:
        """Of whatever reads copies: one that was whole, and is not there any more."""
        try:
            yield
        except FileNotFoundError as error:
            raise CacheError(
                f"A copy of step {self._manifest.step} vanished from the node cache {self.root} while it was read",
                step=self._manifest.step,
                hint="Set CKPTSTORE_CACHE_DIR to a directory that nothing cleans up",
            ) from error


def _content_of(files: CheckpointFiles, manifest: Manifest, data: bytes) -> str:
    """What a copy on this node is a copy of: the manifest's digest, and the place of what no store has digests of,
    where two checkpoints may differ in nothing that a listing shows."""
    return sha256_of(data if manifest.store_id else f"{files.uri}\n".encode() + data)


@contextmanager
def open_directory(files: CheckpointFiles) -> Iterator[Path]:
    """The checkpoint as a directory on this node, read-only, for as long as the context lasts.

    On a disk it is the real one, under a lease. Else it is a copy that all processes of this node share: downloaded
    once, every byte checked. So is one that refers to files of other checkpoints.
    """
    with ExitStack() as stack:
        with watched(files.transfer.rank, files.storage.uri) as load:
            path = _opened_directory(files, load, stack)
        yield path


def _opened_directory(files: CheckpointFiles, load: LoadWatch, stack: ExitStack) -> Path:
    """Where it is until `stack` is left."""
    stack.enter_context(files.held(is_handed_out=True))
    manifest, data = files.read_manifest()
    load.found(manifest.step, files.record)
    if files.certificate is not None:
        files.check_complete(manifest)  # other nodes may have the rest
    if isinstance(files.storage, Disk) and not manifest.references:
        return files.storage.local_path(files.prefix.rstrip("/"))

    own_data = manifest.made_whole().encode() if manifest.references else data
    expected: dict[str, int | None] = {receipt.name: receipt.size_bytes for receipt in manifest.files}
    expected |= {**dict.fromkeys(manifest.directories), MANIFEST_NAME: len(own_data)}

    def download(path: Path) -> None:
        download_files(files, manifest, manifest.files, path, cached=True)
        (path / MANIFEST_NAME).write_bytes(own_data)

    fetched = NodeCache(files.config.cache).fetch_once(
        copy_key(_content_of(files, manifest, data)),
        step=manifest.step,
        size_bytes=manifest.size_bytes + len(own_data),
        download=download,
        expected=expected,
    )
    load.enter("read")
    return stack.enter_context(fetched)


def copy_directory(files: CheckpointFiles, path: str | os.PathLike[str], *, include: str | None) -> Path:
    """Copy the files whose name matches `include` (all, when None) to a new or empty directory, every byte checked.

    They appear under `path` at once and whole: the copy is made beside it and renamed.
    """
    target = Path(local_path(path, "The directory of a copy"))
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise InvalidInput(f"{target} exists and is not an empty directory")
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with watched(files.transfer.rank, files.storage.uri) as load, files.held():
            _copy_to(files, partial, load, include=include)
            partial.replace(target)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _copy_to(files: CheckpointFiles, path: Path, load: LoadWatch, *, include: str | None) -> None:
    manifest, _ = files.read_manifest()
    load.found(manifest.step, files.record)
    chosen = [item for item in manifest.files if include is None or _matches(item, include)]
    if include is not None and not chosen:
        raise InvalidInput(f"No file of step {manifest.step} matches {include!r}")
    needed_bytes = sum(item.size_bytes for item in chosen)
    path.mkdir(parents=True)
    free_bytes = shutil.disk_usage(path).free
    if needed_bytes > free_bytes:
        raise StorageFull(f"{path.parent} needs {needed_bytes} bytes, and {free_bytes} bytes are free")
    load.enter("read")
    download_files(files, manifest, chosen, path, with_directories=include is None)


def _matches(receipt: Receipt, include: str) -> bool:
    return fnmatch.fnmatchcase(receipt.name, include) or fnmatch.fnmatchcase(receipt.original_name or "", include)


def download_files(
    files: CheckpointFiles,
    manifest: Manifest,
    chosen: Sequence[Receipt],
    path: Path,
    *,
    cached: bool = False,
    with_directories: bool = True,
) -> None:
    """Copy these files of a checkpoint below a directory, every byte checked. They appear one by one. `cached` is for
    copies of the node cache: read-only, and not forced to the disk."""
    wanted = [(files.wanted(item), f"{path}/{item.name}") for item in chosen]
    with files.missing_is_damage():
        files.transfer.download(wanted, read_only=cached, durable=not cached)
    if with_directories:
        for name in manifest.directories:
            (path / name).mkdir(parents=True, exist_ok=True)


def fast_files_of(job: Job, certificate: Certificate, record: Record | None = None) -> CheckpointFiles:
    """The files of a fast checkpoint that are on this node. The job has opened its fast tier. `record` committed it, if
    it is durable."""
    assert job.fast is not None  # it is where the certificate comes from
    return CheckpointFiles(
        storage=job.fast.disk.storage,
        transfer=job.fast.transfer,
        config=job.config,
        prefix=certificate.attempt.prefix,
        record=record,
        job=job,
        certificate=certificate,
    )


def files_of(job: Job, record: Record) -> CheckpointFiles:
    """The files of a committed checkpoint."""
    return CheckpointFiles(
        storage=job.storage,
        transfer=job.transfer,
        config=job.config,
        prefix=record.entry.prefix,
        record=record,
        job=job,
    )
