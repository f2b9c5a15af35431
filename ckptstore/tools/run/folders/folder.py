"""A folder that a trainer writes its checkpoints to: looks at it, second names for what is saved, deletion."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptstore.errors import InvalidName, InvalidSource, SourceChanged
from ckptstore.format.layout import check_user_name
from ckptstore.tools.run.folders.candidate import MarkerReader, Prospect, Rules, Sight, fingerprint
from ckptstore.tools.run.folders.finished import Finisher
from ckptstore.tools.run.folders.found import Found, found_of
from ckptstore.tools.run.folders.job_seen import JobSeen, open_at_all, open_for_writing
from ckptstore.tools.run.folders.known_shapes import Shape, lightning, of_no_shape, patterns, transformers
from ckptstore.tools.run.folders.sharded import dcp, deepspeed, tracked
from ckptstore.tools.run.folders.snapshot import OWN_NAME, Sign, take

SHAPES: tuple[Shape, ...] = (patterns, transformers, lightning, deepspeed, tracked, dcp)
"""In the order of their turns: what one claims is not offered to the next."""
_FINISHED_NAME = "finished.json"
_SINCE_NAME = "since"
_RESTORED_NAME = "restored.json"


@dataclass(frozen=True, slots=True)
class FolderLook:
    """The contents of a folder."""

    finished: tuple[Found, ...]
    """Oldest first, by step; what was restored or saved before too."""
    unfinished: Mapping[str, str]
    """Why each of the others is not finished, for people."""
    unknown: tuple[str, ...]
    """Names that look like a checkpoint and have no shape."""
    uncertain: tuple[Found, ...] = ()
    """Those of `unfinished` that lack nothing, stand still and are not open, but nothing on this node tells their end.

    They are finished where another node has finished the same name, and that one `tells_all`."""


class Folder:
    """One folder, looked at again and again."""

    def __init__(self, path: str | os.PathLike[str], rules: Rules | None = None) -> None:
        """Nothing is looked at yet, and nothing made. Raises InvalidSource for what is no directory."""
        self.path = Path(os.path.realpath(path))
        self.rules = rules or Rules()
        if self.path.exists() and not self.path.is_dir():
            raise InvalidSource(f"{path} is no directory", hint="Give the folder that the trainer writes to")
        self.own = self.path / OWN_NAME
        self._contents = MarkerReader(self.path)
        self._finisher = Finisher(self.rules.quiet_seconds, self._recorded())
        self._ranks: frozenset[int] | None = None
        self._recorded_finished: dict[str, str] | None = None

    def look(self, job: JobSeen) -> FolderLook:
        """Look at the folder. What is finished must look the same in two looks: call it every few seconds.

        If the processes of the job are known, the first look comes before the job begins: what it finds was left by
        others. Open files are read before the directory, so that what is closed between the two has its last size.
        """
        if job.ranks:
            self._ranks = job.ranks
        ranks = None if job.ranks is None else self._ranks or frozenset()
        open_files = open_for_writing(self.path, job.pids)
        snapshot = take(self.path)
        candidates, unknown = candidates_in(Sight(snapshot, self._contents, self.rules, ranks))
        told = self._finisher.judge(
            candidates,
            open_files=open_files,
            job_lives=job.is_alive,
            ended_well=job.ended_well and not job.is_alive,
            began_after=job.pids is not None,
            now_seconds=time.monotonic(),
        )
        for it in (*told.finished, *told.uncertain):
            if not _is_storable(it.name):
                told.unfinished[it.name] = "its name cannot be stored"
        found = self._found(told.finished)
        self._contents.forget(snapshot.files)
        self._record({it.name: it.fingerprint for it in found})
        return FolderLook(found, told.unfinished, unknown, self._found(told.uncertain))

    def _found(self, candidates: Iterable[Prospect]) -> tuple[Found, ...]:
        found = [found_of(it, self._contents, self.rules.metrics_file) for it in candidates if _is_storable(it.name)]
        return tuple(sorted(found, key=lambda it: (it.step, it.name)))

    def hold(self, found: Found, names: Collection[str] | None = None) -> Held:
        """Give the files of a checkpoint, or some of them, second names: the trainer may remove its own during a save.

        Raises SourceChanged if it is no longer what was looked at, or has more files, InvalidSource on a disk without
        hard links.
        """
        if found.is_directory and (others := self._signs(found).items() ^ found.files.items()):
            raise _changed(found, min(file for file, _ in others))
        return Held(self, found, found.files if names is None else names)

    def delete(self, found: Found) -> bool:
        """Remove a checkpoint; False, and nothing is done, if it is not what was looked at any more, if a process has a
        file of it open, or if a link leads to it.

        It is renamed first: nobody meets half of it. Raises InvalidSource where a directory above it is a link.
        """
        refuse_links(self.path, found.parent)
        own = found.name.rpartition("/")[2]
        wanted = dict(found.files) if found.is_directory else {own: found.files[own]}
        signs = self._signs(found)
        if any(it.link is not None for it in found.beside.values()) or {it: signs.get(it) for it in wanted} != wanted:
            return False
        if found.is_directory and signs != wanted:
            return False
        if open_at_all(self.path) & {found.path_of(file) for file in wanted}:
            return False
        aside = self.new("removed")
        aside.mkdir()
        (self.path / found.name).rename(aside / own)
        shutil.rmtree(aside)
        return True

    def sweep(self) -> None:
        """Remove what a process that was killed left in our directory of the folder."""
        for name in ("held", "removed", "restoring", "written"):
            shutil.rmtree(self.own / name, ignore_errors=True)

    def new(self, what: str) -> Path:
        """Return a name in our directory of the folder that nothing has."""
        directory = self.own / what
        directory.mkdir(parents=True, exist_ok=True)
        return directory / uuid.uuid4().hex[:12]

    def _signs(self, found: Found) -> dict[str, Sign]:
        """Return the signs of the files of a checkpoint now."""
        above = found.name if found.is_directory else found.parent
        if found.is_directory:
            return take(self.path / above).below("")
        return {file: sign for file in found.files if (sign := _sign_of(self.path / found.path_of(file))) is not None}

    def restored(self) -> dict[str, str]:
        """Return the fingerprints of what was restored into it, by name."""
        return self._read(_RESTORED_NAME) or {}

    def first_worked_ns(self) -> int | None:
        """Return the time of the first work of an agent in the folder, by the clock of the disk; None if that is now,
        and note it."""
        path = self.own / _SINCE_NAME
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            path.touch()
            return None

    def remember_restored(self, candidate: Prospect) -> None:
        """Note that a candidate was restored, so that it is finished, and known to be in the store."""
        self._write(_RESTORED_NAME, {**self.restored(), candidate.name: fingerprint(candidate)})

    def is_whole(self, candidate: Prospect) -> bool:
        """Return True if a candidate was finished when its job ended, for a folder that no job writes to."""
        known = self._recorded()
        if known is not None and known.get(candidate.name) == fingerprint(candidate):
            return True
        return candidate.lacks is None and (candidate.is_certain or known is None)

    def _recorded(self) -> dict[str, str] | None:
        """Return what was finished before this process began; None when nobody has looked at this folder yet."""
        finished, restored = self._read(_FINISHED_NAME), self._read(_RESTORED_NAME)
        return None if finished is None and restored is None else {**(finished or {}), **(restored or {})}

    def _record(self, finished: dict[str, str]) -> None:
        if finished != self._recorded_finished and self.path.is_dir():
            self._write(_FINISHED_NAME, finished)
            self._recorded_finished = finished

    def _read(self, name: str) -> dict[str, str] | None:
        """Read a file of ours; nothing where it is torn, None where there is none."""
        try:
            told = json.loads((self.own / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return {name: text for name, text in told.items() if isinstance(text, str)} if isinstance(told, dict) else {}

    def _write(self, name: str, told: Mapping[str, str]) -> None:
        partial = self.new("written")  # another node may write into a folder that both share
        partial.write_text(json.dumps(told))
        partial.replace(self.own / name)


class Held:
    """Second names for the files of a checkpoint, below our directory of the folder, until the end of `with`.

    `path` is a directory with these files alone. No byte is copied.
    """

    def __init__(self, folder: Folder, found: Found, names: Collection[str]) -> None:
        self._found = found
        self._signs = {file: found.files[file] for file in names}
        self.path = folder.new("held")
        try:
            self.path.mkdir()
            for file, sign in self._signs.items():
                target = self.path / file
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(folder.path / found.path_of(file), target, follow_symlinks=False)
                if _sign_of(target) != sign:
                    raise _changed(found, file)
        except FileNotFoundError as error:
            self.remove()
            raise _changed(found, str(error.filename)) from error
        except OSError as error:
            self.remove()
            if isinstance(error, SourceChanged):
                raise
            raise InvalidSource(
                f"{error.filename} cannot get a second name: {error.strerror}",
                step=found.step,
                hint="Put the folder on a disk with hard links",
            ) from error
        except SourceChanged:
            self.remove()
            raise

    @property
    def names(self) -> Collection[str]:
        """The files that it has names for."""
        return self._signs

    def check(self) -> None:
        """Raise SourceChanged if somebody wrote into a file since it was looked at."""
        for file, sign in self._signs.items():
            if _sign_of(self.path / file) != sign:
                raise _changed(self._found, file)

    def remove(self) -> None:
        """Remove the names."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def candidates_in(sight: Sight) -> tuple[list[Prospect], tuple[str, ...]]:
    """Return all candidates that are in sight, and what looks like a checkpoint and has no shape."""
    claimed: frozenset[str] = frozenset()
    found: list[Prospect] = []
    for shape in SHAPES:
        new = list(shape(sight, claimed))
        found += new
        claimed |= {it.name for it in new}
        claimed |= {it.path_of(file) for it in new if not it.is_directory for file in it.files}
    return found, of_no_shape(sight, claimed)


def candidates_of(folder: Folder, ranks: frozenset[int] | None = None) -> list[Prospect]:
    """Return the candidates of a folder by one look, when no job writes into it."""
    return candidates_in(Sight(take(folder.path), MarkerReader(folder.path), folder.rules, ranks))[0]


def _is_storable(name: str) -> bool:
    try:
        check_user_name(name)
    except InvalidName:
        return False
    return True


def refuse_links(folder: Path, name: str) -> None:
    """Raise InvalidSource if a directory on the way to a name is a symbolic link: what lies behind it is not ours."""
    path = folder
    for part in filter(None, name.split("/")):
        path /= part
        if path.is_symlink():
            raise InvalidSource(f"{path} is a link, and nothing is written or removed behind one", file=str(path))


def _sign_of(path: Path) -> Sign | None:
    try:
        status = path.lstat()
        link = os.readlink(path) if path.is_symlink() else None
    except FileNotFoundError:
        return None
    return Sign(status.st_size, status.st_mtime_ns, status.st_ino, link)


def _changed(found: Found, file: str) -> SourceChanged:
    return SourceChanged(
        f"{found.name} changed after it had been finished: {file}", step=found.step, file=found.path_of(file)
    )
