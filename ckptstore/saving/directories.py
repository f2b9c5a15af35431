"""List a local directory before it is saved, and refuse what cannot be stored."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from ckptstore.errors import InvalidSource
from ckptstore.format.layout import check_name, check_user_name
from ckptstore.transfer.sources import FileSource, refuse_shortage


@dataclass(frozen=True, slots=True)
class Directory:
    """The contents of one rank's directory."""

    files: dict[str, FileSource] = field(default_factory=dict)
    """The files by name relative to the directory, with "/" between the parts."""
    empty: tuple[str, ...] = ()
    """The empty directories."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return sum(source.size_bytes for source in self.files.values())


def scan(directory: str | os.PathLike[str] | None) -> Directory:
    """List a directory and everything below it; None counts as an empty one.

    Links are followed where they lead to something inside the directory. Raises InvalidSource for a missing
    directory, a link that leads outside or in a circle, a socket, a pipe, a device or an unreadable file, InvalidName
    for a name that cannot be stored.
    """
    if directory is None:
        return Directory()
    root = os.path.realpath(directory)
    if not os.path.isdir(root):
        raise InvalidSource(f"There is no directory {os.fspath(directory)}", hint="Give None on ranks without files")
    files: dict[str, FileSource] = {}
    empty: list[str] = []
    _walk(Path(root), root, "", files, empty, {root})
    return Directory(files, tuple(sorted(empty)))


def _walk(root: Path, path: str, prefix: str, files: dict[str, FileSource], empty: list[str], above: Set[str]) -> None:
    """Collect files and empty directories. `path` has no links; `above` has it and every directory on the way to it."""
    entries = _entries(path)
    if not entries and prefix:
        empty.append(prefix[:-1])
    check = check_name if prefix else check_user_name  # the format reserves names at the top level only
    for entry in entries:
        name = check(prefix + entry.name)
        real, status = _status(root, entry)
        if stat.S_ISREG(status.st_mode):
            files[name] = FileSource.of(real, status)
        elif stat.S_ISDIR(status.st_mode):
            if real in above:
                raise InvalidSource(f"The link {entry.path} leads in a circle", file=entry.path)
            _walk(root, real, f"{name}/", files, empty, {*above, real})
        else:
            raise InvalidSource(f"{entry.path} is no regular file: a socket, a pipe or a device", file=entry.path)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=attrgetter("name"))
    except OSError as error:
        refuse_shortage(error, path)
        raise InvalidSource(f"{path} cannot be listed: {error.strerror}", file=path) from error


def _status(root: Path, entry: os.DirEntry[str]) -> tuple[str, os.stat_result]:
    """Return the real path of an entry, with its status."""
    try:
        if not entry.is_symlink():
            return entry.path, entry.stat(follow_symlinks=False)
        real = os.path.realpath(entry.path)
        if Path(real).is_relative_to(root):
            return real, os.stat(real)
    except OSError as error:
        raise InvalidSource(f"{entry.path} cannot be read: {error.strerror}", file=entry.path) from error
    raise InvalidSource(
        f"The link {entry.path} leads outside of the directory", file=entry.path, hint="Copy the file in"
    )


def sha256_of_files(directory: Directory, names: Collection[str]) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of the named files, as far as the directory has them."""
    found: dict[str, tuple[int, str]] = {}
    for name in names:
        source = directory.files.get(name)
        if source is not None:
            try:
                with open(source.path, "rb") as file:
                    found[name] = source.size_bytes, hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise source.not_opened(error) from error
    return found
