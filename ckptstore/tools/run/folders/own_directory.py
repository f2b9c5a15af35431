"""Find our own directory of a folder. It lies beside the folder: a trainer lists its folder, and trips over what is not
its own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def own_directory(folder: Path) -> Path:
    """Return `.ckptstore-NAME` beside the folder, or a directory below the user's state directory if the folder is a
    mount point or nothing may be made beside it. Nothing is made yet."""
    above = folder.parent
    if not folder.name or not is_on_one_disk(folder, above) or (above.exists() and not os.access(above, os.W_OK)):
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
        return state / "ckptstore" / "folders" / f"{folder.name or 'root'}-{digest}"
    return above / f".ckptstore-{folder.name}"


def is_on_one_disk(one: Path, other: Path) -> bool:
    """Return True if two directories are on one file system, so that a name can move from one to the other. One that
    does not exist yet will be where the nearest one above it is."""
    return _device_of(one) == _device_of(other)


def _device_of(path: Path) -> int:
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except FileNotFoundError:
            continue
    return 0
