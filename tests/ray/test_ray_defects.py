"""Defects of Ray's downloads: each is shown with Ray alone, and its absence for the same files through ckptstore.

Both read one checkpoint from one server, with the same faults. Those of metrics are in test_metrics.py, that of uploads
in test_ray_runs.py.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import reading
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from storing import arrow_s3, make_run, stored

import ckptstore
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

NUM_FILES = 5
FILES = {f"file-{index}.bin" for index in range(NUM_FILES)}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server(buckets=["test"]) as server:
        yield server


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray puts its downloads and locks, also in other processes."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setenv("RAY_TMPDIR", str(path))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ckptstore puts its downloads."""
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(s3: S3Server, tmp_path: Path) -> Iterator[Checkpoint]:
    """Five files on the server, and a manifest."""
    source = tmp_path / "source"
    source.mkdir()
    for name in FILES:
        (source / name).write_bytes(content(name))
    system = arrow_s3(s3)
    make_run(f"test/{tmp_path.name}", system)
    yield stored(f"test/{tmp_path.name}", [source], filesystem=system)
    s3.faults.clear()
    s3.empty()


def opened(how: str, checkpoint: Checkpoint) -> Any:
    return checkpoint if how == "ray" else ckptstore.ray.wrap(checkpoint)


def content(name: str) -> bytes:
    return name.encode() * 1000


def whole(directory: str | Path) -> set[str]:
    """The names of the files that are there to their last byte."""
    return {path.name for path in Path(directory).glob("*.bin") if path.read_bytes() == content(path.name)}


