"""The directory of fast checkpoints on one node: its attempts, their certificates, and their deletion.

    <directory>/<store id>/checkpoints/<attempt>/   the files of the ranks of this node, under their names in the store
    <directory>/<store id>/checkpoints/<attempt>/fast.json   the certificate: written last, deleted first
    <directory>/<store id>/epoch                    the highest writer epoch of a job that used the directory
    <directory>/<store id>/lock                     locked during a deletion, and while an epoch is marked

The directory below the id of the store is laid out like the root of the store, so an attempt has the same keys in both.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    FileMissing,
    InvalidInput,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StoreFenced,
    UnsupportedVersion,
)
from ckptstore.extensions.tier.candidates import NodeSighting
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.format.layout import CHECKPOINT_PREFIX, Attempt
from ckptstore.runtime.file_locks import NO_LOCKS, Exclusive, lock_open_file
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.disk.posix import make_private

STORE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""The ids of stores that can be the name of a directory."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_EPOCH_KEY = "epoch"
_LOCK_NAME = "lock"
LOCK_SECONDS = 60.0
"""The longest wait for another process to end a deletion."""


class NodeDisk:
    """The fast checkpoints of one store on this node. Any number of processes may have one open."""

    def __init__(self, storage: LocalStorage, node: str) -> None:
        """Do not call it: use `open`."""
        self.storage = storage
        """The storage of this part; its keys are those of the store."""
        self.node = node

    @staticmethod
    def open(
        directory: str | os.PathLike[str], store_id: str, *, node: str, durable: bool = True, direct_io: bool = True
    ) -> NodeDisk:
        """Return the part of the directory that belongs to a store, created if absent, for this user alone.

        Raises InvalidInput when the directory is a symbolic link, belongs to another user or lets others in, and
        StorageError when it cannot be used. `durable` and `direct_io` as for `LocalStorage`.
        """
        if not STORE_ID.fullmatch(store_id):
            raise InvalidInput(f"The store has the id {store_id[:80]!r}, which cannot be the name of a directory")
        given = Path(os.path.abspath(directory))
        part = Path(os.path.realpath(given.parent)) / given.name / store_id
        _make_part(part)
        return NodeDisk(disk_storage(part, durable=durable, direct_io=direct_io), node)

    def attempts(self) -> list[Attempt]:
        """Return every attempt that has a directory on this disk, in order. Links and other names are ignored."""
        path = self.storage.local_path(CHECKPOINT_PREFIX.rstrip("/"))
        try:
            with os.scandir(path) as entries:
                found = [Attempt.parse(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise posix.translate(error, what="Listing", file=str(path), directory=str(path)) from error
        return sorted(attempt for attempt in found if attempt is not None)

    def certificate(self, attempt: Attempt) -> Certificate | None:
        """Return the certificate of an attempt, None if there is none.

        Raises CheckpointDamaged when it is not one, or is that of another attempt; UnsupportedVersion, StorageError.
        """
        key = attempt.key(CERTIFICATE_NAME)
        try:
            found = Certificate.decode(self.storage.read(key), file=key)
        except FileMissing:
            return None
        if found.attempt != attempt:
            raise CheckpointDamaged(f"{key} is the certificate of {found.attempt}", file=key, step=attempt.step)
        return found

    def look(self) -> tuple[list[NodeSighting], dict[str, Certificate]]:
        """Return a sighting of each attempt, and the certificates by their SHA-256.

        A fault of one attempt is in its sighting, and hides no other attempt. Only certificates are read: a load
        compares digests.

        Raises StorageError when the directory cannot be listed; and StorageUnavailable and AccessDenied for any file,
        since what cannot be read now may be whole.
        """
        sightings: list[NodeSighting] = []
        certificates: dict[str, Certificate] = {}
        for attempt in self.attempts():
            sha256, fault, certificate_bytes = "", "", 0
            sizes: dict[str, int] = {}
            try:
                sizes = self._sizes(attempt)
                certificate = self.certificate(attempt)
                if certificate is not None:
                    sha256, certificate_bytes = certificate.sha256, len(certificate.encode())
                    certificates[sha256] = certificate
            except (StorageUnavailable, AccessDenied):
                raise
            except (CheckpointDamaged, UnsupportedVersion, StorageError) as error:
                fault = error.message
            sightings.append(
                NodeSighting(
                    node=self.node,
                    attempt=str(attempt),
                    sha256=sha256,
                    certificate_bytes=certificate_bytes,
                    fault=fault,
                    sizes=sizes,
                )
            )
        return sightings, certificates

    def certify(self, data: bytes, *, ranks: Collection[int]) -> Certificate:
        """Write a certificate beside the files of `ranks`, which this node holds; it is durable when this returns.

        It checks that every file exists with its size. The ranks made their files durable; this makes the directories
        durable. It does nothing if the same certificate exists. Raises CheckpointDamaged when a file is not as the
        manifest says, or another certificate exists; StorageError. After an error the certificate may exist: then it is
        whole, and so are the files.
        """
        certificate = Certificate.decode(data)
        attempt, sizes = certificate.attempt, self._sizes(certificate.attempt)
        receipts = [receipt for rank in sorted(set(ranks)) for receipt in certificate.by_rank.get(rank, ())]
        for receipt in receipts:
            if sizes.get(receipt.name) != receipt.size_bytes:
                raise CheckpointDamaged(
                    f"{receipt.name} has {sizes.get(receipt.name, 'no')} bytes on {self.node}, its rank stored"
                    f" {receipt.size_bytes}",
                    step=attempt.step,
                    rank=receipt.rank,
                    file=receipt.name,
                )
        # Several processes create the directories, so no rank could make them durable on its own.
        self._flush_directories([attempt.key(receipt.name) for receipt in receipts])
        key = attempt.key(CERTIFICATE_NAME)
        if not self.storage.create(key, data) and self.storage.read(key) != data:
            raise CheckpointDamaged(f"{key} is there already with other contents", file=key, step=attempt.step)
        return certificate

    def identity(self) -> tuple[str, int, int]:
        """Return the boot of the machine, with the device and the inode of the directory.

        It is equal for processes that see the same directory. Raises StorageError.
        """
        # Device and inode alone are equal on machines that were set up alike, and those may have the same node name.
        path = self.storage.local_path("")
        try:
            status = path.stat()
        except OSError as error:
            raise posix.translate(error, what="Looking at", file=str(path), directory=str(path)) from error
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return boot, status.st_dev, status.st_ino

    def marked_epoch(self) -> int:
        """Return the highest writer epoch that was marked on this disk, 0 for none. Raises StorageError."""
        try:
            text = self.storage.read(_EPOCH_KEY).decode("ascii", "replace").strip()
        except FileMissing:
            return 0
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0

    def mark_epoch(self, epoch: int) -> None:
        """Mark that a job with this writer epoch uses the disk.

        From then on a job of a lower epoch deletes nothing, and a deletion that it had begun has ended when this
        returns. Raises StoreFenced when a higher epoch is marked, StorageError.
        """
        with self._alone(epoch):
            self.storage.remove_unfinished("", before_seconds=math.inf)  # their writers are dead: it is alone
            if epoch > (marked := self.marked_epoch()):
                try:
                    self._write_epoch(epoch)
                except StorageFull:
                    if marked:
                        raise
                    # No job has come to this disk, so none is kept from it. A save finds the disk full too.

    def _write_epoch(self, epoch: int) -> None:
        """Overwrite the epoch in place, which needs no space: a job must be able to resume when the disk is full."""
        path = str(self.storage.local_path(_EPOCH_KEY))
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(descriptor, f"{epoch:018d}\n".encode(), 0)  # of constant length, so never torn
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            posix.flush_directory(os.path.dirname(path))
        except OSError as error:
            raise posix.translate(error, what="Writing", file=_EPOCH_KEY, directory=os.path.dirname(path)) from error

    def delete_as(self, epoch: int, attempt: Attempt) -> bool:
        """As `delete`, for a job with this epoch. Raises StoreFenced when a higher one is marked, StorageError."""
        with self._alone(epoch):
            return self.delete(attempt)

    @contextlib.contextmanager
    def reading(self, attempt: Attempt) -> Iterator[None]:
        """Keep every process of this node from deleting an attempt while the context lasts.

        The lock ends when this process is killed. An attempt without a certificate on this disk is not locked.
        """
        descriptor = _open_certificate(self.storage.local_path(attempt.key(CERTIFICATE_NAME)))
        try:
            if descriptor is not None:
                with contextlib.suppress(OSError):  # it is being deleted, or this file system has no locks
                    lock_open_file(descriptor, shared=True)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @contextlib.contextmanager
    def _alone(self, epoch: int) -> Iterator[None]:
        """Let nobody else mark or delete while the context lasts. Raises StoreFenced when a higher epoch is marked."""
        with locked(str(self.storage.local_path(_LOCK_NAME))):
            if (marked := self.marked_epoch()) > epoch:
                raise StoreFenced(
                    f"A later job has come to the disk of {self.node}: writer epoch {marked}, this job has {epoch}",
                    hint="Stop this job, or start it again to take the store over",
                )
            yield

    def delete(self, attempt: Attempt) -> bool:
        """Delete the directory of an attempt, its certificate first. If it is read now, return False and leave it.

        The next call ends a deletion that was begun. Symbolic links in it stay, and so do their targets. Raises
        StorageError.
        """
        directory = self.storage.local_path(attempt.prefix.rstrip("/"))
        with _unread(directory / CERTIFICATE_NAME) as is_unread:
            if not is_unread:
                return False
            self.storage.delete([attempt.key(CERTIFICATE_NAME)])
        try:
            posix.flush_directory(str(directory))
        except FileNotFoundError:
            return True
        except OSError as error:
            raise posix.translate(error, what="Deleting", file=str(directory), directory=str(directory)) from error
        self.storage.delete([file.key for file in self.storage.list(attempt.prefix)])
        self.storage.remove_directories(attempt.prefix.rstrip("/"))
        return True

    def _flush_directories(self, keys: Collection[str]) -> None:
        """Make all directories that lead to these files durable, with the names in them."""
        for directory in sorted({str(parent) for key in keys for parent in PurePosixPath(key).parents}, reverse=True):
            path = str(self.storage.local_path("" if directory == "." else directory))
            try:
                posix.flush_directory(path)
            except OSError as error:
                raise posix.translate(error, what="Making durable", file=directory, directory=path) from error

    def _sizes(self, attempt: Attempt) -> dict[str, int]:
        start = len(attempt.prefix)
        files = {file.key[start:]: file.size_bytes for file in self.storage.list(attempt.prefix)}
        files.pop(CERTIFICATE_NAME, None)
        return files


class _PartStorage(LocalStorage):
    """The storage of a part, whose directories stay private where somebody removes them while a job runs."""

    def _make_directories(self, path: str) -> None:
        if not self.local_path(CHECKPOINT_PREFIX.rstrip("/")).is_dir():
            _make_part(self.local_path(""))
        super()._make_directories(path)


def _make_part(part: Path) -> None:
    """Create the directories of a part that are absent, durably. Raises the errors of `NodeDisk.open`."""
    root = part.parent
    try:
        for path in (root, part, part / CHECKPOINT_PREFIX.rstrip("/")):
            fault = make_private(path)
            if fault:
                raise InvalidInput(
                    f"The directory for fast checkpoints {path} {fault}",
                    hint="Give a directory on a disk of the node that belongs to you alone, with mode 700",
                )
            with contextlib.suppress(PermissionError):  # a parent that this user may pass and not open
                posix.flush_directory(str(path.parent))
    except OSError as error:
        what = "Using the directory for fast checkpoints"
        raise posix.translate(error, what=what, file=str(root), directory=str(root)) from error


def _open_certificate(path: Path) -> int | None:
    """Return a descriptor of the certificate; None if it cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


