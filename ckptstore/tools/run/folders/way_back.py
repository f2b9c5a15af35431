"""A committed checkpoint goes back to where it lay in a folder, in the form that its framework looks for."""

from __future__ import annotations

import os
import re
import shutil
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from ckptstore.extensions.exchange.replacing import replace_directory
from ckptstore.format.manifest import Receipt
from ckptstore.loading.story import download_files
from ckptstore.storage.disk import posix
from ckptstore.tools.run.folders.candidate import Beside, Prospect, fingerprint, text_of
from ckptstore.tools.run.folders.folder import Folder, candidates_of, has_digest, refuse_links
from ckptstore.tools.run.folders.found import TRAINER_STATE, Found, Home, home_of
from ckptstore.tools.run.folders.shape import shape_named
from ckptstore.tools.run.folders.whole import json_in
from ckptstore.transfer.sources import refuse_shortage

_NEAR = 16
"""The number of checkpoints among which one that says its step is looked for: each is a read of a manifest."""
_TRAINER_NAME = re.compile(r"checkpoint-\d+")
_OF_A_RANK = re.compile(r"(?:rng_state|(?:bf16_)?zero_pp_rank)_(\d+)(?:\.pth|_.*optim_states\.pt)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of a restore."""

    step: int
    name: str
    """Relative to the folder."""
    uri: str
    is_restored: bool
    """True if the checkpoint lies in the folder now, as the store has it."""
    why_not: str | None = None
    fetched_bytes: int = 0
    kept_bytes: int = 0
    """The size of files that were there already, with the right digests."""
    moved_aside: tuple[str, ...] = ()
    """Names of what a framework would have taken for newer: it lies in `aside` of our own directory now."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints of the store that are damaged or did not come from a folder, in words."""
    best: str | None = None
    """The name of another one that came along: the restored one calls it the best, or it is newer and says no step."""


@dataclass(slots=True)
class _Fetched:
    fetched_bytes: int = 0
    kept_bytes: int = 0
    moved_aside: list[str] = field(default_factory=list)


def restore_folder(
    folder: Folder, checkpoints: Sequence[Checkpoint], *, keeps_newer: bool = True, only_newer: str | None = None
) -> RestoreReport | None:
    """Put the first of these checkpoints that is whole where it lay in the folder; None if there are none.

    A framework sees all of it or nothing. Files that are there already are not fetched again, if their digests are
    right. Where a Trainer's checkpoint names the best one, that comes too: Trainer may load it at the end.

    What the folder has finished of its own at a later step stays, and nothing is restored, unless `keeps_newer` is
    False. What is unfinished there at the same or a later step would be taken for the newest: it is moved to
    `aside` in our own directory, or replaced if it has the same name. No job may write into the folder meanwhile.

    Args:
        folder: on this node.
        checkpoints: in the order in which they are tried, the newest first as a rule.
        keeps_newer: False where several nodes restore, which must all come to the same step.
        only_newer: the name of the only one that may stay, where several nodes have agreed on it.

    Raises NoUsableCheckpoint when none of them can be used, InvalidSource for a link on the way, StorageFull and
    StorageError where the folder cannot be written to.
    """
    folder.sweep("restoring")  # of a restore that was killed
    try:
        return _restore_first(folder, checkpoints, lambda name: keeps_newer and only_newer in (None, name))
    finally:
        folder.sweep("restoring")


def _restore_first(
    folder: Folder, checkpoints: Sequence[Checkpoint], may_stay: Callable[[str], bool]
) -> RestoreReport | None:
    skipped: list[str] = []
    for number, checkpoint in enumerate(checkpoints, 1):
        try:
            home = _home(checkpoint)
            if home is None:
                skipped.append(f"step {checkpoint.step} did not come from a folder")
                continue
            report = _restore(folder, checkpoint, home, may_stay, tuple(skipped))
            if home.step is None:
                report = _with_numbered(folder, checkpoints[number : number + _NEAR], home, may_stay, report)
            return _with_best(folder, checkpoints, home, report) if report.is_restored else report
        except CkptstoreError as error:
            if not isinstance(error, CheckpointDamaged | CheckpointGone | FileMissing):
                raise
            skipped.append(f"step {checkpoint.step}: {error}")
        except OSError as error:
            raise StorageError(f"{folder.path} could not be written: {error}", step=checkpoint.step) from error
    if not checkpoints:
        return None
    raise NoUsableCheckpoint(f"No checkpoint can be restored into {folder.path}: {'; '.join(skipped)}")


def set_aside_unfinished(folder: Folder, *, since_ns: int) -> tuple[str, ...]:
    """Move aside what a Trainer would take for its newest checkpoint and lacks files, where the store has none to go on
    from: it would end at it, at each start. Only what was written since then; what a user has laid there before stays.

    For a folder that has the files of all ranks, and into which no job writes meanwhile.
    """
    done, local = _Fetched(), [it for it in candidates_of(folder) if _is_taken_by_name(it)]
    torn = [it for it in local if it.lacks is not None and not folder.is_whole(it)]
    newest = max((it.step or 0 for it in local if it not in torn), default=-1)
    for candidate in torn:
        path = folder.path / candidate.name
        if (candidate.step or 0) > newest and path.stat().st_mtime_ns >= since_ns:
            _move_aside(folder, candidate, done)
    return tuple(done.moved_aside)


def _is_taken_by_name(candidate: Prospect) -> bool:
    shape = shape_named(candidate.shape)
    return shape is not None and shape.is_taken_by_name and candidate.step is not None


def newest_first(store: Catalogue, step: int | None = None) -> list[Checkpoint]:
    """Return the checkpoints of a store, the newest first; or one alone. Raises InvalidInput if the store does not have
    it."""
    return [store[step]] if step is not None else list(store)[::-1]


def whole_in(folder: Folder, like: Checkpoint) -> list[tuple[int, str]]:
    """Return step and name of everything that a folder has finished, where no job writes to it. `like` is a checkpoint
    of the same training."""
    local = _local(folder, like)
    return [(it.step, it.name) for it in local if it.step is not None and folder.is_whole(it)]


def _local(folder: Folder, like: Checkpoint) -> list[Prospect]:
    """Return the candidates of a folder. A file that is itself a link out of it is the trainer's affair: it is neither
    what the store might have, nor moved aside."""
    local = candidates_of(folder, _ranks_of(like))
    return [it for it in local if it.is_directory or it.files[it.name.rpartition("/")[2]].link is None]


def same(folder: Folder, found: Found, checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint of the store is this one of the folder: by name, and by fingerprint or else by the
    bytes of every file."""
    home = _home(checkpoint)
    if home is None or home.name != found.name or (found.is_exact and home.step != found.step):
        return False
    if found.fingerprint in (home.fingerprint, folder.restored().get(found.name)):
        return True
    receipts = {receipt.name: receipt for receipt in checkpoint.files}
    return set(receipts) >= set(found.files) and all(
        _has(folder.path / found.path_of(file), receipts[file]) for file in found.files
    )


def _home(checkpoint: Checkpoint) -> Home | None:
    """Return the place by what was committed: the user's metadata may be another now."""
    return home_of(files_behind(checkpoint).read_manifest()[0].metadata, step=checkpoint.step)


def _restore(
    folder: Folder, checkpoint: Checkpoint, home: Home, may_stay: Callable[[str], bool], skipped: tuple[str, ...]
) -> RestoreReport:
    refuse_links(folder.path, home.parent)
    done = _Fetched()
    local = _local(folder, checkpoint)
    stays, why_not = _staying(folder, [it for it in local if may_stay(it.name)], checkpoint, home)
    if stays is None:
        if (folder.path / home.name).is_symlink():  # to a directory elsewhere, in which nothing is written
            aside = folder.new("aside")
            folder.move_aside(home.name, aside)
            done.moved_aside.append(f"{home.name} → {aside}")
        _bring(folder, checkpoint, home, done)
    step, name = (stays.step, stays.name) if stays else (home.step, home.name)
    for candidate in local:
        if candidate.name != name and _is_preferred(folder, candidate, checkpoint.step if step is None else step):
            _move_aside(folder, candidate, done)
    parent, beside = (stays.parent, stays.beside) if stays else (home.parent, home.beside)
    for other, it in beside.items():
        if "/" in other:
            refuse_links(folder.path, at := str(Path(parent, other).parent))
            (folder.path / at).mkdir(parents=True, exist_ok=True)
        _point(folder, folder.path / parent / other, it if stays else _moved(it, home.folder, folder.path))
    return RestoreReport(
        step=checkpoint.step,
        name=home.name,
        uri=checkpoint.uri,
        skipped=skipped,
        is_restored=stays is None,
        why_not=why_not,
        fetched_bytes=done.fetched_bytes,
        kept_bytes=done.kept_bytes,
        moved_aside=tuple(done.moved_aside),
    )


def _with_numbered(
    folder: Folder,
    checkpoints: Sequence[Checkpoint],
    home: Home,
    may_stay: Callable[[str], bool],
    report: RestoreReport,
) -> RestoreReport:
    """Bring the newest one near that says its step too: beside `best.keras`, which says none, the framework goes on
    from `weights.07.keras`."""
    skipped = report.skipped
    for checkpoint in checkpoints:
        try:
            lay = _home(checkpoint)
            if lay is None or lay.step is None or lay.parent != home.parent:
                continue
            numbered = _restore(folder, checkpoint, lay, may_stay, skipped)
        except (CheckpointDamaged, CheckpointGone, FileMissing) as error:
            skipped = (*skipped, f"step {checkpoint.step}: {error}")
            continue
        return replace(
            numbered,
            fetched_bytes=report.fetched_bytes + numbered.fetched_bytes,
            kept_bytes=report.kept_bytes + numbered.kept_bytes,
            moved_aside=(*report.moved_aside, *numbered.moved_aside),
            best=report.name if report.is_restored else None,
        )
    return replace(report, skipped=skipped)


def _with_best(folder: Folder, checkpoints: Sequence[Checkpoint], home: Home, report: RestoreReport) -> RestoreReport:
    """Bring what the state of a Trainer calls its best model, if the store still has it and it is whole."""
    name = _best_in(folder, home)
    if name is None or name == home.name:
        return report
    done = _Fetched(report.fetched_bytes, report.kept_bytes, list(report.moved_aside))
    for checkpoint in checkpoints:
        try:
            lay = _home(checkpoint)
            if lay is None or lay.name != name:
                continue
            _bring(folder, checkpoint, lay, done)
        except (CheckpointDamaged, CheckpointGone, FileMissing) as error:
            return replace(report, skipped=(*report.skipped, f"the best one, step {checkpoint.step}: {error}"))
        return replace(report, best=name, fetched_bytes=done.fetched_bytes, kept_bytes=done.kept_bytes)
    return replace(report, skipped=(*report.skipped, f"{name}, the best one, is not in the store any more"))


def _best_in(folder: Folder, home: Home) -> str | None:
    if home.shape != "transformers":
        return None
    fields = json_in(text_of(folder.path / home.name / TRAINER_STATE))
    name = fields.get("best_model_checkpoint") if isinstance(fields, dict) else None
    if not isinstance(name, str) or _TRAINER_NAME.fullmatch(own := name.rstrip("/").rpartition("/")[2]) is None:
        return None
    return f"{home.parent}/{own}" if home.parent else own


def _staying(
    folder: Folder, local: Sequence[Prospect], checkpoint: Checkpoint, home: Home
) -> tuple[Prospect | None, str | None]:
    """Return what of the folder the job is to go on from in place of the checkpoint, and why."""
    step = checkpoint.step if home.step is None else home.step
    newer = [it for it in local if it.step is not None and it.step > step and folder.is_whole(it)]
    if newer:
        newest = max(newer, key=lambda it: it.step or 0)
        return newest, f"{newest.name} in the folder is newer"
    own = next((it for it in local if it.name == home.name), None)
    if own is not None and _is_rewritten(folder, own, checkpoint, home):
        return own, f"{home.name} was written anew after it was saved"
    return None, None


def _is_preferred(folder: Folder, candidate: Prospect, step: int) -> bool:
    """Return True if a framework would take a candidate rather than another one of this step, or might."""
    if candidate.step is None or candidate.step < step:
        return False
    return candidate.step > step or not folder.is_whole(candidate)


def _ranks_of(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ranks that have written a file of their own, as Trainer and DeepSpeed name them; none for one
    process."""
    found = (_OF_A_RANK.match(receipt.name) for receipt in checkpoint.files)
    return frozenset(int(match[1]) for match in found if match)


def _is_rewritten(folder: Folder, own: Prospect, checkpoint: Checkpoint, home: Home) -> bool:
    """Return True if a whole checkpoint of this name has other contents by intent, and not because it was damaged."""
    if not folder.is_whole(own) or fingerprint(own) in (home.fingerprint, folder.restored().get(own.name)):
        return False
    receipts = {receipt.name: receipt for receipt in checkpoint.files}
    return not all(file in receipts and _has(folder.path / own.path_of(file), receipts[file]) for file in own.files)


def _bring(folder: Folder, checkpoint: Checkpoint, home: Home, done: _Fetched) -> None:
    """Make it whole in our directory of the folder, then put it in its place by a rename for each name."""
    partial = folder.new_near("restoring")
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
                    folder.move_aside(os.path.relpath(above / file.name, folder.path), aside)
                    done.moved_aside.append(f"{file.name} → {aside}")
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
        present, target = above / receipt.name, partial / receipt.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.realpath(present) == str(present) and _has(present, receipt):
            try:
                os.link(present, target)
            except OSError:  # a disk without hard links
                shutil.copyfile(present, target)
            done.kept_bytes += receipt.size_bytes
        else:
            missing.append(receipt)
            done.fetched_bytes += receipt.size_bytes
    free_bytes = posix.free_bytes(str(partial))
    if done.fetched_bytes > free_bytes:
        raise StorageFull(f"{partial} needs {done.fetched_bytes:,} bytes, and {free_bytes:,} bytes are free")
    with files.held():
        download_files(files, manifest, missing, partial)


def _has(path: Path, receipt: Receipt) -> bool:
    """Return True if a file has the bytes of a receipt: its size and its digest. One that cannot be read has not."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != receipt.size_bytes:
            return False
        return receipt.digest is not None and has_digest(path, receipt.digest)
    except OSError as error:
        refuse_shortage(error, path)
        return False


def _replace(folder: Folder, partial: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    removed = folder.new_near("removed")
    removed.mkdir()
    old = replace_directory(partial, target, aside=removed / target.name)
    for left in (removed, *(() if old is None else (old,))):
        shutil.rmtree(left, ignore_errors=True)


def _move_aside(folder: Folder, candidate: Prospect, done: _Fetched) -> None:
    refuse_links(folder.path, candidate.parent)
    aside = folder.new("aside")
    for name in [candidate.name] if candidate.is_directory else [candidate.path_of(file) for file in candidate.files]:
        folder.move_aside(name, aside)
    done.moved_aside.append(f"{candidate.name} → {aside}")


def _moved(beside: Beside, before: Path | None, now: Path) -> Beside:
    """Return a tracker that leads into another folder now, if it has a whole path."""
    if before is None or beside.text is None or not beside.text.startswith(f"{before}/"):
        return beside
    return Beside(text=str(now) + beside.text.removeprefix(str(before)))


def _point(folder: Folder, path: Path, beside: Beside) -> None:
    """Write a tracker, or make a link, at once."""
    partial = folder.new_near("restoring")
    if beside.link is not None:
        partial.symlink_to(beside.link)
    elif beside.copy is not None:
        shutil.copyfile(path.parent / beside.copy, partial)  # a trainer may write into one of them
    else:
        partial.write_bytes((beside.text or "").encode() if beside.data is None else b64decode(beside.data))
    partial.replace(path)
