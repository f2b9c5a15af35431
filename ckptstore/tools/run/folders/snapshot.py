"""Take a snapshot of a folder: names, sizes and times, no contents."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.errors import InvalidSource

OWN_NAME = ".ckptstore"
"""The directory of ours in a folder. No framework looks at it, and no look lists it."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The marks of one version of a file."""

    size_bytes: int
    mtime_ns: int
    inode: int
    link: str | None = None
    """The target of a symbolic link, as it is written in it; None for a file."""


@dataclass(frozen=True, slots=True)
class FolderSnapshot:
    """The files and directories below a folder, by names relative to it with "/" between the parts."""

    files: Mapping[str, Sign]
    directories: frozenset[str] = field(default=frozenset())

    def below(self, directory: str) -> dict[str, Sign]:
        """Return the files of one directory and all below it, by names relative to it."""
        prefix = f"{directory}/" if directory else ""
        return {name[len(prefix) :]: sign for name, sign in self.files.items() if name.startswith(prefix)}


def take(folder: Path) -> FolderSnapshot:
    """Look at everything below a folder; an empty snapshot where there is none. Links are seen, and not followed.

    What disappears meanwhile is left out. Raises InvalidSource for a folder that cannot be listed.
    """
    files: dict[str, Sign] = {}
    directories: set[str] = set()
    try:
        with os.scandir(folder):
            pass
    except FileNotFoundError:
        return FolderSnapshot({})
    except OSError as error:
        raise InvalidSource(f"The folder {folder} cannot be listed: {error.strerror}", file=str(folder)) from error
    pending = [""]
    while pending:
        prefix = pending.pop()
        for entry in _entries(folder / prefix):
            name = prefix + entry.name
            if name == OWN_NAME:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                link = os.readlink(entry.path) if stat.S_ISLNK(status.st_mode) else None
            except OSError:  # it has gone, or is another thing by now: the next look sees it
                continue
            if stat.S_ISDIR(status.st_mode):
                directories.add(name)
                pending.append(f"{name}/")
            else:
                files[name] = Sign(status.st_size, status.st_mtime_ns, status.st_ino, link)
    return FolderSnapshot(files, frozenset(directories))


def _entries(path: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:  # removed between the look at its parent and this one
        return []
