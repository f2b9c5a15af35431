"""Put a complete directory in the place of another one, so that a crash leaves the old one or the new one, whole.

Where the file system can exchange two names (`renameat2`), it is one step. Elsewhere the old directory is moved away
first, item by item where it cannot be moved as a whole: a layer of an overlay (EXDEV) holds it for others too. If that
process is killed, `finish_replacement` brings the old one back, or finds that the new one is in place.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from ckptstore.storage.disk import posix


def replace_directory(made: Path, target: Path, *, aside: Path) -> Path | None:
    """Move the directory `made` to `target`. Return the path where the directory before lies now, None if none did.

    All three are in one directory, or in directories of one file system. `aside` is free, and known to the next run,
    which calls `finish_replacement`. Raises OSError; the directory before is then where it was.
    """
    posix.flush_directory(str(made))
    if not target.exists() or not any(target.iterdir()):
        os.rename(made, target)
        old = None
    else:
        old = _exchange(made, target, aside)
    for parent in {made.parent, target.parent}:
        posix.flush_directory(str(parent))
    return old


def finish_replacement(made: Path, target: Path, *, aside: Path) -> bool:
    """After `replace_directory` was killed: bring the directory before back, unless the new one is in place.

    Return True if `target` was changed. What lies at `made` and `aside` afterwards is of no use.
    """
    if not made.is_dir() or not aside.is_dir():
        return False
    _move(aside, target)
    return True


def _exchange(made: Path, target: Path, aside: Path) -> Path:
    try:
        posix.exchange(made, target)
    except OSError as error:
        if error.errno not in posix.REFUSED:
            raise
    else:
        return made
    try:
        _move(target, aside)
        os.rename(made, target)
    except BaseException:
        if aside.is_dir():
            _move(aside, target)
        raise
    return aside


def _move(source: Path, target: Path) -> None:
    """Move a directory, or what is left of it, to where a part of it may be already."""
    if not target.exists():
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return
    target.mkdir(exist_ok=True)
    for item in sorted(source.iterdir()):
        if item.is_dir() and not item.is_symlink():
            _move(item, target / item.name)
        else:
            os.replace(item, target / item.name)
    shutil.copystat(source, target)
    source.rmdir()