def wait_until(what: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def num_downloads(s3: S3Server) -> int:
    """How many files were asked for."""
    return sum(item.method == "GET" and ".bin" in item.path for item in s3.log)


@contextmanager
def reader_that_dies(how: str, checkpoint: Checkpoint, s3: S3Server, tmp_path: Path) -> Iterator[None]:
    """Inside, another process has begun to download, and waits for its fourth file; then it is killed."""
    pickled = tmp_path / "checkpoint"
    pickled.write_bytes(pickle.dumps(checkpoint))
    s3.faults.add(Fault(action="stall", match=r"^GET .*\.bin", skip=NUM_FILES - 2))
    process = subprocess.Popen([sys.executable, reading.__file__, how, str(pickled)])
    try:
        wait_until(lambda: s3.faults.pending == 0 or process.poll() is not None)
        assert process.poll() is None
        yield
    finally:
        process.kill()
        process.wait()
        s3.faults.clear()


def read_beside_one_that_dies(how: str, checkpoint: Checkpoint, s3: S3Server, tmp_path: Path) -> set[str]:
    """The files that a reader sees who waits for a download whose process is killed."""
    begun = threading.Event()

    def read() -> set[str]:
        mine = opened(how, checkpoint)
        begun.set()
        with mine.as_directory() as directory:
            return whole(directory)

    with ThreadPoolExecutor(1) as pool:
        with reader_that_dies(how, checkpoint, s3, tmp_path):
            reader = pool.submit(read)
            begun.wait(60)
            time.sleep(0.5)  # that it waits cannot be seen from here; if it does not yet, it is too late to be harmed
            assert not reader.done()
        return reader.result(60)


@pytest.mark.usefixtures("cache")
class TestDownloaderDies:
    """A process is killed in the middle of the download that others wait for."""

    def test_ray_gives_the_others_a_part_and_leaves_it(
        self, checkpoint: Checkpoint, s3: S3Server, tmp_path: Path, temporary: Path
    ) -> None:
        seen = read_beside_one_that_dies("ray", checkpoint, s3, tmp_path)
        assert seen < FILES, "without any error"
        with checkpoint.as_directory() as directory:
            assert whole(directory) == FILES
        left = [path.name for path in temporary.glob("checkpoint_tmp_*")]
        assert len(left) == 2, "the copy, and the lock that keeps it from being deleted"

    def test_ckptstore_downloads_anew_and_leaves_nothing(
        self, checkpoint: Checkpoint, s3: S3Server, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert read_beside_one_that_dies("ckptstore", checkpoint, s3, tmp_path) == FILES
        with ckptstore.ray.wrap(checkpoint).as_directory() as directory:
            assert whole(directory) == FILES
            assert len(list(cache.rglob("file-0.bin"))) == 1, "what the dead process left is gone"
        monkeypatch.setenv("CKPTSTORE_CACHE_IDLE_SECONDS", "1e-6")
        with ckptstore.ray.wrap(checkpoint).as_directory():
            pass
        assert not list(cache.rglob("*.bin")), "and so is the copy when nobody has read it for so long"


class TestDownloadFails:
    """An error ends the download that others wait for."""

    def read_together(self, how: str, checkpoint: Checkpoint, s3: S3Server) -> list[Any]:
        """What two readers see: the first one meets an error."""
        s3.faults.add(
            Fault(action="delay", match=r"^GET .*\.bin", seconds=0.5),
            Fault(action="status", match=r"^GET .*\.bin", status=403, code="AccessDenied", skip=2),
        )

        def read(mine: Any) -> Any:
            try:
                with mine.as_directory() as directory:
                    return whole(directory)
            except Exception as error:
                return error

        readers = [opened(how, checkpoint) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(read, readers))

    @pytest.mark.usefixtures("temporary")
    def test_ray_gives_the_others_a_part(self, checkpoint: Checkpoint, s3: S3Server) -> None:
        seen = self.read_together("ray", checkpoint, s3)
        assert sum(isinstance(item, Exception) for item in seen) == 1
        assert any(isinstance(item, set) and item < FILES for item in seen)

    @pytest.mark.usefixtures("cache")
    def test_with_ckptstore_the_next_one_downloads(self, checkpoint: Checkpoint, s3: S3Server) -> None:
        seen = self.read_together("ckptstore", checkpoint, s3)
        assert sum(isinstance(item, ckptstore.AccessDenied) for item in seen) == 1
        assert [item for item in seen if isinstance(item, set)] == [FILES]


class TestLateReader:
    """A reader comes after the download, while another one still reads."""

    def read_late(self, how: str, checkpoint: Checkpoint, s3: S3Server) -> tuple[int, bool, bool]:
        """The files downloaded; whether the first reader's were touched, and are there when the second one ends."""
        before = num_downloads(s3)
        with opened(how, checkpoint).as_directory() as first:
            marks = {path.name: path.stat().st_mtime_ns for path in Path(first).iterdir()}
            with opened(how, checkpoint).as_directory() as second:
                assert whole(second) == FILES
                touched = {path.name: path.stat().st_mtime_ns for path in Path(first).iterdir()} != marks
            is_there = Path(first).exists() and whole(first) == FILES
        return num_downloads(s3) - before, touched, is_there

    @pytest.mark.usefixtures("temporary")
    def test_ray_downloads_again_over_what_is_read_and_deletes_it(self, checkpoint: Checkpoint, s3: S3Server) -> None:
        assert self.read_late("ray", checkpoint, s3) == (2 * NUM_FILES, True, False)

    @pytest.mark.usefixtures("cache")
    def test_ckptstore_downloads_once(self, checkpoint: Checkpoint, s3: S3Server) -> None:
        assert self.read_late("ckptstore", checkpoint, s3) == (NUM_FILES, False, True)


def test_with_ray_alone_a_name_used_twice_deletes_what_is_live(tmp_path: Path) -> None:
    """That an upload through ckptstore takes another name is shown in test_ray_runs.py."""
    (tmp_path / "run/latest").mkdir(parents=True)
    storage = StorageContext(str(tmp_path), experiment_dir_name="run")

    async def register(times: int) -> None:
        manager = CheckpointManager(CheckpointConfig(num_to_keep=1), storage)
        for step in range(times):
            (tmp_path / "run/latest/step").write_text(str(step))
            reported = Checkpoint(str(tmp_path / "run/latest"))
            manager.register_checkpoint(_TrainingReport(checkpoint=reported, metrics={}, validation=False))

    asyncio.run(register(2))
    assert not (tmp_path / "run/latest").exists(), "it is the only checkpoint that Ray has"
    with pytest.raises(Exception, match="does not exist") as caught:
        asyncio.run(register(0))
    assert type(caught.value).__name__ == "CheckpointManagerInitializationError"
