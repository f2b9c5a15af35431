"""Directories with a few files."""

from __future__ import annotations

from pathlib import Path


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
