"""Whole transfers through faults: what arrives is right, or a clear error is raised, and the memory stays bounded."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import AccessDenied, CheckpointDamaged, StorageUnavailable
from ckptstore.format.digest import Digest
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import Fault, S3Server, s3_server
from ckptstore.transfer import RangeRead, Transfer, Wanted
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import FileSource, MemorySource

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZES = (34 * MIB + 17, 8 * MIB, MIB, 1000, 0)
QUICK = RetryConfig(
    retry_attempts=40, retry_deadline_seconds=60, retry_wait_initial_seconds=0.01, retry_wait_max_seconds=0.5
)
numbers = itertools.count()


@pytest.fixture(scope="module")
def local_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("files")
    paths = [directory / f"f{index}.bin" for index in range(len(SIZES))]
    for path, size_bytes in zip(paths, SIZES, strict=True):
        path.write_bytes(os.urandom(size_bytes))
    return paths


@pytest.fixture(params=["obstore", pytest.param("sdk", marks=pytest.mark.slow)])
def transfer(request: pytest.FixtureRequest, fast_s3: S3Server) -> Iterator[Transfer]:
    options = {**fast_s3.storage_options, "config_kwargs": {"read_timeout": 3, "connect_timeout": 3}}
    storage = open_storage(f"s3://test/transfers/{next(numbers)}", storage_options=options, engine=request.param)
    transfer = Transfer(storage, config=TransferConfig(num_threads=8), retry=QUICK)
    yield transfer
    fast_s3.faults.clear()
    transfer.close()
    assert list(storage.unfinished("")) == [], "no upload is left behind"  # type: ignore[attr-defined]
    storage.close()


def planned(paths: list[Path]) -> list[PlannedFile]:
    return [PlannedFile(f"checkpoints/x/{path.name}", FileSource.of(path)) for path in paths]


def up_and_down(transfer: Transfer, paths: list[Path], target: Path) -> None:
    stored = transfer.upload(planned(paths))
    wanted = [Wanted(file.key, file.size_bytes, file.digest) for file in stored]
    transfer.download([(item, target / Path(item.key).name) for item in wanted])
    for path in paths:
        assert (target / path.name).read_bytes() == path.read_bytes()
    assert not [found for found in transfer.check(wanted) if found.damage]


SURVIVED = {
    "throttled": [Fault(action="status", times=30, probability=0.5)],
    "server errors": [Fault(action="status", status=500, code="InternalError", times=20, probability=0.3)],
    "resets before the body": [Fault(action="reset", times=10, probability=0.3)],
    "resets within the body": [Fault(action="reset", match="^PUT", times=6, after_bytes=MIB, probability=0.5)],
    "lost answers": [Fault(action="lose_answer", times=10, probability=0.3)],
    "answers cut short": [Fault(action="truncate", match="^GET", times=8, after_bytes=500, probability=0.7)],
    "a flipped bit": [Fault(action="corrupt", match="^GET")],
    "completion fails": [Fault(action="status", match="^POST .*uploadId", status=500, code="InternalError", times=2)],
    "completion unanswered": [Fault(action="lose_answer", match="^POST .*uploadId", times=2)],
    "latency": [Fault(action="delay", seconds=0.1, times=None)],
    "a stall": [Fault(action="stall", match="^GET"), Fault(action="stall", match="^PUT")],
    "a narrow line": [Fault(action="bandwidth", bytes_per_second=60e6, times=None)],
}


@pytest.mark.parametrize("name", SURVIVED)
def test_what_goes_wrong_for_a_while_is_survived(
    transfer: Transfer, fast_s3: S3Server, local_files: list[Path], tmp_path: Path, name: str
) -> None:
    fast_s3.faults.replace(SURVIVED[name])
    up_and_down(transfer, local_files, tmp_path)


def test_a_refusal_in_the_middle_is_a_clear_error(
    transfer: Transfer, fast_s3: S3Server, local_files: list[Path]
) -> None:
    fast_s3.faults.add(Fault(action="status", match="^PUT", skip=3, times=None, status=403, code="AccessDenied"))
    seen = len(fast_s3.log)
    with pytest.raises(AccessDenied) as caught:
        transfer.upload(planned(local_files))
    assert caught.value.file
    refused = [request for request in fast_s3.log[seen:] if request.status == 403]
    assert len(refused) <= 8, "nothing is tried again"


def test_throttling_without_end_is_an_error_in_time(fast_s3: S3Server, local_files: list[Path]) -> None:
    storage = open_storage("s3://test/transfers/throttled", storage_options=fast_s3.storage_options)
    few = RetryConfig(retry_attempts=3, retry_wait_initial_seconds=0.01)
    transfer = Transfer(storage, config=TransferConfig(num_threads=4), retry=few)
    fast_s3.faults.add(Fault(action="status", match="^PUT", times=None))
    try:
        with pytest.raises(StorageUnavailable, match="503 SlowDown"):
            transfer.upload(planned(local_files))
    finally:
        fast_s3.faults.clear()
        transfer.close()
    assert list(storage.unfinished("")) == []  # type: ignore[attr-defined]
    storage.close()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["obstore", "sdk"])
def test_a_minute_of_throttling(engine: str, fast_s3: S3Server, local_files: list[Path], tmp_path: Path) -> None:
    import threading

    storage = open_storage(f"s3://test/minute-{engine}", storage_options=fast_s3.storage_options, engine=engine)
    transfer = Transfer(storage, config=TransferConfig(), retry=RetryConfig())
    fast_s3.faults.add(Fault(action="status", times=None))
    end = threading.Timer(60.0, fast_s3.faults.clear)
    end.start()
    try:
        up_and_down(transfer, local_files, tmp_path)
    finally:
        end.cancel()
        fast_s3.faults.clear()
        transfer.close()
        storage.close()


def test_bytes_that_rot_in_the_store_are_found(
    transfer: Transfer, fast_s3: S3Server, local_files: list[Path], tmp_path: Path
) -> None:
    (stored,) = transfer.upload(planned(local_files[1:2]))
    objects = fast_s3.objects.buckets["test"]
    (name,) = [name for name in objects if name.endswith(stored.key) and objects[name].size_bytes == SIZES[1]][-1:]
    pieces = objects[name].pieces
    assert pieces is not None
    pieces[0][12345] ^= 1
    wanted = Wanted(stored.key, stored.size_bytes, stored.digest)
    with pytest.raises(CheckpointDamaged, match="CRC32C"):
        transfer.download([(wanted, tmp_path / "rotten")])
    assert not (tmp_path / "rotten").exists()


def test_ranges_go_straight_into_memory(transfer: Transfer) -> None:
    payload = memoryview(bytearray(os.urandom(33 * MIB)))
    source = MemorySource([payload[: 5 * MIB], payload[5 * MIB :]], payloads=((0, len(payload)),))
    transfer.upload([PlannedFile("state", source)])
    found = memoryview(bytearray(len(payload)))
    step = 3 * MIB
    transfer.read(
        [
            RangeRead(
                "state",
                start,
                (found[start : start + step],),
                checks=((len(payload[start : start + step]), Digest.of(payload[start : start + step])),),
            )
            for start in range(0, len(payload), step)
        ]
    )
    assert found == payload


MEMORY_PROBE = """
import resource, sys
from pathlib import Path
from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import FileSource
from ckptstore.storage.open import open_storage
from ckptstore.transfer import Transfer, Wanted
engine, endpoint, path, target, budget = sys.argv[1:]
options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
storage = open_storage("s3://test/large", storage_options=options, engine=engine)
storage.write("warm", [memoryview(bytes(1 << 20))])
storage.read("warm")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = TransferConfig(num_threads=8, memory_budget_bytes=int(budget), durable=False)
transfer = Transfer(storage, config=config, retry=RetryConfig())
(stored,) = transfer.upload([PlannedFile("f", FileSource.of(Path(path)))])
transfer.download([(Wanted("f", stored.size_bytes, stored.digest), Path(target))])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


@pytest.mark.parametrize("engine", ["obstore", "sdk"])
def test_memory_stays_within_the_budget(engine: str, tmp_path: Path) -> None:
    """Much through little; the server keeps only sizes, so what comes back is zeros."""
    size_bytes, budget_bytes = 640 << 20, 128 << 20
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    with s3_server(buckets=["test"], keep_bodies=False, verify=False) as server:
        arguments = [engine, server.endpoint_url, str(path), str(tmp_path / "back"), str(budget_bytes)]
        done = subprocess.run(
            [sys.executable, "-c", MEMORY_PROBE, *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    grown_bytes = int(done.stdout)
    assert (tmp_path / "back").stat().st_size == size_bytes
    assert grown_bytes < 2 * budget_bytes, "the budget, the clients' own buffers, threads"
