"""Directories to S3 and back, few large files or many small ones, against pyarrow as Ray Train uses it, s3fs, boto3."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_contest import ROOT, Server, contest, serving
from s3_peers import Body, boto3_copies, pyarrow_copies, s3fs_copies
from told import CLOCK
from versus import FULL

from ckptstore import Checkpoint, CheckpointStore, open_store

LARGE = (16, 64 << 20) if FULL else (4, 4 << 20)
SMALL = (10_000, 10 << 10) if FULL else (100, 10 << 10)
PEERS = {"pyarrow, as Ray Train": pyarrow_copies, "s3fs": s3fs_copies, "boto3, 16 threads": boto3_copies}
TOO_LATE = "10,000 round trips one after another take the peers five minutes a turn"
SHAPES = {"large": LARGE, "small": SMALL}

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def sink() -> Iterator[Server]:
    """A server that keeps nothing of what is large."""
    with serving(keeps_bodies=False) as server:
        yield server


@pytest.fixture(params=list(SHAPES))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    count, size_bytes = SHAPES[request.param]
    for number in range(count):
        path = tmp_path / request.param / f"d{number % 16}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(min(size_bytes, 1 << 20)) * -(-size_bytes // (1 << 20)))
    return tmp_path / request.param


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def peers_for(source: Path) -> dict[str, Callable[..., tuple[Body, Body]]]:
    """Few large files are compared with what Ray Train does alone."""
    return PEERS if source.name == "small" else {"pyarrow, as Ray Train": pyarrow_copies}


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_up(benchmark: Any, sink: Server, source: Path, tmp_path: Path, late: bool) -> None:
    """`late` is with 30 ms more for each request, about as far away as a bucket is."""
    if late and source.name == "small" and FULL:
        pytest.skip(TOO_LATE)
    opened: list[CheckpointStore] = []

    def prepare() -> None:
        while opened:
            opened.pop().close()
        sink.clear()
        opened.append(open_store(f"{ROOT}/store", storage_options=sink.storage_options))
        opened[0].save(0, {"epoch": 0})

    bodies: dict[str, Body] = {"ckptstore": lambda: opened[0].save_directory(1, source)}
    for number, (name, make) in enumerate(peers_for(source).items()):
        bodies[name], _ = make(sink, source, f"bench/root/{number}", tmp_path / "unused")
    if late:
        bodies = {name: sink.late(body) for name, body in bodies.items()}
    contest(benchmark, bodies, size_bytes=size_of(source), prepare=prepare)
    opened[0].close()


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_down(benchmark: Any, server: Server, source: Path, tmp_path: Path, late: bool) -> None:
    """To a disk, from where nothing is made durable: the others do not either. Small files are removed at the end only:
    ext4 is slow to give new inodes soon after many were freed."""
    if late and source.name == "small" and FULL:
        pytest.skip(TOO_LATE)
    target, numbers = tmp_path / "target", itertools.count()
    with open_store(f"{ROOT}/store", storage_options=server.storage_options, durable=False) as store:
        checkpoint = store.save_directory(1, source)
        found = store.latest()
        assert isinstance(found, Checkpoint)

        def prepare() -> None:
            if target.exists() and source.name == "small":
                target.rename(tmp_path / f"turn-{next(numbers)}")
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()

        bodies: dict[str, Body] = {"ckptstore": lambda: found.to_directory(target / "own")}
        prefix = f"{checkpoint.uri.removeprefix('s3://')}"
        for name, make in peers_for(source).items():
            _, bodies[name] = make(server, source, prefix, target)
        if late:
            bodies = {name: server.late(body) for name, body in bodies.items()}
        contest(benchmark, bodies, size_bytes=size_of(source), prepare=prepare)
        prepare()
        found.to_directory(target / "own")
    for path in list(source.rglob("*.bin"))[:10]:
        assert (target / "own" / path.relative_to(source)).read_bytes() == path.read_bytes()
    shutil.rmtree(target)
