"""A folder that a trainer writes its checkpoints to: looks at it, second names for what is saved, deletion."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ckptstore.errors import InvalidSource, SourceChanged
from ckptstore.format.digest import Digest, Hasher
from ckptstore.saving.directories import Directory
from ckptstore.tools.run.folders.candidate import MarkerReader, Prospect, Rules, Sight, fingerprint, text_of
from ckptstore.tools.run.folders.finished import Finisher
from ckptstore.tools.run.folders.found import Found, found_of
from ckptstore.tools.run.folders.job_seen import JobSeen
from ckptstore.tools.run.folders.open_files import open_files
from ckptstore.tools.run.folders.own_directory import is_on_one_disk, own_directory
from ckptstore.tools.run.folders.shapes import candidates_in, left_out, unlisted
from ckptstore.tools.run.folders.snapshot import RESTORING_NAME, Sign, take
from ckptstore.tools.run.folders.whole import json_in
from ckptstore.transfer.sources import FileSource, refuse_shortage

_FINISHED_NAME = "finished.json"
_SINCE_NAME = "since"
_RESTORED_NAME = "restored.json"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """The contents of a folder."""

    finished: tuple[Found, ...] = ()
    """Oldest first, by step and time; what was restored or saved before too."""
    unfinished: Mapping[str, str] = field(default_factory=dict)
    """Why each of the others is not finished, for people."""
    unknown: tuple[str, ...] = ()
    """Names of what holds weights and has no shape."""
    uncertain: tuple[Found, ...] = ()
    """Those of `unfinished` that lack nothing, stand still and are not open, but nothing on this node tells their end.

    They are finished where another node has finished the same name, and that one `tells_all`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why each of those that can never be stored cannot."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why each file that fits `Rules.beside` and cannot come along cannot."""
    settling: frozenset[str] = frozenset()
    """Names of those of `unfinished` that need nothing but time."""
    candidates: tuple[Prospect, ...] = ()
    """All of them, finished or not."""


