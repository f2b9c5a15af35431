"""`examine` on object stores: refused permissions by name, careless servers, leftovers; nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptstore.config import CacheConfig, StoreConfig
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import Fault, S3Server, s3_server
from ckptstore.tools.doctor.examination import Examination, examine
from ckptstore.tools.doctor.finding import Finding

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(cache=CacheConfig(cache_dir=tmp_path / "cache"))


def found_by(examination: Examination) -> dict[str, Finding]:
    return {finding.name: finding for finding in examination.findings}


@pytest.mark.parametrize("requester_pays", [False, True])
def test_a_good_bucket(fast_s3: S3Server, config: StoreConfig, requester_pays: bool) -> None:
    uri, options = "s3://test/doctor/one", {**fast_s3.storage_options, "requester_pays": requester_pays}
    examination = examine(uri, storage_options=options, config=config)
    found = found_by(examination)
    assert examination.exit_code == 0
    assert not [item for item in examination.findings if item.status in ("failed", "unknown")], examination
    assert found["lifecycle"].status == "warning"
    assert "AbortIncompleteMultipartUpload" in found["lifecycle"].hint
    assert found["what deleting frees"].status == "ok"
    assert not [key for key in fast_s3.objects.buckets["test"] if key.startswith("doctor/")]
    assert fast_s3.objects.uploads == {}


@pytest.mark.parametrize(
    ("match", "failed"),
    [
        ("^PUT ", {"put"}),
        ("^GET .*list-type", {"list", "log"}),
        ("^POST .*delete", {"delete"}),
        ("^POST .*uploads", {"multipart"}),
        ("^GET .*absent", {"get"}),
    ],
)
def test_a_refused_permission_is_named(config: StoreConfig, match: str, failed: set[str]) -> None:
    with s3_server(buckets=["test"]) as server:
        server.faults.add(Fault(action="status", match=match, status=403, code="AccessDenied", times=None))
        examination = examine("s3://test/x", storage_options=server.storage_options, config=config)
    assert {item.name for item in examination.findings if item.status == "failed"} == failed, examination
    assert examination.exit_code == 32
    assert "testsecret" not in repr(examination)


def test_leftover_uploads_and_how_to_be_rid_of_them(fast_s3: S3Server, config: StoreConfig) -> None:
    storage: Any = open_storage("s3://test/left", storage_options=fast_s3.storage_options)
    writer = storage.open_parts("checkpoints/x/y", 20 * MIB)
    found = found_by(examine("s3://test/left", storage_options=fast_s3.storage_options, config=config))
    assert found["unfinished uploads"].status == "warning"
    assert "put-bucket-lifecycle-configuration" in found["unfinished uploads"].hint
    writer.abort()
    storage.close()


def test_no_server(config: StoreConfig) -> None:
    with s3_server(buckets=["test"]) as server:
        options = server.storage_options
    examination = examine("s3://test/x", storage_options=options, config=config)
    found = found_by(examination)
    assert [found[name].code for name in ("put", "get")] == ["storage-unavailable"] * 2
    assert found["log"].detail == "the storage cannot be reached"
    assert found["node cache"].status == "ok"
    assert examination.exit_code == 34


def test_the_command_on_a_server(fast_s3: S3Server, tmp_path: Path) -> None:
    options = [f"--storage-option={name}={fast_s3.storage_options[name]}" for name in ("key", "secret", "endpoint_url")]
    command = [sys.executable, "-m", "ckptstore.tools.cli", "doctor", "s3://test/command", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert "testsecret" not in done.stdout + done.stderr


def test_a_store_that_ignores_conditions(careless_gcs: Any, config: StoreConfig) -> None:
    found = found_by(examine("gs://test/doctor", storage_options=careless_gcs.storage_options, config=config))
    assert found["conditional create"].status == "warning"
    assert "single_writer" in found["conditional create"].hint


@pytest.mark.parametrize(("name", "scheme"), [("fake_gcs", "gs"), ("azurite", "az")])
def test_other_clouds(request: pytest.FixtureRequest, config: StoreConfig, name: str, scheme: str) -> None:
    server = request.getfixturevalue(name)
    examination = examine(f"{scheme}://test/doctor", storage_options=server.storage_options, config=config)
    assert examination.ok, examination
    assert found_by(examination)["conditional create"].status == "ok"
