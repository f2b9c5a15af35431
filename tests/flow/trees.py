"""Directories with a few files, and stores that have such."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from ckptstore import Checkpoint, CheckpointStore
from ckptstore.testing import Call


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


def flip(path: Path) -> None:
    """Change one bit of a file that is read-only."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def save_tree(store: CheckpointStore, tmp_path: Path, step: int, data: bytes = b"x") -> Checkpoint:
    """Save two files."""
    return store.save_directory(step, make_tree(tmp_path / uuid4().hex, {"f": data, "deep/g": data}))


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
