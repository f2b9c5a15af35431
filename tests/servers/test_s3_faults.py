"""Faults of S3 at the storage: every one is an error of ours, of the right class, or no error."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outcomes import error_of

from ckptstore.errors import (
    AccessDenied,
    CkptstoreError,
    FileMissing,
    StorageError,
    StorageFull,
    StorageThrottled,
    StorageUnavailable,
)
from ckptstore.format.digest import Digest
from ckptstore.storage.base import Unsupported, UploadGone, WritesParts
from ckptstore.storage.cloud.files import Renewals
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3.objects import S3Error
from ckptstore.testing.s3_server import Fault, Link, S3Server

MIB = 1 << 20
PART = memoryview(os.urandom(16 * MIB))
numbers = itertools.count()

OPERATIONS: dict[str, Callable[[Any], object]] = {
    "write": lambda storage: storage.write("new", [PART[:100]]),
    "create": lambda storage: storage.create("log/1", b"x"),
    "read": lambda storage: storage.read("there"),
    "read_into": lambda storage: storage.read_into("there", 0, [memoryview(bytearray(MIB))]),
    "stat": lambda storage: storage.stat("there"),
    "list": lambda storage: list(storage.list("")),
    "delete": lambda storage: storage.delete(["there"]),
    "copy": lambda storage: storage.copy("there", "copied"),
    "open_parts": lambda storage: storage.open_parts("parts", len(PART) + 1),
    "unfinished": lambda storage: storage.unfinished(""),
}

ANSWERS = [
    (503, "SlowDown", StorageThrottled),
    (429, "TooManyRequests", StorageThrottled),
    (500, "InternalError", StorageUnavailable),
    (502, "BadGateway", StorageUnavailable),
    (504, "GatewayTimeout", StorageUnavailable),
    (501, "NotImplemented", Unsupported),
    (400, "InvalidRequest", StorageError),
    (403, "AccessDenied", AccessDenied),
    (403, "InvalidAccessKeyId", AccessDenied),
    (401, "Unauthorized", AccessDenied),
    (507, "QuotaExceeded", StorageFull),
]


@pytest.fixture
def storage(fast_s3: S3Server) -> Iterator[Any]:
    options = {**fast_s3.storage_options, "config_kwargs": {"read_timeout": 2, "connect_timeout": 2}}
    storage = open_storage(f"s3://test/faults/{next(numbers)}", storage_options=options)
    storage.write("there", [PART[:MIB]])
    yield storage
    fast_s3.faults.clear()
    storage.close()


@pytest.fixture
def fault(fast_s3: S3Server) -> Callable[..., None]:
    return lambda *args, **fields: fast_s3.faults.replace([*args, *([Fault(**fields)] if fields else [])])


@pytest.mark.parametrize(("status", "code", "expected"), ANSWERS, ids=[f"{item[0]}-{item[1]}" for item in ANSWERS])
def test_a_refusal_is_an_error_of_its_class(
    storage: Any, fault: Any, status: int, code: str, expected: type[CkptstoreError]
) -> None:
    for name, operation in OPERATIONS.items():
        fault(action="status", status=status, code=code, times=None)
        error = error_of(lambda operation=operation: operation(storage))  # type: ignore[misc]
        assert type(error) is expected, name
        assert error.retryable == issubclass(expected, StorageUnavailable)
        text = str(error)
        assert str(status) in text, name
        assert "testsecret" not in text
        assert "127.0.0.1" not in text, "a URL may carry a signature"


@pytest.mark.parametrize("action", ["reset", "lose_answer", "stall"])
def test_a_broken_connection_is_worth_a_retry(storage: Any, fault: Any, action: str) -> None:
    names = ["create", "read_into"] if action == "stall" else list(OPERATIONS)
    for name in names:
        fault(action=action, times=None)
        assert type(error_of(lambda name=name: OPERATIONS[name](storage))) is StorageUnavailable, name  # type: ignore[misc]
        fault()
        error = error_of(lambda name=name: OPERATIONS[name](storage))  # type: ignore[misc]
        assert error is None or name in ("read", "read_into", "stat", "copy"), "what a lost delete removed is gone"
        storage.write("there", [PART[:MIB]])


@pytest.mark.parametrize("host", ["127.0.0.1:1", "nowhere.invalid"])
def test_a_server_that_is_not_there_is_worth_a_retry_and_no_secret_is_told(host: str) -> None:
    options = {"key": "K", "secret": "S", "endpoint_url": f"http://user:canary@{host}"}
    with closing(open_storage("s3://test/away", storage_options=options)) as storage:
        for name, operation in OPERATIONS.items():
            error = error_of(lambda operation=operation: operation(storage))  # type: ignore[misc]
            assert type(error) is StorageUnavailable, name
            assert "canary" not in "".join(traceback.format_exception(error)), name


def test_the_name_of_a_file_is_no_reason(storage: Any, fault: Any) -> None:
    fault(action="reset", match="^PUT")
    assert type(error_of(lambda: storage.write("InvalidCertificate", [PART[:9]]))) is StorageUnavailable


@pytest.mark.parametrize("after_bytes", [1, 1000, MIB - 1])
def test_a_truncated_answer_is_worth_a_retry(storage: Any, fault: Any, after_bytes: int) -> None:
    fault(action="truncate", match="^GET", after_bytes=after_bytes, times=2)
    found = bytearray(MIB)
    assert type(error_of(lambda: storage.read_into("there", 0, [memoryview(found)]))) is StorageUnavailable
    assert type(error_of(lambda: storage.read("there"))) is StorageUnavailable
    storage.read_into("there", 0, [memoryview(found)])
    assert found == PART[:MIB]


def test_an_upload_reset_midway_leaves_nothing(storage: Any, fault: Any) -> None:
    fault(action="reset", match="^PUT", after_bytes=MIB)
    assert type(error_of(lambda: storage.write("torn", [PART]))) is StorageUnavailable
    assert type(error_of(lambda: storage.stat("torn"))) is FileMissing
    storage.write("torn", [PART])
    assert storage.read("torn") == PART


def test_a_missing_bucket_is_no_missing_file(fast_s3: S3Server) -> None:
    with closing(open_storage("s3://nowhere/x", storage_options=fast_s3.storage_options)) as storage:
        error = error_of(lambda: storage.read("k"))
        assert type(error) is StorageError
        assert "bucket" in str(error)


def test_a_lost_answer_to_a_create_can_be_settled(storage: Any, fault: Any) -> None:
    fault(action="lose_answer", match="^PUT")
    assert type(error_of(lambda: storage.create("log/7", b"mine"))) is StorageUnavailable
    assert storage.create("log/7", b"noop") is False
    assert storage.read("log/7") == b"mine"


def test_a_conflict_is_neither_yes_nor_no(storage: Any, fault: Any) -> None:
    fault(action="status", match="^PUT", status=409, code="ConditionalRequestConflict")
    assert type(error_of(lambda: storage.create("log/8", b"mine"))) is StorageUnavailable
    assert type(error_of(lambda: storage.read("log/8"))) is FileMissing
    assert storage.create("log/8", b"mine") is True


def test_a_create_is_sent_once(storage: Any, fault: Any, fast_s3: S3Server) -> None:
    """A second try inside the client would meet the first one, and take it for somebody else's."""
    for answer in (Fault(action="lose_answer", match="^PUT"), Fault(action="status", match="^PUT")):
        fault(replace(answer))
        seen = len(fast_s3.log)
        assert isinstance(error_of(lambda: storage.create("log/9", b"mine")), StorageUnavailable)
        assert [request.method for request in fast_s3.log[seen:]] == ["PUT"]


