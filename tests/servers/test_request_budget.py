"""How many requests and how much memory a save and a load cost on S3: the formulas of docs/how-to/s3.md, counted by
the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.testing import Call, with_faults
from ckptstore.testing.s3_server import S3Server, s3_server

pytestmark = pytest.mark.slow

NUM_FILES = 7


@pytest.fixture
def requests_of(fast_s3: S3Server) -> Callable[..., Counter[str]]:
    def count(call: Callable[[], object], below: str = "/") -> Counter[str]:
        seen = len(fast_s3.log)
        call()
        return Counter(request.operation for request in fast_s3.log[seen:] if below in request.path)

    return count


@pytest.fixture
def store(fast_s3: S3Server, tmp_path: Path) -> Iterator[Any]:
    uri = f"s3://test/budget/{os.urandom(4).hex()}"
    with ckptstore.open_store(uri, storage_options=fast_s3.storage_options) as store:
        store.save_directory(0, directory(tmp_path / "first"))
        yield store


def directory(path: Path, *, large_bytes: int = 0) -> Path:
    path.mkdir(parents=True)
    for index in range(NUM_FILES):
        (path / f"f{index}.bin").write_bytes(os.urandom(1000))
    if large_bytes:
        (path / "large.bin").write_bytes(bytes(large_bytes))
    return path


def test_a_save(store: Any, requests_of: Any, tmp_path: Path) -> None:
    found = requests_of(lambda: store.save_directory(1, directory(tmp_path / "out")))
    assert found["PutObject"] == NUM_FILES + 3, "files, manifest, record, hint"
    assert found["GetObject"] <= 6, "the log is read forward; a few more where the hint is old"
    assert found["ListObjects"] == 1
    assert found["HeadObject"] == 3, "the newest record that the job knows, its last manifest, and the new one"
    assert found["DeleteObjects"] == found["DeleteObject"] == 0


def test_the_identity_is_read_once(store: Any, fast_s3: S3Server, tmp_path: Path) -> None:
    seen = len(fast_s3.log)
    store.save_directory(1, directory(tmp_path / "out"))
    assert not [request.path for request in fast_s3.log[seen:] if request.path.endswith("/store.json")]


def test_a_save_with_a_large_file(store: Any, requests_of: Any, tmp_path: Path) -> None:
    found = requests_of(lambda: store.save_directory(1, directory(tmp_path / "out", large_bytes=40 << 20)))
    assert found["PutObject"] == NUM_FILES + 3
    parts = {name: found[name] for name in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")}
    assert parts == {"CreateMultipartUpload": 1, "UploadPart": 3, "CompleteMultipartUpload": 1}
    assert found["HeadObject"] == 3


def test_finding_and_loading(store: Any, requests_of: Any, tmp_path: Path) -> None:
    found = requests_of(store.latest)
    assert found.keys() == {"GetObject"}
    assert found["GetObject"] <= 2
    checkpoint = store.latest()
    # The prune after the save may still read the log.
    assert requests_of(lambda: checkpoint.files, "/checkpoints/") == {"GetObject": 1}

    def read() -> None:
        checkpoint.to_directory(tmp_path / "copy")

    found = requests_of(read, "/checkpoints/")
    assert found.keys() == {"GetObject"}
    assert found["GetObject"] <= NUM_FILES + 1, "the files, and the manifest where it is not known yet"
    assert requests_of(lambda: list(store))["GetObject"] <= 3


def test_deletions_come_in_batches(fast_s3: S3Server, requests_of: Any, tmp_path: Path) -> None:
    def live() -> None:
        uri = f"s3://test/budget/{os.urandom(4).hex()}"
        keywords = {"storage_options": fast_s3.storage_options, "grace_seconds": 0}
        with ckptstore.open_store(uri, **keywords, retention=ckptstore.KeepLatest(1)) as store:
            for step in range(4):
                store.save_directory(step, directory(tmp_path / str(step)))
            store.prune()

    found = requests_of(live)
    assert found["DeleteObject"] == 0
    assert 2 <= found["DeleteObjects"] <= 3 * 5, "the right, a manifest, the files; the rest are probes of the clock"


def test_a_claim_reads_while_the_storage_is_tried(store: Any, fast_s3: S3Server) -> None:
    """Each request is a round trip: the next job would wait for the one and then for the other."""
    log_is_read, late = threading.Event(), list[str]()

    def hook(call: Call) -> None:
        if call.phase == "before" and (call.verb, call.key) == ("read", "latest.json"):
            log_is_read.set()
        if call.phase == "before" and call.verb == "create" and call.key.startswith("probe/"):
            late.extend([] if log_is_read.wait(30) else [call.key])

    opened = ckptstore.open_store(store.uri, storage_options=fast_s3.storage_options)
    with with_faults(opened, hook) as again:
        assert again.resume().step == 0
    assert late == []


def test_both_looks_before_a_record_are_one_round(store: Any, fast_s3: S3Server) -> None:
    """Is there a newer record, and is the newest that is known still there?"""
    both, looks = threading.Barrier(2), list[str]()
    options = {"storage_options": fast_s3.storage_options}

    def hook(call: Call) -> None:
        if call.phase == "before" and call.verb in ("read", "stat") and call.key in watched:
            looks.append(f"{call.verb} {call.key}")
            both.wait(30)

    watched: set[str] = set()
    with with_faults(ckptstore.open_store(store.uri, **options), hook) as again:
        again.resume()
        newest = max(file.key for file in again._job.storage.list("log/"))
        watched |= {newest, f"log/{int(newest[len('log/') : -len('.json')]) + 1:010}.json"}
        again.pin(0)
    assert sorted(look.partition(" ")[0] for look in looks) == ["read", "stat"]


MEMORY_PROBE = """
import resource, sys
import ckptstore
endpoint, small, large, target, budget = sys.argv[1:]
options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
with ckptstore.open_store(
    "s3://test/large", storage_options=options, memory_budget_bytes=int(budget), durable=False
) as store:
    store.save_directory(0, small)  # what is loaded on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store.save_directory(1, large)
    store[1].to_directory(target)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Much through little; the server keeps only sizes, so what comes back is zeros."""
    size_bytes, budget_bytes = 640 << 20, 128 << 20
    small, large = (directory(tmp_path / name) for name in ("small", "large"))
    with (large / "zeros").open("wb") as file:
        file.truncate(size_bytes)
    with s3_server(buckets=["test"], keep_bodies=False, verify=False) as server:
        arguments = [server.endpoint_url, small, large, tmp_path / "back", str(budget_bytes)]
        command = [sys.executable, "-c", MEMORY_PROBE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "back/zeros").stat().st_size == size_bytes
    assert int(done.stdout) < 2 * budget_bytes, "the budget, the clients' own buffers, threads"
