"""What the processes of test_node_cache_processes.py run; imports little, so that they start fast."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ckptstore.config import CacheConfig
from ckptstore.events import DownloadWaited, Event, listening
from ckptstore.node_cache import NodeCache, cache

KEY = "ab" * 32
NUM_FILES = 5
FILE_BYTES = 200_000


def rank() -> int:
    return int(os.environ["RANK"])


def content(index: int) -> bytes:
    return bytes([index + 1]) * FILE_BYTES


def note(log: Path, text: str) -> None:
    """One line for one thing that happened, whole even when several processes write."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def note_waiting(log: Path) -> None:
    """From now on, note the first time that this process finds that another one has the turn."""
    read_holder = cache._read_holder
    noted: list[str] = []

    def noting(path: Path) -> str:
        if not noted:
            noted.append("once")
            note(log, f"waits {rank()}")
        return read_holder(path)

    cache._read_holder = noting


def downloads(log: Path, *, pause_seconds: float = 0.05, at_file: Callable[[int], None] = lambda index: None) -> object:
    def download(path: Path) -> None:
        note(log, f"started {rank()}")
        for index in range(NUM_FILES):
            at_file(index)
            (path / f"file-{index}").write_bytes(content(index))
            time.sleep(pause_seconds)
        note(log, f"finished {rank()}")

    return download


def read_all(path: Path) -> int:
    found = {item.name: item.read_bytes() for item in path.iterdir()}
    assert found == {f"file-{index}": content(index) for index in range(NUM_FILES)}
    return (path / "file-0").stat().st_ino


def fetch(root: Path, download: object, **more: object) -> tuple[int, list[DownloadWaited]]:
    """The inode that was read, and whom this process waited for."""
    waited: list[DownloadWaited] = []

    def listen(event: Event) -> None:
        if isinstance(event, DownloadWaited):
            waited.append(event)

    nodes = NodeCache(CacheConfig(cache_dir=root, **more))
    size_bytes = NUM_FILES * FILE_BYTES
    with listening(listen), nodes.fetch_once(KEY, step=3, size_bytes=size_bytes, download=download) as path:
        return read_all(path), waited


def at_random_delays(root: Path, log: Path) -> int:
    time.sleep(random.Random(rank()).random() * 0.4)
    return fetch(root, downloads(log))[0]


def first_is_killed(root: Path, log: Path) -> tuple[int, list[str]]:
    """Rank 0 dies in the middle when all others wait."""

    def die(index: int) -> None:
        if rank() == 0 and index == 2:
            wait_for(lambda: len(log.read_text().splitlines()) == int(os.environ["WORLD_SIZE"]))
            os.kill(os.getpid(), signal.SIGKILL)

    if rank():
        wait_for(log.exists)
        note_waiting(log)
    inode, waited = fetch(root, downloads(log, at_file=die))
    return inode, [event.holder for event in waited]


def dies_reading(root: Path, log: Path) -> None:
    with NodeCache(CacheConfig(cache_dir=root)).fetch_once(KEY, step=3, size_bytes=1, download=downloads(log)):
        os.kill(os.getpid(), signal.SIGKILL)


def reads_while_others_evict(root: Path, log: Path) -> int:
    """Even ranks read one key again and again, odd ranks others, with a budget that keeps nothing."""
    config = CacheConfig(cache_dir=root, cache_budget_bytes=1)
    rounds = 0
    for turn in range(15):
        key = KEY if rank() % 2 == 0 else f"{rank():032x}{turn:032x}"
        download = downloads(log, pause_seconds=0)
        with NodeCache(config).fetch_once(key, step=3, size_bytes=1, download=download) as path:
            for _ in range(5):
                read_all(path)
                time.sleep(0.001)
            rounds += 1
    return rounds


def reads_in_a_forked_worker(root: Path, log: Path) -> str:
    """A worker that was forked by a reader keeps the copy, as a data loader's does."""
    config = CacheConfig(cache_dir=root, cache_budget_bytes=1)
    go_on = os.pipe()
    with NodeCache(config).fetch_once(KEY, step=3, size_bytes=1, download=downloads(log)) as path:
        process_id = os.fork()
        if process_id == 0:
            os.read(go_on[0], 1)
            try:
                read_all(path)
                os._exit(7)
            finally:
                os._exit(8)
    other = NodeCache(config).fetch_once("cd" * 32, step=3, size_bytes=1, download=downloads(log))
    with other:
        still_there = path.exists()
    os.write(go_on[1], b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    with NodeCache(config).fetch_once("ef" * 32, step=3, size_bytes=1, download=downloads(log)):
        return f"{still_there} {status} {path.exists()}"