@contextlib.contextmanager
def _unread(certificate: Path) -> Iterator[bool]:
    """Yield True if nobody reads the attempt of a certificate. No reader begins while the context lasts."""
    descriptor, is_unread = _open_certificate(certificate), True
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # this file system has no locks
                is_unread = lock_open_file(descriptor, shared=False)
        yield is_unread
    finally:
        if descriptor is not None:
            os.close(descriptor)


def disk_storage(path: Path, *, durable: bool, direct_io: bool) -> LocalStorage:
    """Return the storage of a part. A simulation replaces this function."""
    return _PartStorage(path, durable=durable, direct_io=direct_io)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock file, where the file system has locks. Raises StorageError after `LOCK_SECONDS`. A simulation
    replaces this function."""
    lock = Exclusive(path)
    try:
        if not lock.take(wait_seconds=LOCK_SECONDS):
            raise StorageError(
                f"{path} has been locked by another process for {LOCK_SECONDS:g} s",
                hint="A job that was stopped while it deleted holds it: end that job",
            )
    except OSError as error:
        if error.errno not in NO_LOCKS:  # a job works there too: then a deletion may meet a reader, whose read fails
            raise posix.translate(error, what="Locking", file=path, directory=path) from error
    try:
        yield
    finally:
        lock.give_back()
