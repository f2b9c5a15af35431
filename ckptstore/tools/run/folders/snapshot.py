"""Take a snapshot of a folder: names, sizes and times, no contents."""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ckptstore.errors import InvalidSource
from ckptstore.format.layout import LOG_PREFIX, STORE_KEY
from ckptstore.transfer.sources import refuse_shortage

RESTORING_NAME = ".ckptstore"
"""The directory of ours in a folder that is a mount point, while a restore works and no trainer does. No look lists it.
"""
_OF_A_STORE = {STORE_KEY, LOG_PREFIX.rstrip("/")}
"""Names that the directory of a store has."""

LEADS_OUT = "is a link that leads out of the folder"
LEADS_TO_DIRECTORY = "is a link to a directory of the folder"
"""A fault of a link in a checkpoint; one beside it is another name of something."""
_UNLISTED = "is a directory that cannot be listed"

_SET_NS = 2 * 10**9
"""A difference between the times of a file from which on a program has set that of its last write."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The marks of one version of a file."""

    size_bytes: int
    mtime_ns: int
    inode: int
    link: str | None = None
    """The target of a symbolic link, as it is written in it; None for a file."""
    ctime_ns: int = field(default=0, compare=False)
    """The time of the last change of its contents or its names. It is not compared: a second name changes it too."""
    fault: str = field(default="", compare=False)
    """The reason why it can never be stored, "" if it can."""

    @property
    def is_original(self) -> bool:
        """True if its time is that of its last write, and no program has set it."""
        return self.link is None and abs(self.ctime_ns - self.mtime_ns) < _SET_NS

    @property
    def is_second_name(self) -> bool:
        """True for a link to something else in the folder."""
        return self.link is not None and self.fault in ("", LEADS_TO_DIRECTORY)

    @property
    def is_unlisted(self) -> bool:
        """True for a directory that cannot be listed."""
        return self.fault.startswith(_UNLISTED)

    @staticmethod
    def of(status: os.stat_result, link: str | None = None, *, fault: str = "") -> Sign:
        """Return the sign of a file with this status."""
        return Sign(status.st_size, status.st_mtime_ns, status.st_ino, link, status.st_ctime_ns, fault)


@dataclass(frozen=True)
class FolderSnapshot:
    """The files and directories below a folder, by names relative to it with "/" between the parts."""

    files: Mapping[str, Sign]
    directories: frozenset[str] = field(default=frozenset())

    @cached_property
    def _sorted(self) -> Sequence[str]:
        return sorted(self.files)

    @cached_property
    def _by_parent(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for name in self.files:
            found.setdefault(name.rpartition("/")[0], []).append(name)
        return found

    def below(self, directory: str) -> dict[str, Sign]:
        """Return the files of one directory and all below it, by names relative to it."""
        prefix = f"{directory}/" if directory else ""
        first = bisect_left(self._sorted, prefix)
        last = bisect_left(self._sorted, f"{directory}0", first) if directory else len(self.files)  # "0" follows on "/"
        return {name[len(prefix) :]: self.files[name] for name in self._sorted[first:last]}

    def beside(self, name: str) -> dict[str, Sign]:
        """Return the files of the directory in which something lies, by their last parts."""
        names = self._by_parent.get(name.rpartition("/")[0], ())
        return {other.rpartition("/")[2]: self.files[other] for other in names}


def take(folder: Path, *, follows: bool = True, only: str = "") -> FolderSnapshot:
    """Look at everything below a folder, or below one directory of it; an empty snapshot where there is none.

    With `follows` a link to a directory outside of the folder counts as that directory. All other links are seen, and
    not followed. A store in the folder is passed over. What disappears meanwhile is left out; a directory that cannot
    be listed counts as a file with a fault. No file is opened. Raises InvalidSource for a folder that cannot be listed.
    """
    files: dict[str, Sign] = {}
    directories: set[str] = set()
    try:
        with os.scandir(folder):
            pass
    except FileNotFoundError:
        return FolderSnapshot({})
    except OSError as error:
        refuse_shortage(error, folder)
        raise InvalidSource(f"The folder {folder} cannot be listed: {error.strerror}", file=str(folder)) from error
    root = os.path.realpath(folder)
    pending = [(f"{only}/", _outermost(folder, only, root))] if only else [("", root)]
    while pending:
        prefix, above = pending.pop()
        try:
            with os.scandir(folder / prefix) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):  # removed between the look at its parent and this one
            continue
        except OSError as error:
            refuse_shortage(error, folder / prefix)
            directories.discard(prefix[:-1])
            files[prefix[:-1]] = Sign(0, 0, 0, fault=f"{_UNLISTED}: {error.strerror}")
            continue
        if prefix and {entry.name for entry in entries} >= _OF_A_STORE:
            continue  # it has checkpoints of its own, and they are no trainer's
        for entry in entries:
            name = prefix + entry.name
            if name == RESTORING_NAME:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                link = os.readlink(entry.path) if stat.S_ISLNK(status.st_mode) else None
                real = os.path.realpath(entry.path) if link is not None else ""
                is_outside = os.path.isdir(real) and os.path.commonpath([real, root]) not in (real, root)
                is_followed = follows and link is not None and above == root and is_outside
            except FileNotFoundError:  # the next look sees what is there
                continue
            except OSError as error:
                files[name] = Sign(0, 0, 0, fault=f"cannot be looked at: {error.strerror}")
                continue
            if stat.S_ISDIR(status.st_mode) or is_followed:
                directories.add(name)
                pending.append((f"{name}/", real if is_followed else above))
            else:
                files[name] = Sign.of(status, link, fault=_fault(entry.path, status, real, above))
    return FolderSnapshot(files, frozenset(directories))


def _fault(path: str, status: os.stat_result, real: str, above: str) -> str:
    """Return the reason why a file cannot be stored, "" if it can. `above` is what its links may lead to."""
    if stat.S_ISLNK(status.st_mode):
        if os.path.commonpath([real, above]) != above:
            return LEADS_OUT
        if os.path.isdir(real):
            return LEADS_TO_DIRECTORY
        return "" if os.path.isfile(real) else "is a link to nothing"
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file: a pipe, a socket or a device"
    return "" if os.access(path, os.R_OK) else "cannot be read by this user"


def _outermost(folder: Path, name: str, root: str) -> str:
    """Return what the links below a directory may lead to: the folder, or the directory outside that a link on the way
    to it leads to."""
    for path in reversed([folder / name, *(folder / name).parents]):
        real = os.path.realpath(path)
        if path.is_relative_to(folder) and os.path.commonpath([real, root]) != root:
            return real
    return root