@pytest.mark.parametrize("fault_of_part", ["status", "reset", "lose_answer"])
def test_a_part_is_sent_again(storage: Any, fault: Any, fault_of_part: str) -> None:
    writer = storage.open_parts("parts", len(PART) + 5)
    fault(action=fault_of_part, match="partNumber=1")
    assert isinstance(error_of(lambda: writer.write_part(0, [PART])), StorageUnavailable)
    writer.write_part(0, [PART])
    writer.write_part(len(PART), [memoryview(b"12345")])
    writer.finish()
    assert storage.read("parts") == bytes(PART) + b"12345"


def test_a_damaged_part_is_refused_by_the_server(storage: Any, fast_s3: S3Server) -> None:
    sent = [request for request in fast_s3.log if request.operation == "PutObject"]
    assert sent
    writer = storage.open_parts("sums", len(PART) + 1)
    writer.write_part(0, [PART])
    writer.write_part(len(PART), [PART[:1]])
    writer.finish()
    stored = fast_s3.objects.buckets["test"][storage.uri.removeprefix("s3://test/") + "/sums"]
    assert stored.checksums, "a checksum went along"
    another = storage.open_parts("others", len(PART) + 1)
    with pytest.raises(StorageUnavailable, match=r"BadDigest.*changed while"):  # not the bytes that were hashed
        another.write_part(0, [PART], Digest.of(b"other"))
    another.write_part(0, [PART], Digest.of(PART))
    another.abort()
    there = fast_s3.objects.buckets["test"][storage.uri.removeprefix("s3://test/") + "/there"]
    assert there.checksums


