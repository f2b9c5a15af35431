"""File systems that are soon full, where the tests may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a size such as "3m" at a new directory, for as long as the context lasts."""
    place.mkdir(mode=0o700)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@contextmanager
def overlaid(lower: Path, place: Path) -> Iterator[Path]:
    """Mount a layer over a directory, as containers do with an image: its directories cannot be renamed (EXDEV)."""
    for name in ("upper", "work", "merged"):
        (place / name).mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work"
    done = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", place / "merged"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place / "merged"
    finally:
        subprocess.run(["umount", place / "merged"], check=True)
