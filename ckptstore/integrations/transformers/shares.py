"""Which rank stores which file of a checkpoint that the ranks of a Trainer wrote together.

Trainer's names are made for one shared directory: a name stands for one file, whichever ranks see it. So every file is
stored once, by a rank that sees it: on one node or a shared disk the ranks divide the files, on disks of their own each
node brings what it has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptstore.errors import InvalidSource
from ckptstore.saving.directories import scan

Seen = Mapping[str, tuple[int, int]]
"""The files that a rank sees, by name: time of the last change in nanoseconds, and size in bytes."""


def seen_in(directory: Path) -> dict[str, tuple[int, int]]:
    """The files of a directory, none where it is missing. Raises InvalidSource for what cannot be stored."""
    if not directory.is_dir():
        return {}
    return {name: (source.identity[2], source.size_bytes) for name, source in scan(directory).files.items()}


def divide(seen: Sequence[Seen]) -> list[set[str]]:
    """The names for each rank. A file goes to the rank that has least so far among those that see its newest version.

    All ranks that know what all see come to the same result.
    """
    newest: dict[str, tuple[int, int]] = {}
    for files in seen:
        for name, version in files.items():
            newest[name] = max(version, newest.get(name, version))
    shares: list[set[str]] = [set() for _ in seen]
    loads = [0] * len(seen)
    for name, version in sorted(newest.items(), key=lambda item: (-item[1][1], item[0])):
        rank = min(
            (rank for rank, files in enumerate(seen) if files.get(name) == version), key=lambda rank: loads[rank]
        )
        shares[rank].add(name)
        loads[rank] += version[1]
    return shares


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
