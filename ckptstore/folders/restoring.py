"""A committed checkpoint goes back to where it lay in a folder, in the form that its framework looks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.catalogue import Catalogue
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    NoUsableCheckpoint,
    StorageError,
    StorageFull,
)
from ckptstore.folders.candidate import Beside, Candidate, fingerprint
from ckptstore.folders.folder import Folder, candidates_of, refuse_links
from ckptstore.folders.found import Found, Home, home_of
from ckptstore.format.digest import crc32c
from ckptstore.format.manifest import Receipt
from ckptstore.loading.story import download_files

_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did."""

    step: int
    name: str
    """Relative to the folder."""
    uri: str
    is_restored: bool
    """Whether the checkpoint lies in the folder now, as the store has it."""
    why_not: str | None = None
    fetched_bytes: int = 0
    kept_bytes: int = 0
    """Of files that were there already, with the right digests."""
    moved_aside: tuple[str, ...] = ()
    """What a framework would have taken for newer: it lies in .ckptstore/aside now."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints of the store that are damaged or did not come from a folder, in words."""


@dataclass(slots=True)
class _Fetched:
    fetched_bytes: int = 0
    kept_bytes: int = 0
    moved_aside: list[str] = field(default_factory=list)


def restore_folder(
    folder: Folder, checkpoints: Sequence[Checkpoint], *, keeps_newer: bool = True
) -> RestoreReport | None:
    """Put the first of these checkpoints that is whole where it lay in the folder; None if there are none.

    A framework sees all of it or nothing. Files that are there already are not fetched again, if their digests are
    right. What the folder has finished of its own at a later step stays, and nothing is restored, unless `keeps_newer`
    is False. What is unfinished there at the same or a later step would be taken for the newest: it is moved to
    `.ckptstore/aside`, or replaced if it has the same name. No job may write into the folder meanwhile.

    Args:
        folder: on this node.
        checkpoints: in the order in which they are tried, the newest first as a rule.
        keeps_newer: False where several nodes restore, which must all come to the same step.

    Raises NoUsableCheckpoint when none of them can be used, InvalidSource for a link on the way, StorageFull and
    StorageError where the folder cannot be written to.
    """
    shutil.rmtree(folder.own / "restoring", ignore_errors=True)  # of a restore that was killed
    skipped: list[str] = []
    for checkpoint in checkpoints:
        try:
            home = _home(checkpoint)
            if home is None:
                skipped.append(f"step {checkpoint.step} did not come from a folder")
                continue
            return _restore(folder, checkpoint, home, keeps_newer, tuple(skipped))
        except CkptstoreError as error:
            if not isinstance(error, CheckpointDamaged | CheckpointGone | FileMissing):
                raise
            skipped.append(f"step {checkpoint.step}: {error}")
        except OSError as error:
            raise StorageError(f"{folder.path} could not be written: {error}", step=checkpoint.step) from error
    if not checkpoints:
        return None
    raise NoUsableCheckpoint(f"No checkpoint can be restored into {folder.path}: {'; '.join(skipped)}")


def newest_first(store: Catalogue, step: int | None = None) -> list[Checkpoint]:
    """The checkpoints of a store, the newest first; or one alone. Raises InvalidInput if the store does not have it."""
    return [store[step]] if step is not None else list(store)[::-1]


