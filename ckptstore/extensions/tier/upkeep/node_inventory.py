"""List the fast checkpoints of any stores below a directory of this node. Nothing is created or changed.

This is for a look from outside of a job: `NodeDisk.open` is for the processes of a job, and creates missing
directories. Names, sizes and certificates are read, and no other bytes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import CheckpointDamaged, InvalidInput, StorageError, UnsupportedVersion
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.extensions.tier.nodes.node_disk import STORE_ID, NodeDisk
from ckptstore.format.layout import CHECKPOINT_PREFIX, LOG_PREFIX, MANIFEST_NAME, STORE_KEY, Attempt
from ckptstore.format.ranges import Numbers
from ckptstore.format.timings import clean_node
from ckptstore.group.base import this_node
from ckptstore.storage.base import StoredFile
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.disk.posix import privacy_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAttempt:
    """The directory of one attempt on this node."""

    attempt: Attempt
    certificate: Certificate | None
    """The certificate; None if there is none, or none that can be read."""
    fault: str = ""
    """The reason why the files cannot be listed or the certificate cannot be read; "" if they can."""
    ranks: tuple[int, ...] = ()
    """The ranks of the certificate all of whose files are on this node, with their sizes."""
    missing: tuple[str, ...] = ()
    """The files that this node should have, and does not have with their sizes.

    If the name of the node has changed, files of ranks that have no file on it may be left out.
    """
    size_bytes: int = 0
    """The bytes of all files in the directory."""
    changed_seconds: float | None = None
    """The time at which the certificate, or else the newest file, was written, by the clock of the node.

    None for an empty directory.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStore:
    """The part of the directory that belongs to one store."""

    store_id: str
    disk: NodeDisk
    privacy_fault: str
    """The reason why no job uses it, "" if a job would."""
    fault: str = ""
    """The reason why it cannot be listed, "" if it can."""
    epoch: int = 0
    """The highest writer epoch that was marked before it was listed, 0 for none."""
    attempts: tuple[HeldAttempt, ...] = ()
    """The attempts, in the order of their names."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The contents of a directory of fast checkpoints."""

    directory: str
    privacy_fault: str
    """The reason why no job of this user uses the directory, "" if a job would."""
    stores: tuple[HeldStore, ...]
    """The parts of stores, in the order of their ids."""
    others: dict[str, str]
    """The other entries: a description of each, by its name below the directory. Nobody may delete them."""


def take_inventory(directory: str | os.PathLike[str]) -> Inventory:
    """List the fast checkpoints of all stores below a directory.

    A fault of one attempt or store hides no other. Raises InvalidInput when there is no directory, or a symbolic link
    in its place, and StorageError when it cannot be listed.
    """
    given = Path(os.path.abspath(directory))
    try:
        if not stat.S_ISDIR(given.lstat().st_mode):
            raise InvalidInput(
                f"{given} is no directory, or a symbolic link", hint="Give the directory itself: no job follows a link"
            )
        others: dict[str, str] = {}
        found = [path for path in _directories(given, "", others) if _is_of_a_tier(path, others)]
        stores = tuple(_store(path, others) for path in found)
        return Inventory(str(given), _spoken_fault(given), stores, others)
    except FileNotFoundError:
        raise InvalidInput(f"There is no directory {given}") from None
    except OSError as error:
        raise posix.translate(error, what="Listing", file=str(given), directory=str(given)) from error


def held_store(directory: str | os.PathLike[str], store_id: str, *, node: str) -> HeldStore | None:
    """Return the part of the directory that belongs to one store, on the node of that name; None if there is none.

    Raises InvalidInput when it is not private to this user: then others may have put anything into it.
    """
    given = Path(os.path.abspath(directory))
    path = Path(os.path.realpath(given.parent)) / given.name / store_id
    if not STORE_ID.fullmatch(store_id) or not os.path.lexists(path / CHECKPOINT_PREFIX.rstrip("/")):
        return None
    try:
        unsafe = _spoken_fault(path.parent)
    except OSError as error:
        raise posix.translate(error, what="Looking at", file=str(path), directory=str(path)) from error
    found = _store(path, {}, node=node)
    if fault := unsafe or found.privacy_fault:
        raise InvalidInput(
            f"The directory for fast checkpoints {fault}",
            hint="Whoever else can write there could put anything into a checkpoint, so nothing there is read",
        )
    return found


