"""The file system for Ray outlives trouble of S3, with the very calls that Ray makes; without a run of Ray."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileSelector,
    FileType,
    GcsFileSystem,
    LocalFileSystem,
    PyFileSystem,
    S3FileSystem,
    copy_files,
)
from ray.train.v2._internal.execution.storage import _pyarrow_fs_copy_files
from storing import arrow_s3

import ckptstore
from ckptstore import InvalidInput
from ckptstore.config import RetryConfig
from ckptstore.errors import StorageUnavailable
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.integrations.ray.retried_s3 import Retried
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

QUICK = RetryConfig(retry_attempts=4, retry_wait_initial_seconds=0.001)


@pytest.fixture(autouse=True)
def anew(s3: S3Server) -> Iterator[None]:
    """Each test finds the server empty."""
    yield
    s3.faults.clear()
    s3.log.clear()
    s3.empty()


def wrapped(s3: S3Server, retry: RetryConfig = QUICK) -> PyFileSystem:
    """Without pyarrow's own tries, which take seconds."""
    system = ckptstore.ray.s3_filesystem(arrow_s3(s3), retry=retry)
    _, (settings,) = system.handler.inner.__reduce__()
    settings.pop("load_frequency")
    once = AwsStandardS3RetryStrategy(max_attempts=1)
    return PyFileSystem(Retried(S3FileSystem(**{**settings, "role_arn": None}, retry_strategy=once), retry))


def trouble(s3: S3Server, times: int | None = 2) -> None:
    assert s3.faults.pending == 0, "what was asked for before met none"
    s3.faults.replace([Fault(action="status", times=times)])


def test_all_that_ray_asks_for_outlives_503(s3: S3Server) -> None:
    system = wrapped(s3)
    trouble(s3)
    with system.open_output_stream("test/run/snapshot.json") as file:
        file.write(b"{}")
    trouble(s3)
    with system.open_input_stream("test/run/snapshot.json") as file:
        trouble(s3)
        assert file.read() == b"{}"
    trouble(s3)
    assert system.get_file_info("test/run/snapshot.json").size == 2
    trouble(s3)
    (found,) = system.get_file_info(FileSelector("test/run"))
    assert found.path == "test/run/snapshot.json"
    trouble(s3)
    system.create_dir("test/run/checkpoint")
    trouble(s3)
    system.delete_dir("test/run/checkpoint")
    trouble(s3)
    system.delete_file("test/run/snapshot.json")
    assert s3.faults.pending == 0
    assert not system.get_file_info(FileSelector("test/run", recursive=True))


def test_the_error_has_the_path_and_no_secret_and_ray_does_not_repeat_it(s3: S3Server) -> None:
    system = wrapped(s3, RetryConfig(retry_attempts=2, retry_wait_initial_seconds=0.001))
    trouble(s3, times=None)
    said = r"cannot write test/run/snapshot\.json: .*SLOW_DOWN during PutObject"
    with (
        pytest.raises(StorageUnavailable, match=said) as caught,
        system.open_output_stream("test/run/snapshot.json") as file,
    ):
        file.write(b"{}")
    assert "AWS Error" not in str(caught.value), "Ray repeats uploads that fail with these words"
    assert "testsecret" not in str(caught.value)


def test_what_no_retry_mends_fails_at_once(s3: S3Server) -> None:
    system = wrapped(s3)
    with pytest.raises(FileNotFoundError):
        system.open_input_stream("test/run/nothing")
    s3.log.clear()
    s3.faults.add(Fault(action="status", status=403, code="AccessDenied", times=None))
    with pytest.raises(OSError, match="ACCESS_DENIED"), system.open_output_stream("test/run/file") as file:
        file.write(b"{}")
    assert s3.operations().count("PutObject") <= 2, "and once more when pyarrow lets go of the file"


def test_a_deletion_whose_answer_is_lost_is_one(s3: S3Server) -> None:
    system = wrapped(s3)
    with system.open_output_stream("test/run/file") as file:
        file.write(b"bytes")
    s3.faults.add(Fault(action="lose_answer", match="^DELETE"), Fault(action="reset", match="", times=1))
    system.delete_file("test/run/file")
    with pytest.raises(FileNotFoundError):
        system.delete_file("test/run/file")


def test_a_small_file_is_one_request_and_a_large_one_has_parts(s3: S3Server) -> None:
    system, large = wrapped(s3), bytes(range(256)) * (80 << 10)
    with system.open_output_stream("test/run/small") as file:
        file.write(b"one")
        file.write(b"two")
    assert s3.operations() == ["PutObject"]
    with system.open_output_stream("test/run/large") as file:
        for start in range(0, len(large), 3 << 20):
            file.write(large[start : start + (3 << 20)])
    assert "UploadPart" in s3.operations()
    with system.open_input_file("test/run/large") as file:
        assert file.read() == large
        file.seek(-6, 2)
        assert file.read() == large[-6:]
        assert file.read_at(5, 1000) == large[1000:1005]
        assert file.size() == len(large)


@pytest.mark.timeout(60)
def test_more_files_than_threads_of_pyarrow_are_copied(s3: S3Server, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    for number in range(24):
        (source / f"{number}.bin").write_bytes(bytes([number]) * ((12 << 20) if number == 3 else 1000))
    system = wrapped(s3)
    _pyarrow_fs_copy_files(str(source), "test/run/copied", destination_filesystem=system)
    copy_files("test/run/copied", str(copy), source_filesystem=system)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }


def test_it_stays_equal_on_its_way_to_a_worker_and_keeps_its_policy(s3: S3Server) -> None:
    system = wrapped(s3)
    other = pickle.loads(pickle.dumps(system))
    assert other == system
    assert other.handler.config == QUICK
    assert other != wrapped(s3, RetryConfig())
    assert place_of(other, "test/runs/a") == place_of(arrow_s3(s3), "test/runs/a"), "our own bytes go past it"


def test_a_uri_of_ray_is_enough(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    uri = f"s3://test/runs?region=us-east-1&endpoint_override={s3.endpoint_url}"
    system = ckptstore.ray.s3_filesystem(uri)
    assert system.get_file_info("test/runs").type == FileType.NotFound
    assert b"testsecret" not in pickle.dumps(system), "what the environment has stays there"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("gs://bucket/runs", "'gs://bucket/runs' is not on S3"),
        ("s3://key:hidden@bucket/runs?region=us-east-1&bad=hidden", "Unexpected query parameter"),
        ("s3://key:hidden@bu cket/runs", "syntax error"),
        (LocalFileSystem(), "not for a LocalFileSystem"),
        (GcsFileSystem(anonymous=True), "not for a GcsFileSystem"),
    ],
)
def test_other_places_are_refused(place: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        ckptstore.ray.s3_filesystem(place)
    assert "hidden" not in str(caught.value)