@pytest.mark.parametrize("action", ["status", "reset", "lose_answer"])
def test_finish_may_be_called_again(storage: Any, fault: Any, action: str) -> None:
    writer = storage.open_parts("whole", len(PART) + 1)
    writer.write_part(0, [PART])
    writer.write_part(len(PART), [PART[:1]])
    fault(action=action, match="^POST .*uploadId", status=500, code="InternalError")
    assert type(error_of(writer.finish)) is StorageUnavailable
    writer.finish()
    assert storage.stat("whole").size_bytes == len(PART) + 1
    assert list(storage.unfinished("")) == []


@pytest.mark.parametrize("action", ["status", "lose_answer"])
def test_abort_after_a_failed_finish_leaves_nothing(storage: Any, fault: Any, action: str) -> None:
    writer = storage.open_parts("whole", len(PART) + 1)
    writer.write_part(0, [PART])
    writer.write_part(len(PART), [PART[:1]])
    fault(action=action, match="^POST .*uploadId", status=500, code="InternalError")
    assert error_of(writer.finish)
    writer.abort()
    assert type(error_of(lambda: storage.stat("whole"))) is FileMissing
    assert list(storage.unfinished("")) == []


def test_a_copy_in_parts_begins_again(
    storage: Any, fault: Any, fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.storage.cloud.aws._COPY_BYTES", 6 * MIB)
    monkeypatch.setattr("ckptstore.storage.cloud.aws._COPY_PART_BYTES", 6 * MIB)
    storage.write("large", [PART])
    fault(action="status", match="^PUT .*partNumber=2", status=404, code="NoSuchUpload")
    storage.copy("large", "copied")
    assert fast_s3.faults.pending == 0
    assert storage.read("copied") == PART
    fault(action="status", match="^PUT .*partNumber=2", status=404, code="NoSuchUpload", times=None)
    assert type(error_of(lambda: storage.copy("large", "never"))) is UploadGone
    assert list(storage.unfinished("")) == []


@pytest.mark.parametrize("match", ["^PUT .*partNumber=2", "^POST .*uploadId"])
def test_an_upload_of_fsspec_begins_again(fast_s3: S3Server, fault: Any, match: str) -> None:
    with closing(open_storage("s3://test/again", storage_options=fast_s3.storage_options, engine="fsspec")) as storage:
        fault(action="status", match=match, status=404, code="NoSuchUpload")
        storage.write("large", [PART] * 3)
        assert fast_s3.faults.pending == 0
        assert storage.stat("large").size_bytes == 3 * len(PART)


@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_what_is_too_large_for_a_proxy(
    fast_s3: S3Server, fault: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how large, for whom, and what makes it smaller; and that does."""
    monkeypatch.setenv("CKPTSTORE_PART_BYTES", str(6 * MIB))
    with closing(open_storage("s3://test/proxy", storage_options=fast_s3.storage_options, engine=engine)) as storage:
        fault(action="status", status=413, code="", match="^PUT", times=None)
        error = error_of(lambda: storage.write("k", [PART[: 5 * MIB]]))
        assert error is not None
        assert not error.retryable
        assert "5.0 MiB" in str(error)
        assert "CKPTSTORE_PART_BYTES" in str(error)
        assert "ckptstore-testing" in str(error) or engine == "fsspec"
        fault(action="reset", after_bytes=MIB, match="^PUT", times=None)
        assert "CKPTSTORE_PART_BYTES" in str(error_of(lambda: storage.write("k", [PART[: 5 * MIB]])))
        fault()
        seen = len(fast_s3.log)
        if isinstance(storage, WritesParts):
            assert storage.part_bytes(len(PART)) == 6 * MIB
        else:
            storage.write("k", [PART])
        assert max((request.received_bytes for request in fast_s3.log[seen:]), default=0) < 7 * MIB


@pytest.mark.parametrize(
    ("status", "code", "words"), [(400, "ExpiredToken", "looked up anew"), (403, "RequestTimeTooSkewed", "made anew")]
)
def test_what_has_expired_is_made_anew_once(storage: Any, fault: Any, status: int, code: str, words: str) -> None:
    fault(action="status", status=status, code=code, times=None)
    first = error_of(lambda: storage.read("there"))
    assert type(first) is StorageUnavailable
    assert words in str(first)
    assert type(error_of(lambda: storage.read("there"))) is AccessDenied
    fault()
    assert storage.read("there") == PART[:MIB]
    fault(action="status", status=status, code=code)
    assert type(error_of(lambda: storage.read("there"))) is StorageUnavailable
    assert storage.read("there") == PART[:MIB]


def test_requests_in_flight_share_one_renewal(storage: Any, fault: Any, fast_s3: S3Server) -> None:
    fast_s3.link = Link(latency_seconds=0.5)
    fault(action="status", status=400, code="ExpiredToken", times=4)
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(lambda number: error_of(lambda: storage.write(f"{number}", [PART[:9]])), range(4)))
    fast_s3.link = Link()
    assert [type(error) for error in errors] == [StorageUnavailable] * 4
    storage.write("0", [PART[:9]])


def test_new_keys_that_come_late_are_found(fast_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    keys.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = s\n")
    options = {**fast_s3.storage_options, "key": None, "secret": None}
    storage = open_storage("s3://test/late", storage_options=options)

    def authorize(request: Any) -> None:
        if "Credential=new/" not in request.headers["authorization"]:
            raise S3Error(400, "ExpiredToken")

    monkeypatch.setattr(fast_s3._shared.service, "_authorize", authorize)
    errors = [error_of(lambda: storage.write("k", [PART[:9]])) for _ in range(3)]
    assert [type(error) for error in errors] == [StorageUnavailable, AccessDenied, AccessDenied]
    keys.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = s\n")
    storage.write("k", [PART[:9]])
    storage.close()


def test_a_flipped_bit_comes_through(storage: Any, fault: Any) -> None:
    """Plain HTTP protects no download: the digests of the manifest do, one layer above."""
    fault(action="corrupt", match="^GET")
    found = bytearray(MIB)
    storage.read_into("there", 0, [memoryview(found)])
    assert found != PART[:MIB]


def test_one_renewal_of_no_use_is_told_to_all_requests_in_flight() -> None:
    renewals = Renewals()
    assert [renewals.renew(0, lambda: None) for _ in range(3)] == [True] * 3
    assert [renewals.renew(1, lambda: None) for _ in range(3)] == [False] * 3
    renewals.prove(2)
    assert renewals.renew(1, lambda: None)
