"""A directory that belongs to one user alone, on a disk that others use too."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(path: Path) -> str:
    """Create the directory and its parents if absent. Return the reason why it is not safe to use, "" if it is.

    It is safe if it is a directory and no link, belongs to this user, and lets nobody else in. So nobody else can have
    put anything into it. Raises OSError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        """An existing one is checked below."""
    return privacy_fault(path)


def privacy_fault(path: Path) -> str:
    """Return the reason why a directory is not safe to use, "" if it is; see `make_private`. Raises OSError."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory, or a symbolic link"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):o} and lets other users in"
    return ""
