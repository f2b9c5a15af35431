"""The directory of fast checkpoints on one node: what lies there, and how a certificate comes and goes.

    <directory>/<store id>/checkpoints/<attempt>/   the files of the ranks of this node, under their names in the store
    <directory>/<store id>/checkpoints/<attempt>/fast.json   the certificate: last to come, first to go

Below the id of the store lies what lies below the root of the store, so an attempt has the same keys on both.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidInput, StorageError, UnsupportedVersion
from ckptstore.fast.candidates import NodeSighting
from ckptstore.fast.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.format.layout import CHECKPOINT_PREFIX, Attempt
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.disk.private import make_private

_STORE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class NodeDisk:
    """The fast checkpoints of one store on this node. Any number of processes may have one open."""

    def __init__(self, storage: LocalStorage, node: str) -> None:
        """Use `open`."""
        self.storage = storage
        """Its keys are those of the store."""
        self.node = node

    @staticmethod
    def open(directory: str | os.PathLike[str], store_id: str, *, node: str) -> NodeDisk:
        """The part of the directory that belongs to a store, created if absent, for this user alone.

        Raises InvalidInput when the directory is a symbolic link, belongs to another user or lets others in, and
        StorageError when it cannot be used.
        """
        if not _STORE_ID.fullmatch(store_id):
            raise InvalidInput(f"The store has the id {store_id[:80]!r}, which cannot be the name of a directory")
        given = Path(os.path.abspath(directory))
        root = Path(os.path.realpath(given.parent)) / given.name
        try:
            for path in (root, root / store_id, root / store_id / CHECKPOINT_PREFIX.rstrip("/")):
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
        return NodeDisk(LocalStorage(root / store_id), node)

    def attempts(self) -> list[Attempt]:
        """Every attempt that has a directory here, in order. Links, and names that are none of an attempt, are not
        looked at."""
        path = self.storage.local_path(CHECKPOINT_PREFIX.rstrip("/"))
        try:
            with os.scandir(path) as entries:
                found = [Attempt.parse(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise posix.translate(error, what="Listing", file=str(path), directory=str(path)) from error
        return sorted(attempt for attempt in found if attempt is not None)

    def certificate(self, attempt: Attempt) -> Certificate | None:
        """The certificate of an attempt, None where there is none.

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
        """What is here, and the certificates by their SHA-256. What is wrong with one attempt is told in its sighting,
        so that it hides no other. No byte is read but those of certificates: whoever loads compares digests.

        Raises StorageError when the directory cannot be listed.
        """
        sightings: list[NodeSighting] = []
        certificates: dict[str, Certificate] = {}
        for attempt in self.attempts():
            sha256 = fault = ""
            sizes: dict[str, int] = {}
            try:
                sizes = self._sizes(attempt)
                certificate = self.certificate(attempt)
                if certificate is not None:
                    sha256 = certificate.sha256
                    certificates[sha256] = certificate
            except (CheckpointDamaged, UnsupportedVersion, StorageError) as error:
                fault = error.message
            name = str(attempt)
            sightings.append(NodeSighting(node=self.node, attempt=name, sha256=sha256, fault=fault, sizes=sizes))
        return sightings, certificates

    def certify(self, data: bytes, *, ranks: Collection[int]) -> Certificate:
        """Write a certificate beside the files of `ranks`, which this node holds; it is durable when this returns.

        Every file is there with its size and is durable before. Where the same certificate is there already, nothing
        happens. Raises CheckpointDamaged when a file is not as the manifest says, or another certificate is there;
        StorageError. After an error the certificate may be there: it is whole then, and so are the files.
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
        self._persist([attempt.key(receipt.name) for receipt in receipts])
        key = attempt.key(CERTIFICATE_NAME)
        if not self.storage.create(key, data) and self.storage.read(key) != data:
            raise CheckpointDamaged(f"{key} is there already with other contents", file=key, step=attempt.step)
        return certificate

    def delete(self, attempt: Attempt) -> None:
        """Delete the directory of an attempt, its certificate first. What was begun and not ended is deleted by the
        next call. Symbolic links in it stay, and so does what they lead to. Raises StorageError."""
        directory = self.storage.local_path(attempt.prefix.rstrip("/"))
        self.storage.delete([attempt.key(CERTIFICATE_NAME)])
        try:
            posix.flush_directory(str(directory))
        except FileNotFoundError:
            return
        except OSError as error:
            raise posix.translate(error, what="Deleting", file=str(directory), directory=str(directory)) from error
        self.storage.delete([file.key for file in self.storage.list(attempt.prefix)])
        self.storage.remove_directories(attempt.prefix.rstrip("/"))

    def _persist(self, keys: Collection[str]) -> None:
        """Make files durable and all directories that lead to them: other processes may have created those."""
        self.storage.persist(list(keys))
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