def same(folder: Folder, found: Found, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint of the store is this one of the folder: by fingerprint, else by the bytes of every file."""
    home = _home(checkpoint)
    if home is None or home.name != found.name or checkpoint.step != found.step:
        return False
    if found.fingerprint in (home.fingerprint, folder.restored().get(found.name)):
        return True
    receipts = {receipt.name: receipt for receipt in checkpoint.files}
    return set(receipts) >= set(found.files) and all(
        _has(folder.path / found.path_of(file), receipts[file]) for file in found.files
    )


def _home(checkpoint: Checkpoint) -> Home | None:
    """By what was committed: the user's metadata may be another now."""
    return home_of(files_behind(checkpoint).read_manifest()[0].metadata, step=checkpoint.step)


def _restore(
    folder: Folder, checkpoint: Checkpoint, home: Home, keeps_newer: bool, skipped: tuple[str, ...]
) -> RestoreReport:
    refuse_links(folder.path, home.name)
    told = {"step": checkpoint.step, "name": home.name, "uri": checkpoint.uri, "skipped": skipped}
    done = _Fetched()
    local = candidates_of(folder, _ranks_of(checkpoint))
    newer = [it for it in local if _is_later(folder, it, checkpoint, home)]
    whole = max((it for it in newer if folder.is_whole(it)), key=lambda it: it.step or 0, default=None)
    if keeps_newer and whole is not None:
        return RestoreReport(is_restored=False, why_not=f"{whole.name} in the folder is newer", **told)
    own = next((it for it in local if it.name == home.name), None)
    if keeps_newer and own is not None and _is_rewritten(folder, own, checkpoint, home):
        return RestoreReport(is_restored=False, why_not=f"{home.name} was written anew after it was saved", **told)
    _bring(folder, checkpoint, home, done)
    for candidate in newer:
        _move_aside(folder, candidate, done)
    for name, it in home.beside.items():
        _point(folder, folder.path / home.parent / name, it)
    return RestoreReport(
        is_restored=True,
        fetched_bytes=done.fetched_bytes,
        kept_bytes=done.kept_bytes,
        moved_aside=tuple(done.moved_aside),
        **told,
    )


def _is_later(folder: Folder, candidate: Candidate, checkpoint: Checkpoint, home: Home) -> bool:
    """Whether a framework would take a candidate rather than the checkpoint, or might, as it is of the same step."""
    if candidate.step is None or candidate.name == home.name:
        return False
    is_torn = candidate.step == checkpoint.step and not folder.is_whole(candidate)
    return candidate.step > checkpoint.step or is_torn


def _ranks_of(checkpoint: Checkpoint) -> frozenset[int]:
    """The ranks whose files a Trainer's checkpoint has; none for one process."""
    names = (receipt.name for receipt in checkpoint.files)
    numbers = (name.removeprefix("rng_state_").removesuffix(".pth") for name in names if name.startswith("rng_state_"))
    return frozenset(int(number) for number in numbers if number.isdigit())


def _is_rewritten(folder: Folder, own: Candidate, checkpoint: Checkpoint, home: Home) -> bool:
    """Whether a whole checkpoint of this name has other contents by intent, and not because it was damaged."""
    if not folder.is_whole(own) or fingerprint(own) in (home.fingerprint, folder.restored().get(own.name)):
        return False
    receipts = {receipt.name: receipt for receipt in checkpoint.files}
    return not all(file in receipts and _has(folder.path / own.path_of(file), receipts[file]) for file in own.files)


def _bring(folder: Folder, checkpoint: Checkpoint, home: Home, done: _Fetched) -> None:
    """Make it whole in our directory of the folder, then put it in its place by a rename for each name."""
    partial = folder.new("restoring")
    partial.mkdir()
    above = folder.path / home.name if home.is_directory else folder.path / home.parent
    try:
        _fill(partial, above, checkpoint, done)
        for path in (partial, *partial.rglob("*")):  # older than what the trainer will write: some delete by age
            os.utime(path, (checkpoint.created_at, checkpoint.created_at), follow_symlinks=False)
        if home.is_directory:
            _replace(folder, partial, above)
        else:
            above.mkdir(parents=True, exist_ok=True)
            own = home.name.rpartition("/")[2]
            for file in sorted(checkpoint.files, key=lambda it: it.name == own):
                if (above / file.name).is_dir():
                    aside = folder.new("aside")
                    aside.mkdir(parents=True)
                    (above / file.name).rename(aside / file.name)
                    done.moved_aside.append(f"{file.name} → {aside.relative_to(folder.path)}")
                (partial / file.name).replace(above / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    placed = next((it for it in candidates_of(folder) if it.name == home.name), None)
    if placed is not None:
        folder.remember_restored(placed)


def _fill(partial: Path, above: Path, checkpoint: Checkpoint, done: _Fetched) -> None:
    files, missing = files_behind(checkpoint), []
    manifest = files.read_manifest()[0]
    files.check_complete(manifest)
    for receipt in checkpoint.files:
        there, target = above / receipt.name, partial / receipt.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.realpath(there) == str(there) and _has(there, receipt):
            _copied_or_linked(there, target)
            done.kept_bytes += receipt.size_bytes
        else:
            missing.append(receipt)
            done.fetched_bytes += receipt.size_bytes
    free_bytes = shutil.disk_usage(partial).free
    if done.fetched_bytes > free_bytes:
        raise StorageFull(f"{partial} needs {done.fetched_bytes:,} bytes, and {free_bytes:,} bytes are free")
    with files.held():
        download_files(files, manifest, missing, partial)


def _copied_or_linked(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links
        shutil.copyfile(source, target)


def _has(path: Path, receipt: Receipt) -> bool:
    """Whether a file has the bytes of a receipt: its size and its digest."""
    if receipt.crc32c is None or path.is_symlink() or not path.is_file() or path.stat().st_size != receipt.size_bytes:
        return False
    found = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            found = crc32c(block, found)
    return found == receipt.crc32c


def _replace(folder: Folder, partial: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        removed = folder.new("removed")
        removed.mkdir()
        target.rename(removed / target.name)
        partial.rename(target)
        shutil.rmtree(removed)
    else:
        partial.rename(target)


def _move_aside(folder: Folder, candidate: Candidate, done: _Fetched) -> None:
    refuse_links(folder.path, candidate.parent)
    aside = folder.new("aside")
    (aside / candidate.parent).mkdir(parents=True)
    if candidate.is_directory:
        (folder.path / candidate.name).rename(aside / candidate.name)
    else:
        for file in candidate.files:
            (folder.path / candidate.path_of(file)).rename(aside / candidate.path_of(file))
    done.moved_aside.append(f"{candidate.name} → {aside.relative_to(folder.path)}")


def _point(folder: Folder, path: Path, beside: Beside) -> None:
    """Write a tracker, or make a link, at once."""
    partial = folder.new("restoring")
    if beside.link is not None:
        partial.symlink_to(beside.link)
    else:
        partial.write_text(beside.text or "", encoding="utf-8")
    partial.replace(path)
