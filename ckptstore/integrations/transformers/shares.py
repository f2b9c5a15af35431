"""What a rank of a Trainer sees of a checkpoint, and second names for its share of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ckptstore.errors import InvalidSource
from ckptstore.saving.directories import scan


def seen_in(directory: Path) -> dict[str, tuple[int, int]]:
    """The files of a directory, none where it is missing. Raises InvalidSource for what cannot be stored."""
    if not directory.is_dir():
        return {}
    return {name: (source.identity[2], source.size_bytes) for name, source in scan(directory).files.items()}


class Links:
    """A directory of further names for some files of another one; no byte is copied.

    What is removed there stays here until `remove`, so that Trainer may rotate its checkpoints during an upload.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, source: Path, names: set[str]) -> None:
        """Raises InvalidSource where the disk has no hard links."""
        self.remove()
        for name in names:
            target = self.path / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source / name, target)
            except OSError as error:
                self.remove()
                raise InvalidSource(
                    f"{source / name} cannot get a second name: {error.strerror}",
                    file=name,
                    hint="Set output_dir to a disk with hard links, or asynchronous=False with one process per node",
                ) from error

    def remove(self) -> None:
        """Remove the names, if there are any."""
        shutil.rmtree(self.path, ignore_errors=True)
