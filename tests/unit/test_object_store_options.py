"""fsspec's names and the environment, as the native engine understands them. Nothing is asked of any server."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    InvalidInput,
    StorageError,
    StorageFull,
    StorageThrottled,
    StorageUnavailable,
)
from ckptstore.storage.base import Unsupported
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.aws_settings import AwsSettings, keys_of
from ckptstore.storage.cloud.azure import azure_names, azure_url, from_connection_string
from ckptstore.storage.cloud.bodies import Filling, ViewsBody, part_bytes
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri

GIB = 1 << 30


def settings_of(uri: str, options: dict[str, Any] | None = None, **environ: str) -> AwsSettings:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        return AwsSettings(parse_uri(uri), options or {})


def test_the_names_of_s3fs() -> None:
    options = {
        "key": "K",
        "secret": "S",
        "token": "T",
        "endpoint_url": "http://127.0.0.1:9000/",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"read_timeout": 5, "s3": {"addressing_style": "path"}, "retries": {"mode": "standard"}},
    }
    found = settings_of("s3://b/x", options)
    assert (found.address.endpoint_url, found.address.region, found.address.virtual) == (
        *("http://127.0.0.1:9000", "eu-west-1"),
        False,
    )
    assert found.client().meta.config.read_timeout == 5
    assert keys_of(found.client()) == ("K", "S", "T")


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({"AWS_ENDPOINT_URL": "http://one"}, "http://one"),
        ({"AWS_ENDPOINT_URL": "http://one", "AWS_ENDPOINT_URL_S3": "http://two"}, "http://two"),
        ({"AWS_REGION": "eu-west-3"}, "https://s3.eu-west-3.amazonaws.com"),
        ({"AWS_DEFAULT_REGION": "eu-west-3"}, "https://s3.eu-west-3.amazonaws.com"),
        ({"AWS_DEFAULT_REGION": "other", "AWS_REGION": "eu-west-3"}, "https://s3.eu-west-3.amazonaws.com"),
        ({}, "https://s3.amazonaws.com"),
    ],
)
def test_the_endpoint_of_the_environment(environ: dict[str, str], endpoint: str) -> None:
    address = settings_of("s3://bucket/x", **environ).address
    assert (address.endpoint_url, address.virtual) == (endpoint, endpoint.startswith("https"))


def test_a_virtual_host_has_the_bucket_in_the_endpoint() -> None:
    options = {"endpoint_url": "https://s3.example.com", "config_kwargs": {"s3": {"addressing_style": "virtual"}}}
    assert settings_of("s3://bucket/x", options).address.virtual
    assert not settings_of("s3://b.with.dots/x").address.virtual
    assert not settings_of("s3://Case_kept/x").address.virtual


@pytest.mark.parametrize(
    ("endpoint", "when", "unsigned", "checksum"),
    [
        ("http://h", "when_supported", True, True),
        ("http://h", "when_required", False, False),
        ("https://h", "when_supported", True, True),
        ("https://h", "when_required", True, False),
    ],
)
def test_a_payload_is_unsigned_only_where_something_else_protects_it(
    endpoint: str, when: str, unsigned: bool, checksum: bool
) -> None:
    options = {"endpoint_url": endpoint, "config_kwargs": {"request_checksum_calculation": when}}
    for found in (
        settings_of("s3://b/x", options),
        settings_of("s3://b/x", {"endpoint_url": endpoint}, AWS_REQUEST_CHECKSUM_CALCULATION=when),
    ):
        assert found.client().meta.config.s3["payload_signing_enabled"] is not unsigned
        assert found.sends_checksum == checksum


def test_gcs_emulators_are_asked_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = {"endpoint": "h:1 (endpoint_url)", "credentials": "none: anonymous", "proxy": "none"}
    assert open_storage("gs://b/x", storage_options={"endpoint_url": "http://h:1/"}).resolved() == nobody
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "h:1")
    assert open_storage("gs://b/x").resolved()["credentials"] == "none: anonymous"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "default")
    assert open_storage("gs://b/x").resolved()["credentials"] == "the SDK's own chain"


def test_the_names_of_adlfs() -> None:
    for uri, options in (("az://c/x", {"account_name": "a"}), ("abfs://c@a.dfs.core.windows.net/x", {})):
        assert azure_url(azure_names(parse_uri(uri), options)) == "https://a.blob.core.windows.net"


def test_the_account_of_a_uri_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    location = parse_uri("abfs://c@acc.dfs.core.windows.net/x")
    with monkeypatch.context() as patch:
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
        assert azure_names(location, {})["account_name"] == "acc"
    text = "DefaultEndpointsProtocol=https;AccountName=other;AccountKey=c2VjcmV0"
    refused = "names the account acc, its options name other"
    for options in ({"account_name": "other"}, {"connection_string": text}):
        with pytest.raises(InvalidInput, match=refused):
            azure_names(location, options)
    assert azure_names(location, {"connection_string": text.replace("other", "acc")})["account_name"] == "acc"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    with pytest.raises(InvalidInput, match=refused):
        azure_names(location, {})


def test_connection_strings() -> None:
    text = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==;EndpointSuffix=core.windows.net"
    whole = {"account_name": "a", "account_key": "k==", "endpoint": "https://a.blob.core.windows.net"}
    assert from_connection_string(text) == whole
    local = from_connection_string("AccountName=a;AccountKey=k;BlobEndpoint=http://127.0.0.1:1/a;")
    assert local["endpoint"] == "http://127.0.0.1:1/a"
    signed = from_connection_string("BlobEndpoint=https://acc.blob.core.windows.net;SharedAccessSignature=sv=1&sig=x")
    assert signed["sas_token"] == "sv=1&sig=x"
    assert signed["account_name"] == "acc"
    assert azure_url(azure_names(parse_uri("az://c/x"), {"connection_string": text})) == whole["endpoint"]
    assert from_connection_string("UseDevelopmentStorage=true")["endpoint"].startswith("http://127.0.0.1:10000/")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "RequestTimeout", StorageUnavailable),
        (400, "BadDigest", StorageUnavailable),
        (400, "XAmzContentSHA256Mismatch", StorageUnavailable),
        (400, "ExpiredToken", AccessDenied),
        (503, "SlowDown", StorageThrottled),
        (503, "", StorageThrottled),
        (429, "", StorageThrottled),
        (403, "userRateLimitExceeded", StorageThrottled),
        (500, "InternalError", StorageUnavailable),
        (400, "InvalidArgument", StorageError),
        (404, "NoSuchBucket", StorageError),
        (408, "", StorageUnavailable),
        (416, "InvalidRange", CheckpointDamaged),
        (418, "", StorageError),
        (501, "NotImplemented", Unsupported),
        (507, "", StorageFull),
        (599, "", StorageUnavailable),
        (None, "", StorageUnavailable),
    ],
)
def test_statuses(status: int | None, code: str, expected: type[Exception]) -> None:
    error = foreign.from_status(status, code, key="k", what="read")
    assert type(error) is expected
    assert "k" in str(error)


def test_parts_stay_below_every_limit() -> None:
    assert part_bytes(1) == part_bytes((128 << 20) - 1) == 16 << 20
    assert part_bytes(128 << 20) == part_bytes(100 * GIB) == 32 << 20
    for size_bytes in (100 * GIB, 1000 * GIB, 5000 * GIB):
        size = part_bytes(size_bytes)
        assert size % (1 << 20) == 0
        assert -(-size_bytes // size) <= 10_000
        assert size < 5 * GIB


def test_views_are_sent_as_they_are_and_again() -> None:
    data = bytes(range(256)) * 10_000
    body = ViewsBody([memoryview(data)[:5], memoryview(b""), memoryview(data)[5:]])
    assert len(body) == len(data)
    for _ in range(2):
        body.seek(0)
        assert b"".join(iter(lambda: body.read(10), b"")) == data
        assert body.tell() == len(data)
    for size in (7, 10_000, 1 << 20, len(data) + 1):
        body.seek(0)
        buffer, found = bytearray(size), bytearray()
        while count := body.readinto(buffer):
            found += buffer[:count]
        assert found == data
        assert not body.readinto(buffer)
    assert body.seek(0, 2) == len(data)
    assert body.read() == b""


@pytest.mark.parametrize("sizes", [(5,), (0, 2, 0, 3), (1,) * 5])
def test_views_are_filled_by_any_chunks(sizes: tuple[int, ...]) -> None:
    buffers = [bytearray(size) for size in sizes]
    filling = Filling([memoryview(buffer) for buffer in buffers], key="k")
    for chunk in (b"a", b"bcd", b"e"):
        filling.take(chunk)
    filling.end(file_bytes=5, end_offset=5)
    assert b"".join(buffers) == b"abcde"
    with pytest.raises(StorageUnavailable):
        filling.take(b"f")


def test_a_short_answer_is_damage_only_when_the_file_is_short() -> None:
    filling = Filling([memoryview(bytearray(5))], key="k")
    filling.take(b"abc")
    with pytest.raises(CheckpointDamaged, match="3 bytes, 5"):
        filling.end(file_bytes=3, end_offset=5)
    for file_bytes in (5, None):
        with pytest.raises(StorageUnavailable):
            filling.end(file_bytes=file_bytes, end_offset=5)


def test_options_inside_of_an_option_are_no_text() -> None:
    with pytest.raises(InvalidInput, match=r"client_kwargs'\] is a str, and has options inside of it"):
        settings_of("s3://bucket/run", {"client_kwargs": '{"region_name": "eu-west-1"}'})
