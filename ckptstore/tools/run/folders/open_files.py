"""Find out which files somebody writes to: every process counts that /proc shows, whoever has started it.

A file is known by its device and inode. Its path is another one in another container, behind a link to its directory or
under a second name.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.transfer.sources import refuse_shortage

PROC = Path("/proc")
_FLAGS = re.compile(rb"^flags:\s+([0-7]+)", re.MULTILINE)
_INODE = re.compile(rb"^ino:\s+(\d+)", re.MULTILINE)
_MAPPED = re.compile(rb"^\S+ .(.).(.) \S+ (\w+):(\w+) ([1-9]\d*) +(/.*)$", re.MULTILINE)
"""A line of `maps` with a file: whether it is writable, whether it is shared, its device and inode, its path."""


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The answer of `open_files`."""

    opened: frozenset[str] = frozenset()
    """Names of those that a process has open, or mapped, for writing."""
    unseen: frozenset[str] = frozenset()
    """Names of those of which nobody can tell here: no /proc, or they belong to a user whose processes it hides."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The files that are asked for."""

    names: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """By device and inode: two names may be one file."""
    paths: dict[bytes, str] = field(default_factory=dict)
    """Some file systems say another inode in /proc."""
    inodes: set[int] = field(default_factory=set)
    of_others: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path, names: Iterable[str]) -> _Wanted:
        """Look at the files themselves, links followed. What is gone is not asked for."""
        wanted, user = cls(), os.geteuid()
        for name in names:
            path = f"{folder}/{name}"
            try:
                status = os.stat(path)
            except OSError as error:
                refuse_shortage(error, path)
                continue
            wanted.names.setdefault((status.st_dev, status.st_ino), set()).add(name)
            wanted.paths[os.fsencode(path)] = name
            wanted.inodes.add(status.st_ino)
            if status.st_uid != user:
                wanted.of_others.add(name)
        return wanted


def open_files(folder: Path, names: Iterable[str], *, readers: bool = False) -> OpenFiles:
    """Return which of these files, relative to a folder, are open or mapped for writing; with `readers` also for
    reading.

    Nothing is opened that may not answer: a process can have files of a network disk that is away.
    """
    wanted = _Wanted.of(folder, names)
    if not wanted.names:
        return OpenFiles()
    if not PROC.is_dir():
        return OpenFiles(unseen=frozenset(wanted.paths.values()))
    opened: set[str] = set()
    is_root, is_denied = os.geteuid() == 0, False
    for pid in pids():
        try:
            for name in (*_descriptors(pid, wanted, readers), *_mappings(pid, wanted, readers)):
                opened |= name
        except PermissionError:
            is_denied = True
        except OSError as error:  # it has ended
            refuse_shortage(error, PROC)
    return OpenFiles(frozenset(opened), frozenset(() if is_root and not is_denied else wanted.of_others - opened))


def pids() -> list[int]:
    """Return the ids of all processes that /proc shows."""
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdecimal()]
    except OSError as error:  # there is no /proc
        refuse_shortage(error, PROC)
        return []


def _descriptors(pid: int, wanted: _Wanted, readers: bool) -> Iterator[set[str]]:
    """Yield the names that a process has open."""
    directory = os.fsencode(PROC / str(pid))
    with os.scandir(directory + b"/fd") as entries:
        for entry in entries:
            try:
                may_write = entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR  # the link has the modes of open()
                path = os.readlink(entry.path) if may_write or readers else b""
                if not path.startswith(b"/"):
                    continue
                with open(directory + b"/fdinfo/" + entry.name, "rb") as file:
                    info = file.read()
                flags, inode = _FLAGS.search(info), _INODE.search(info)
                if not readers and flags and int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY:
                    continue
                if path in wanted.paths:
                    yield {wanted.paths[path]}
                if inode is None or int(inode[1]) in wanted.inodes:
                    status = os.stat(entry.path)
                    yield wanted.names.get((status.st_dev, status.st_ino), set())
            except PermissionError:
                raise
            except OSError as error:  # closed meanwhile
                refuse_shortage(error, PROC)


def _mappings(pid: int, wanted: _Wanted, readers: bool) -> Iterator[set[str]]:
    """Yield the names that a process has mapped: it may have closed them."""
    for writes, shared, major, minor, inode, path in _MAPPED.findall((PROC / str(pid) / "maps").read_bytes()):
        if readers or (writes == b"w" and shared == b"s"):
            if path in wanted.paths:
                yield {wanted.paths[path]}
            if int(inode) in wanted.inodes:
                yield wanted.names.get((os.makedev(int(major, 16), int(minor, 16)), int(inode)), set())
