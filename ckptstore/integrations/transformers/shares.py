"""List the files of a checkpoint that a rank of a Trainer sees, and give its share of them second names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidSource
from ckptstore.saving.directories import scan

_STATE_NAME = "trainer_state.json"


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


def is_written_as(directory: Path, checkpoint: Checkpoint) -> bool:
    """Return True if a directory has the files of a checkpoint, by names and sizes, and Trainer's state in it: one of
    another run, or one that was being written, has not."""
    files = files_behind(checkpoint)
    receipts = {receipt.name: receipt for receipt in files.read_manifest()[0].files}
    if {name: size for name, (_, size) in seen_in(directory).items()} != {
        name: receipt.size_bytes for name, receipt in receipts.items()
    }:
        return False
    state = receipts.get(_STATE_NAME)
    return state is None or files.read_file(state) == (directory / _STATE_NAME).read_bytes()


def newest_written(directory: Path, *, after_seconds: float = 0.0) -> int:
    """Return the highest step of Trainer's whole checkpoints that were written after a time; -1 if there is none."""
    found = [-1]
    for path in directory.glob("checkpoint-*"):
        state, step = path / _STATE_NAME, path.name.partition("-")[2]
        if step.isdecimal() and state.is_file() and not (path / "checkpoint-is-incomplete.txt").exists():
            found += [int(step)] if state.stat().st_mtime >= after_seconds else []
    return max(found)
