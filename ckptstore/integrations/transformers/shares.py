"""List the files of a checkpoint that a rank of a Trainer sees, and give its share of them second names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ckptstore.errors import InvalidSource
from ckptstore.saving.directories import scan


def seen_in(directory: Path) -> dict[str, tuple[int, int]]:
    """List the files of a directory, none if it is missing. Raises InvalidSource for files that cannot be stored."""
    if not directory.is_dir():
        return {}
    return {name: (source.identity[2], source.size_bytes) for name, source in scan(directory).files.items()}


def link(source: Path, names: set[str], path: Path) -> None:
    """Make a directory of further names for some files of another one; no byte is copied.

    Files removed from the other one stay in this one, so that Trainer may rotate its checkpoints during an upload.
    Raises InvalidSource if the disk has no hard links.
    """
    shutil.rmtree(path, ignore_errors=True)
    for name in names:
        target = path / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, target)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise InvalidSource(
                f"{source / name} cannot get a second name: {error.strerror}",
                file=name,
                hint="Set output_dir to a disk with hard links, or asynchronous=False with one process per node",
            ) from error
