"""Directories with a few files, stores that have such, and what happens to them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from ckptstore import Checkpoint, CheckpointStore, open_store
from ckptstore.events import Event, listening
from ckptstore.extensions.exchange.copying import CopyReport, copy_store
from ckptstore.extensions.exchange.salvage import salvage_store
from ckptstore.testing import Call
from ckptstore.transfer.opened import open_place


def make_tree(directory: Path, files: dict[str, bytes]) -> Path:
    """A directory with these files."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def read_tree(directory: Path) -> dict[str, bytes]:
    """All files below a directory but those of the format itself."""
    reserved = {"ckptstore.json", "user-metadata.json"}
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in reserved
    }


def moved_away(path: Path, elsewhere: Path) -> Path:
    """Move a directory to another place, and leave a link behind, as people do when a disk is full."""
    shutil.move(path, elsewhere)
    make_tree(elsewhere, {"ours/unrelated": b"1"})
    path.symlink_to(elsewhere, target_is_directory=True)
    return elsewhere


def everything(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


def flip(path: Path, place: int | None = None) -> None:
    """Change one bit of a file that is read-only, in its middle or at a place."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.unlink()
    path.write_bytes(data)


def save_tree(store: CheckpointStore, tmp_path: Path, step: int, data: bytes = b"x") -> Checkpoint:
    """Save two files."""
    return store.save_directory(step, make_tree(tmp_path / uuid4().hex, {"f": data, "deep/g": data}))


def copied(source: CheckpointStore | Path, target: Path) -> CopyReport:
    """Copy a store."""
    if isinstance(source, Path):
        with open_store(source) as store:
            return copied(store, target)
    with closing(open_place(target)) as place:
        return copy_store(source, place)


def salvaged(source: Path, target: Path) -> CopyReport:
    """Bring what is whole of a damaged store to a new one."""
    with closing(open_place(source)) as damaged, closing(open_place(target)) as place:
        return salvage_store(damaged, place)


@contextmanager
def heard(*kinds: type[Event]) -> Iterator[list[Any]]:
    """The events of these classes, of all without any."""
    events: list[Any] = []
    with listening(events.append, *kinds):
        yield events


def settle(store: CheckpointStore) -> None:
    """Wait for the prune that a save began."""
    if store._job._pruning is not None:
        store._job._pruning.join()


def steps(store: CheckpointStore) -> list[int]:
    """Of what is live."""
    return [checkpoint.step for checkpoint in store]


def directories(root: Path) -> list[str]:
    """Of attempts, whether they were committed or not."""
    return sorted(path.name for path in (root / "checkpoints").iterdir())


class Gate:
    """A hook at which writes below the checkpoints wait until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, call: Call) -> None:
        is_write = call.verb.startswith(("write", "open_parts"))
        if is_write and call.phase == "before" and call.key.startswith("checkpoints/step"):
            self.reached.set()
            assert self.opened.wait(60)


class Once:
    """A hook that does something at the first call of a verb for a key with a text in it."""

    def __init__(self, verb: str, key: str, action: Callable[[], object], *, phase: str = "before") -> None:
        self.verb, self.key, self.phase = verb, key, phase
        self.action: Callable[[], object] | None = action

    def __call__(self, call: Call) -> None:
        is_it = call.verb == self.verb and self.key in call.key and call.phase == self.phase
        if is_it and self.action is not None:
            action, self.action = self.action, None
            action()
