"""What fast checkpoints lie below a directory of this node, of whichever stores. Nothing is created or changed.

For who looks from outside of a job: `NodeDisk.open` is for the processes of one, and creates what is not there. What a
directory holds is told by names, sizes and certificates; no other byte is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import CheckpointDamaged, InvalidInput, StorageError, UnsupportedVersion
from ckptstore.fast.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.fast.nodes.node_disk import STORE_ID, NodeDisk
from ckptstore.format.layout import CHECKPOINT_PREFIX, LOG_PREFIX, MANIFEST_NAME, STORE_KEY, Attempt
from ckptstore.format.ranges import Numbers
from ckptstore.format.timings import clean_node
from ckptstore.group.base import this_node
from ckptstore.storage.base import StoredFile
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.disk.private import privacy_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAttempt:
    """The directory of one attempt on this node."""

    attempt: Attempt
    certificate: Certificate | None
    """None where there is none, or none that can be read."""
    fault: str = ""
    """Why it cannot be read."""
    ranks: tuple[int, ...] = ()
    """Of the certificate: those all of whose files are here, with their sizes."""
    missing: tuple[str, ...] = ()
    """The files that this node should hold, and that are not here with their sizes. Of a node whose name has changed,
    what no file shows to be missing is not known."""
    size_bytes: int = 0
    """Of all files that are here."""
    changed_seconds: float | None = None
    """When the certificate was written, or else the newest file; by the clock of the node. None for an empty
    directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStore:
    """The part of the directory that belongs to one store."""

    store_id: str
    disk: NodeDisk
    privacy_fault: str
    """Why no job uses it, "" where one would."""
    fault: str = ""
    """Why it cannot be listed."""
    epoch: int = 0
    """The highest writer epoch of a job that had come before it was listed, 0 for none."""
    attempts: tuple[HeldAttempt, ...] = ()
    """In the order of their names."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that lies below a directory."""

    directory: str
    privacy_fault: str
    """Why no job of this user uses the directory, "" where one would."""
    stores: tuple[HeldStore, ...]
    """By their ids."""
    others: dict[str, str]
    """What is no fast checkpoint, by its name below the directory, with what it is. It is nobody's to delete."""


def take_inventory(directory: str | os.PathLike[str]) -> Inventory:
    """Look at a directory for fast checkpoints, and at those of each store below it.

    What is wrong with one attempt or store hides no other. Raises InvalidInput where there is no directory, or a
    symbolic link to one, and StorageError when it cannot be listed.
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
    """The part of the directory that belongs to one store, on the node of that name; None where there is none.

    Raises InvalidInput where it is not private to this user: then others may have put anything there.
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
    """What is a directory and no link, by name; all else joins `others`."""
    with os.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield path / entry.name
        else:
            others[prefix + entry.name] = "a symbolic link" if entry.is_symlink() else "a file"


def _is_of_a_tier(path: Path, others: dict[str, str]) -> bool:
    """Whether it is the part of a store: a store itself has directories of the same names, and is not to be taken for
    one."""
    if not STORE_ID.fullmatch(path.name):
        others[path.name] = "a directory whose name is the id of no store"
    elif any(os.path.lexists(path / name.rstrip("/")) for name in (STORE_KEY, LOG_PREFIX)):
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
    """What this node should hold and does not. A node that has been started again has another name: then it is the one
    whose ranks are those of the files that are here, if just one is."""
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