class Folder:
    """One folder, looked at again and again."""

    def __init__(self, path: str | os.PathLike[str], rules: Rules | None = None) -> None:
        """Nothing is looked at yet, and nothing made. Raises InvalidSource for what is no directory."""
        self.path = Path(os.path.realpath(path))
        self.rules = rules or Rules()
        if self.path.exists() and not self.path.is_dir():
            raise InvalidSource(f"{path} is no directory", hint="Give the folder that the trainer writes to")
        self.own = own_directory(self.path)
        """Our own directory, beside the folder or below the user's state directory."""
        self.is_near = is_on_one_disk(self.own, self.path)
        """True if a name can move from the folder to our directory."""
        self._contents = MarkerReader(self.path)
        self._finisher = Finisher(self.rules.quiet_seconds, self._recorded())
        self._ranks: frozenset[int] | None = None
        self._unfinished: list[str] = []
        """The files of what the last look did not find finished."""
        self._recorded_finished: dict[str, str] | None = None

    def look(self, job: JobSeen, *, notes: bool = True) -> Look:
        """Look at the folder. What is finished must look the same in two looks: call it every few seconds.

        If the agent starts the job, the first look comes before that: what it finds was left by others. Who writes is
        asked before the directory is read, so that what is closed between the two has its last size; and of the files
        of the look before alone, since what was not there then is not finished yet. So a node with many processes is
        searched only while something may become finished. Without `notes` nothing is remembered for the next process.
        """
        if job.ranks:
            self._ranks = job.ranks
        ranks = None if job.ranks is None else self._ranks or frozenset()
        in_use = open_files(self.path, self._unfinished)
        snapshot = take(self.path, follows=self.rules.follows)
        sight = Sight(snapshot, self._contents, self.rules, ranks)
        candidates, unknown = candidates_in(sight)
        refused = {it.name: it.fault for it in candidates if it.fault} | unlisted(sight, candidates)
        verdicts = self._finisher.judge(
            [it for it in candidates if it.name not in refused],
            open_files=in_use.opened,
            unseen=in_use.unseen,
            job_lives=job.is_alive,
            ended_well=job.ended_well and not job.is_alive,
            began_after=job.is_started,
            is_one_process=ranks is not None and len(ranks) < 2,
            now_seconds=time.monotonic(),
        )
        finished = self._found(verdicts.finished)
        self._unfinished = [
            it.path_of(file) for it in candidates if it.name in verdicts.unfinished for file in it.files
        ]
        self._contents.forget(snapshot.files)
        if notes:
            self._record({it.name: it.fingerprint for it in finished})
        return Look(
            finished=finished,
            unfinished=verdicts.unfinished,
            unknown=unknown,
            uncertain=self._found(verdicts.uncertain),
            refused=refused,
            left_out=left_out(sight, candidates),
            settling=frozenset(verdicts.settling),
            candidates=tuple(candidates),
        )

    def _found(self, candidates: Iterable[Prospect]) -> tuple[Found, ...]:
        found = [found_of(it, self._contents, self.rules.metrics_file) for it in candidates]
        if all(it.is_exact for it in found):
            return tuple(sorted(found, key=lambda it: (it.step or 0, it.name)))
        return tuple(sorted(found, key=lambda it: (it.written_at_seconds, it.name)))

    def hold(self, found: Found, names: Collection[str] | None = None) -> Held:
        """Hold the files of a checkpoint, or some of them: the trainer may remove them during a save.

        Raises SourceChanged if it is no longer what was looked at, or has more files, InvalidSource for a file that
        cannot be read.
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
        if (self.path / found.name).is_symlink():
            return False
        own = found.name.rpartition("/")[2]
        wanted = dict(found.files) if found.is_directory else {own: found.files[own]}
        signs = self._signs(found)
        if any(it.link is not None for it in found.beside.values()) or {it: signs.get(it) for it in wanted} != wanted:
            return False
        if found.is_directory and signs != wanted:
            return False
        in_use = open_files(self.path, [found.path_of(file) for file in wanted], readers=True)
        if in_use.opened or in_use.unseen:
            return False
        if self.is_near:
            gone = self.new("removed")
            (self.path / found.name).rename(gone)
        else:
            gone = self.path / found.name
        shutil.rmtree(gone) if found.is_directory else gone.unlink()
        return True

    def sweep(self, *names: str) -> None:
        """Remove what a process that was killed has left, or what a restore has."""
        for name in names or ("held", "removed", "written", "restoring"):
            shutil.rmtree(self.own / name, ignore_errors=True)
        shutil.rmtree(self.path / RESTORING_NAME, ignore_errors=True)

    def new(self, what: str) -> Path:
        """Return a name in our own directory that nothing has."""
        return _new_in(self.own / what)

    def new_near(self, what: str) -> Path:
        """Return a name that nothing has, from which a rename leads into the folder. Of a restore alone: if the folder
        is a mount point it lies in the folder, until `sweep`."""
        return _new_in((self.own if self.is_near else self.path / RESTORING_NAME) / what)

    def move_aside(self, name: str, aside: Path) -> None:
        """Move a file or directory of the folder below our directory `aside`."""
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.path / name, aside / name)

    def _signs(self, found: Found) -> dict[str, Sign]:
        """Return the signs of the files of a checkpoint now."""
        above = found.name if found.is_directory else found.parent
        if found.is_directory:
            return take(self.path, follows=self.rules.follows, only=above).below(above)
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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return None

    def remember_restored(self, candidate: Prospect) -> None:
        """Note that a candidate was restored, so that it is finished, and known to be in the store."""
        self._write(_RESTORED_NAME, {**self.restored(), candidate.name: fingerprint(candidate)})
        self._finisher.learn(candidate)

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
        path = self.own / name
        if not path.exists():
            return None
        fields = json_in(text_of(path))
        return (
            {name: text for name, text in fields.items() if isinstance(text, str)} if isinstance(fields, dict) else {}
        )

    def _write(self, name: str, fields: Mapping[str, str]) -> None:
        partial = self.new("written")  # another node may write into a folder that both share
        partial.write_text(json.dumps(fields))
        partial.replace(self.own / name)


class Held:
    """The files of a checkpoint, kept from being deleted until the end of `with`.

    They get second names in our own directory. On another disk than the folder's, or without hard links, they are held
    open. No byte is copied.
    """

    def __init__(self, folder: Folder, found: Found, names: Collection[str]) -> None:
        self.folder = folder.path
        self._found = found
        self._stack = ExitStack()
        self._held: dict[str, tuple[Path, Sign]] = {}
        place = folder.new("held")
        self._stack.callback(shutil.rmtree, place, ignore_errors=True)
        with ExitStack() as failed:
            failed.callback(self.remove)
            place.mkdir()
            paths = {file: folder.path / found.path_of(file) for file in names}
            # All are looked at before the first gets a second name, and again after the last: two of them may be one.
            for file, path in paths.items():
                with self._tells(path, file):
                    now = _sign_of(path)
                    if now != found.files[file] or now.ctime_ns != found.files[file].ctime_ns:
                        raise _changed(found, file)
            for number, (file, path) in enumerate(paths.items()):
                with self._tells(path, file):
                    paths[file] = self._hold(path, place / str(number))
            for file, path in paths.items():
                self._held[file] = path, Sign.of(os.stat(path))
                if found.files[file].link is None and self._held[file][1] != found.files[file]:
                    raise _changed(found, file)
            failed.pop_all()

    @contextmanager
    def _tells(self, path: Path, file: str) -> Iterator[None]:
        """Raise SourceChanged for a file that is gone, and InvalidSource for one that cannot be read."""
        try:
            yield
        except FileNotFoundError as error:
            raise _changed(self._found, file) from error
        except OSError as error:
            refuse_shortage(error, path)
            raise InvalidSource(f"{path} cannot be read: {error.strerror}", step=self._found.step, file=file) from error

    def _hold(self, path: Path, second: Path) -> Path:
        """Hold one file. Return the path to read."""
        real = path.resolve()  # of a link, what it leads to
        try:
            os.link(real, second, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            _raise_limit()
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            self._stack.callback(os.close, descriptor)
            second = Path(f"/proc/self/fd/{descriptor}")
        return second

    @property
    def names(self) -> Collection[str]:
        """The files that are held."""
        return self._held

    def files(self) -> Directory:
        """Return the files as the source of a save."""
        return Directory({file: FileSource.of(path) for file, (path, _) in self._held.items()})

    def check(self, digests: Mapping[str, Digest | None]) -> None:
        """Raise SourceChanged if somebody wrote into a file since it was looked at. `digests` are those of what was
        stored: a file whose status alone has changed is read again, for its own name may just have been removed."""
        for file, (path, sign) in self._held.items():
            now = os.stat(path)
            if Sign.of(now) != sign:
                raise _changed(self._found, file)
            digest = digests.get(file)
            if now.st_ctime_ns != sign.ctime_ns and (digest is None or not has_digest(path, digest)):
                raise _changed(self._found, file)

    def remove(self) -> None:
        """Let go of the files."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _raise_limit() -> None:
    """Let this process open as many files as it may: a checkpoint can have thousands. A trainer, which has been started
    before, keeps its own limit."""
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def has_digest(path: Path, digest: Digest) -> bool:
    """Return True if a file has the bytes of a digest."""
    hasher = Hasher(digest.algorithm)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.digest() == digest


def candidates_of(folder: Folder, ranks: frozenset[int] | None = None) -> list[Prospect]:
    """Return the candidates of a folder by one look, when no job writes into it."""
    return candidates_in(
        Sight(take(folder.path, follows=folder.rules.follows), MarkerReader(folder.path), folder.rules, ranks)
    )[0]


def _new_in(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory / uuid.uuid4().hex[:12]


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
    return Sign.of(status, link)


def _changed(found: Found, file: str) -> SourceChanged:
    return SourceChanged(
        f"{found.name} changed after it had been finished: {file}", step=found.step, file=found.path_of(file)
    )
