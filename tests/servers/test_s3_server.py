"""The S3 server that the other tests lean on: what it stores, what it refuses, and every fault, seen by boto3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from ckptstore.testing.s3_server import Fault, Link, S3Server, s3_server

pytestmark = pytest.mark.slow

boto3 = pytest.importorskip("boto3")

MIB = 1 << 20
BODY = os.urandom(6 * MIB)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server(buckets=["b"], md5_etags=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: S3Server) -> Iterator[None]:
    yield
    server.faults.clear()
    server.log.clear()


def client(server: S3Server, *, tries: int = 1, read_timeout: float = 10.0) -> Any:
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(
            retries={"total_max_attempts": tries, "mode": "standard"},
            read_timeout=read_timeout,
            s3={"addressing_style": "path"},
        ),
    )


def error_of(call: Any) -> str:
    """The S3 code, or the class, of the error that a call ends in; "" if it does not."""
    try:
        call()
    except Exception as error:
        response = getattr(error, "response", None)
        return response["Error"]["Code"] if response else type(error).__name__
    return ""


def test_ranges_and_conditions(server: S3Server) -> None:
    s3 = client(server)
    etag = s3.put_object(Bucket="b", Key="a/ä b+%", Body=b"0123456789")["ETag"]
    read = lambda **options: s3.get_object(Bucket="b", Key="a/ä b+%", **options)["Body"].read()  # noqa: E731
    assert read() == b"0123456789"
    assert read(Range="bytes=2-4", IfMatch=etag) == b"234"
    assert read(Range="bytes=-3") == b"789"
    assert error_of(lambda: read(IfMatch='"other"')) == "PreconditionFailed"
    assert error_of(lambda: read(Range="bytes=10-")) == "InvalidRange"
    assert error_of(lambda: s3.get_object(Bucket="b", Key="none")) == "NoSuchKey"


def test_multipart(server: S3Server) -> None:
    s3 = client(server)
    upload = s3.create_multipart_upload(Bucket="b", Key="big")["UploadId"]
    send = lambda number, body: s3.upload_part(  # noqa: E731
        Bucket="b", Key="big", UploadId=upload, PartNumber=number, Body=body
    )["ETag"]
    parts = [{"PartNumber": n, "ETag": send(n, body)} for n, body in ((2, b"end"), (1, BODY))][::-1]
    assert [item["UploadId"] for item in s3.list_multipart_uploads(Bucket="b", Prefix="bi")["Uploads"]] == [upload]
    assert error_of(lambda: s3.head_object(Bucket="b", Key="big")) == "404"
    finish = lambda listed: s3.complete_multipart_upload(  # noqa: E731
        Bucket="b", Key="big", UploadId=upload, MultipartUpload={"Parts": listed}, IfNoneMatch="*"
    )
    assert error_of(lambda: finish(parts[::-1])) == "InvalidPartOrder"
    assert error_of(lambda: finish([{**parts[0], "ETag": '"00"'}])) == "InvalidPart"
    finish(parts)
    assert s3.get_object(Bucket="b", Key="big")["Body"].read() == BODY + b"end"
    assert error_of(lambda: finish(parts)) == "NoSuchUpload"


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_a_wrong_checksum_is_refused(server: S3Server, algorithm: str) -> None:
    s3 = client(server)
    s3.put_object(Bucket="b", Key="sum", Body=b"right", ChecksumAlgorithm=algorithm)
    value = s3.head_object(Bucket="b", Key="sum", ChecksumMode="ENABLED")[f"Checksum{algorithm}"]
    wrong = {f"Checksum{algorithm}": value}
    assert error_of(lambda: s3.put_object(Bucket="b", Key="sum", Body=b"wrong", **wrong)) == "BadDigest"
    assert s3.get_object(Bucket="b", Key="sum")["Body"].read() == b"right"


def test_a_target_may_be_absolute(server: S3Server) -> None:
    """As the AWS SDK for C++ sends it."""
    client(server).put_object(Bucket="b", Key="absolute", Body=b"here")
    connection = HTTPConnection(server.endpoint_url.removeprefix("http://"))
    connection.request("GET", f"{server.endpoint_url}/b/absolute")
    assert connection.getresponse().read() == b"here"
    connection.close()


def test_the_log_counts_the_bytes_that_were_sent_and_a_head_sends_none(server: S3Server) -> None:
    s3 = client(server)
    s3.put_object(Bucket="b", Key="seen", Body=b"0123456789")
    s3.head_object(Bucket="b", Key="seen")
    s3.get_object(Bucket="b", Key="seen")["Body"].read()
    assert [request.sent_bytes for request in server.log[-2:]] == [0, 10]


def test_pages(server: S3Server) -> None:
    s3 = client(server)
    names = [f"pages/{n // 10}/{n:02d}" for n in range(30)]
    for name in names:
        s3.put_object(Bucket="b", Key=name, Body=b"x")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="b", Prefix="pages/", PaginationConfig={"PageSize": 7})
    assert [item["Key"] for page in pages for item in page["Contents"]] == names
    folders = s3.list_objects_v2(Bucket="b", Prefix="pages/", Delimiter="/")["CommonPrefixes"]
    assert [folder["Prefix"] for folder in folders] == ["pages/0/", "pages/1/", "pages/2/"]
    s3.delete_objects(Bucket="b", Delete={"Objects": [{"Key": name} for name in names]})
    assert s3.list_objects_v2(Bucket="b", Prefix="pages/")["KeyCount"] == 0


@pytest.mark.parametrize(
    ("fault", "tries", "outcome"),
    [
        (Fault(action="status", match="^PUT", times=2), 4, ""),
        (Fault(action="status", match="^PUT"), 1, "SlowDown"),
        (Fault(action="status", match="^PUT", status=403, code="AccessDenied"), 4, "AccessDenied"),
        (Fault(action="reset", match="^PUT"), 1, "ConnectionClosedError"),
        (Fault(action="reset", match="^PUT", after_bytes=MIB), 1, "ConnectionClosedError"),
        (Fault(action="reset", match="^PUT", after_bytes=MIB), 4, ""),
        (Fault(action="lose_answer", match="^PUT"), 1, "ConnectionClosedError"),
        (Fault(action="delay", match="^PUT", seconds=0.1), 1, ""),
        (Fault(action="bandwidth", match="^PUT", bytes_per_second=60e6), 1, ""),
    ],
    ids=lambda value: value.action if isinstance(value, Fault) else str(value),
)
def test_faults_of_uploads(server: S3Server, fault: Fault, tries: int, outcome: str) -> None:
    server.faults.add(fault)
    s3 = client(server, tries=tries)
    assert error_of(lambda: s3.put_object(Bucket="b", Key=f"f-{fault.action}", Body=BODY)) == outcome
    assert server.faults.pending == 0
    stored = not error_of(lambda: client(server).head_object(Bucket="b", Key=f"f-{fault.action}"))
    assert stored or fault.action in ("status", "reset")
    if fault.action == "lose_answer":
        assert stored
    assert server.stats["in_flight"] == 0


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Fault(action="truncate", match="^GET", after_bytes=MIB), "ResponseStreamingError"),
        (Fault(action="corrupt", match="^GET"), "FlexibleChecksumError"),
        (Fault(action="stall", match="^GET"), "ReadTimeoutError"),
        (Fault(action="bandwidth", match="^GET", bytes_per_second=60e6), ""),
    ],
    ids=lambda value: value.action if isinstance(value, Fault) else "",
)
def test_faults_of_downloads(server: S3Server, fault: Fault, outcome: str) -> None:
    client(server).put_object(Bucket="b", Key="down", Body=BODY)
    server.faults.add(fault)
    s3 = client(server, read_timeout=1.0 if fault.action == "stall" else 10.0)
    assert error_of(lambda: s3.get_object(Bucket="b", Key="down", ChecksumMode="ENABLED")["Body"].read()) == outcome
    assert s3.get_object(Bucket="b", Key="down")["Body"].read() == BODY


def test_only_known_access_keys() -> None:
    with s3_server(buckets=["b"], access_keys=["other"]) as server:
        assert error_of(lambda: client(server).list_objects_v2(Bucket="b")) == "InvalidAccessKeyId"


def test_sizes_alone() -> None:
    with s3_server(buckets=["b"], keep_bodies=False, verify=False) as server:
        s3 = client(server)
        s3.put_object(Bucket="b", Key="k", Body=BODY)
        assert s3.get_object(Bucket="b", Key="k")["Body"].read() == bytes(len(BODY))


def test_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "ckptstore.testing.s3_server", "--port", "0", "--bucket", "b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            endpoint = process.stdout.readline().strip()
            rules = json.dumps([{"action": "status", "match": "^PUT", "status": 507, "code": "Full"}]).encode()
            urllib.request.urlopen(f"{endpoint}/_control/faults", data=rules).close()
            put = urllib.request.Request(f"{endpoint}/b/k", data=b"x", method="PUT")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(put)
            caught.value.close()
            assert caught.value.code == 507
            urllib.request.urlopen(put).close()
            with urllib.request.urlopen(f"{endpoint}/_control/stats") as answer:
                assert json.load(answer)["objects"] == {"b": 1}
        finally:
            process.terminate()


def test_a_server_that_keeps_nothing_large_keeps_what_is_small_and_comes_in_chunks() -> None:
    """Bodies of unknown size go through memory that a connection uses again and again."""
    with s3_server(buckets=["b"], keep_bodies=False) as server:
        connection = HTTPConnection(server.endpoint_url.removeprefix("http://"))

        def put(key: str, body: bytes) -> None:
            pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
            connection.request("PUT", f"/b/{key}", body=pieces, encode_chunked=True)
            connection.getresponse().read()

        small = {f"small{number}": bytes([number]) * 5000 for number in range(3)}
        for number, (key, body) in enumerate(small.items()):
            put(key, body)
            put("large", bytes([9]) * (1 + number) * 500_000)
        for key, body in small.items():
            connection.request("GET", f"/b/{key}")
            assert connection.getresponse().read() == body
        assert server.objects.buckets["b"]["large"].size_bytes == 1_500_000
        connection.close()


def test_all_clients_share_the_line_to_a_server_each_way() -> None:
    with s3_server(buckets=["b"]) as server:
        server.link = Link(bytes_per_second=20e6, latency_seconds=0.05)
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda key: client(server).put_object(Bucket="b", Key=key, Body=BODY), "ab"))
        assert time.monotonic() - began > 2 * len(BODY) / 20e6
        began = time.monotonic()
        assert client(server).get_object(Bucket="b", Key="a")["Body"].read() == BODY
        assert time.monotonic() - began > len(BODY) / 20e6 + 0.05 - 256 * 1024 / 20e6, "the last piece is on its way"
        began = time.monotonic()
        client(server).head_object(Bucket="b", Key="b")
        assert time.monotonic() - began > 0.05
        urllib.request.urlopen(f"{server.endpoint_url}/_control/stats", timeout=10).close()
        assert server.stats["requests"] == 4, "what controls the server is none of its requests"


@pytest.mark.parametrize("wrong", [{"bytes_per_second": 0.0}, {"latency_seconds": -1.0}])
def test_no_line_is_that_slow(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Link(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "lose-answer"},
        {"action": "reset", "times": 0},
        {"action": "reset", "probability": 0.0},
        {"action": "status", "status": 999},
        {"action": "bandwidth", "bytes_per_second": 0.0},
        {"action": "delay"},
    ],
    ids=lambda wrong: " ".join(map(str, wrong.values())),
)
def test_a_rule_that_does_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{wrong['action']}"):
        Fault(**wrong)


def test_a_rule_is_not_used_up_for_the_next_server(server: S3Server) -> None:
    rule = Fault(action="status", match="^HEAD", status=500)
    for _ in range(2):
        server.faults.add(rule)
        assert error_of(lambda: client(server).head_bucket(Bucket="b")) == "500"
    assert server.faults.pending == 0
