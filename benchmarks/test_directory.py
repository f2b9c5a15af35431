"""`save_directory` from disk to disk, against `cp -r` and Ray Train's way of persisting, all durable at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from versus import FULL, versus

from ckptstore import CheckpointStore, open_store

LARGE_BYTES = (1 << 30) if FULL else (8 << 20)
NUM_SMALL = 10_000 if FULL else 200
SMALL_BYTES = 10 << 10


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Four files, in the page cache."""
    source = tmp_path / "large"
    source.mkdir()
    for index in range(4):
        (source / f"shard-{index}.bin").write_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 22))
    os.sync()
    return source


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Many files in a few directories."""
    source = tmp_path / "small"
    for index in range(NUM_SMALL):
        path = source / f"d{index % 20}" / f"f{index}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(SMALL_BYTES))
    os.sync()
    return source


class Contest:
    """The contenders, each writing a new copy, made durable. A job opens its store once, so that is not timed."""

    def __init__(self, source: Path, root: Path, *, keep: bool, **options: Any) -> None:
        """`keep` leaves all copies until the end: ext4 is slow to create files where many were deleted just before."""
        self.source, self.root, self.keep, self.options = source, root, keep, options
        self.turn = 0
        self.store: CheckpointStore | None = None

    def target(self) -> Path:
        self.turn += 1
        return self.root / f"copy-{self.turn}"

    def clear(self) -> None:
        if not self.keep or self.store is None:
            if self.store is not None:
                self.store.close()
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir()
            self.store = open_store(self.root / "store")
            self.store.resume()
        os.sync()

    def ckptstore(self) -> None:
        assert self.store is not None
        self.turn += 1
        self.store.save_directory(self.turn, self.source, **self.options)

    def cp(self) -> None:
        subprocess.run(["cp", "-r", self.source, self.target()], check=True)
        os.sync()

    def ray(self) -> None:
        """What Ray Train's `StorageContext.persist_current_checkpoint` does with a local directory."""
        from pyarrow import fs

        target = self.target()
        target.mkdir()
        local = fs.LocalFileSystem()
        fs.copy_files(
            str(self.source), str(target), source_filesystem=local, destination_filesystem=local, use_threads=True
        )
        os.sync()


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_large_files(benchmark: Any, large: Path, tmp_path: Path, link: bool) -> None:
    contest = Contest(large, tmp_path / "out", keep=False, link=link)
    versus(
        benchmark,
        contest.ckptstore,
        {"cp -r + sync": contest.cp, "Ray Train (pyarrow) + sync": contest.ray},
        prepare=contest.clear,
        size_bytes=LARGE_BYTES,
    )


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_many_small_files(benchmark: Any, small: Path, tmp_path: Path, link: bool) -> None:
    contest = Contest(small, tmp_path / "out", keep=True, link=link)
    versus(
        benchmark,
        contest.ckptstore,
        {"cp -r + sync": contest.cp, "Ray Train (pyarrow) + sync": contest.ray},
        prepare=contest.clear,
        size_bytes=NUM_SMALL * SMALL_BYTES,
        num_files=NUM_SMALL,
    )