def _directories(path: Path, prefix: str, others: dict[str, str]) -> Iterator[Path]:
    """Yield the directories that are no links, in the order of their names; add all other entries to `others`."""
    with os.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield path / entry.name
        else:
            others[prefix + entry.name] = "a symbolic link" if entry.is_symlink() else "a file"


def _is_of_a_tier(path: Path, others: dict[str, str]) -> bool:
    """Return True if it is the part of a store; else add it to `others`."""
    if not STORE_ID.fullmatch(path.name):
        others[path.name] = "a directory whose name is the id of no store"
    elif any(os.path.lexists(path / name.rstrip("/")) for name in (STORE_KEY, LOG_PREFIX)):  # has CHECKPOINT_PREFIX too
        others[path.name] = "a store, not the fast checkpoints of one"
    elif not os.path.lexists(path / CHECKPOINT_PREFIX.rstrip("/")):
        others[path.name] = f"a directory without {CHECKPOINT_PREFIX}"
    else:
        return True
    return False


def _store(path: Path, others: dict[str, str], *, node: str = "") -> HeldStore:
    disk = NodeDisk(LocalStorage(path), node or clean_node(this_node()))
    checkpoints = path / CHECKPOINT_PREFIX.rstrip("/")
    unsafe, fault, epoch = "", "", 0
    attempts: list[HeldAttempt] = []
    try:
        unsafe = next(filter(None, map(_spoken_fault, (path, checkpoints))), "")
        epoch = disk.marked_epoch()
        if stat.S_ISDIR(checkpoints.lstat().st_mode):
            prefix = f"{path.name}/{CHECKPOINT_PREFIX}"
            attempts = [_attempt(disk, each) for each in _attempts(checkpoints, prefix, others)]
    except StorageError as error:
        fault = error.message
    except OSError as error:
        fault = posix.translate(error, what="Listing", file=str(path), directory=str(path)).message
    return HeldStore(
        store_id=path.name,
        disk=disk,
        privacy_fault=unsafe,
        fault=fault,
        epoch=epoch,
        attempts=tuple(attempts),
    )


def _spoken_fault(path: Path) -> str:
    fault = privacy_fault(path)
    return f"{path} {fault}" if fault else ""


def _attempts(checkpoints: Path, prefix: str, others: dict[str, str]) -> Iterator[Attempt]:
    for path in _directories(checkpoints, prefix, others):
        attempt = Attempt.parse(path.name)
        if attempt is None:
            others[prefix + path.name] = "a directory whose name is that of no attempt"
        elif os.path.lexists(path / MANIFEST_NAME):
            others[prefix + path.name] = f"a checkpoint of a store: it has {MANIFEST_NAME}"
        else:
            yield attempt


def _attempt(disk: NodeDisk, attempt: Attempt) -> HeldAttempt:
    fault, certificate = "", None
    files: dict[str, StoredFile] = {}
    try:
        files = {file.key.removeprefix(attempt.prefix): file for file in disk.storage.list(attempt.prefix)}
        certificate = disk.certificate(attempt)
    except (CheckpointDamaged, UnsupportedVersion, StorageError) as error:
        fault = error.message
    written = files.pop(CERTIFICATE_NAME, None)
    times = [written.modified_seconds] if written else [file.modified_seconds for file in files.values()]
    sizes = {name: file.size_bytes for name, file in files.items()}
    ranks = certificate.ranks_in(sizes) if certificate else frozenset()
    return HeldAttempt(
        attempt=attempt,
        certificate=certificate,
        fault=fault,
        ranks=tuple(sorted(ranks)),
        missing=_missing(certificate, sizes, disk.node) if certificate else (),
        size_bytes=sum(sizes.values()) + (written.size_bytes if written else 0),
        changed_seconds=max(times, default=None),
    )


def _missing(certificate: Certificate, sizes: Mapping[str, int], node: str) -> tuple[str, ...]:
    """Return the files that this node should have, and does not have with their sizes."""
    # A node that was started again may have another name: then it is the only holder that has the ranks of the files
    # on the disk, if just one has.
    receipts = certificate.manifest.files
    seen = {receipt.rank for receipt in receipts if receipt.name in sizes}
    held = certificate.holders.get(node)
    if held is None:
        fitting = [ranks for ranks in certificate.holders.values() if seen and seen <= set(ranks)]
        held = fitting[0] if len(fitting) == 1 else Numbers(seen)
    expected = set(held)
    return tuple(
        receipt.name
        for receipt in receipts
        if receipt.rank in expected and sizes.get(receipt.name) != receipt.size_bytes
    )
