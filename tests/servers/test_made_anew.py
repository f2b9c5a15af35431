"""Refusals that the same request, made anew, would not get: old signatures, other clocks, replaced keys."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
from outcomes import error_of

import ckptstore
from ckptstore.errors import AccessDenied, StorageUnavailable
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3.messages import HttpRequest
from ckptstore.testing.s3.objects import S3Error
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

pytestmark = pytest.mark.slow

MIB = 1 << 20
ENGINES = ["native", "fsspec"]
DAY_SECONDS = 86_400.0
LIFE_SECONDS = 3600.0
numbers = itertools.count()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server(buckets=["test"]) as server:
        yield server


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.05")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "large.bin").write_bytes(os.urandom(33 * MIB))
    (directory / "small.bin").write_bytes(os.urandom(1000))
    return directory


OLD = {
    "a small file": "^PUT .*small.bin",
    "a part": "^PUT .*large.bin",
    "the end of an upload": "^POST .*uploadId",
    "the manifest": "^PUT .*ckptstore.json",
    "the record": "^PUT .*log/",
    "the newest record": "^GET .*log/",
    "a listing": "^GET .*list-type",
}


def test_a_signature_that_grew_old_is_made_anew(server: S3Server, engine: str, files: Path) -> None:
    options = server.storage_options
    with ckptstore.open_store("s3://test/old", storage_options=options, engine=engine) as store:
        store.save_directory(0, files)
        for step, (name, match) in enumerate(OLD.items(), start=1):
            server.faults.replace([Fault(action="status", status=403, code="RequestTimeTooSkewed", match=match)])
            checkpoint = store.save_directory(step, files)
            assert server.faults.pending == 0 or engine == "fsspec", name  # which reads in another way
            assert checkpoint.verify().ok, name


@pytest.mark.parametrize("ahead_seconds", [DAY_SECONDS, -DAY_SECONDS])
def test_the_clock_of_the_server_counts(server: S3Server, engine: str, files: Path, ahead_seconds: float) -> None:
    with ckptstore.open_store("s3://test/clock", storage_options=server.storage_options, engine=engine) as store:
        store.save_directory(0, files)
        server.service.clock_ahead_seconds = ahead_seconds
        assert store.save_directory(1, files).verify().ok
        server.service.clock_ahead_seconds = 0.0
        assert store.save_directory(2, files).verify().ok
    server.service.clock_ahead_seconds = ahead_seconds
    with closing(open_storage("s3://test/clock", storage_options=server.storage_options, engine=engine)) as storage:
        errors = [error_of(lambda: storage.stat("store.json")) for _ in range(3)]  # a response without a body
        assert errors[-1] is None


def test_a_clock_that_cannot_be_corrected_is_named(server: S3Server, engine: str) -> None:
    server.faults.add(Fault(action="status", status=403, code="RequestTimeTooSkewed", times=None))
    with closing(open_storage("s3://test/never", storage_options=server.storage_options, engine=engine)) as storage:
        errors = [error_of(lambda: storage.write("k", [memoryview(b"1")])) for _ in range(4)]
    assert type(errors[0]) is StorageUnavailable
    assert type(errors[-1]) is AccessDenied
    assert "clock of this machine" in str(errors[-1])


class Rotation:
    """Keys in a file, of which the server takes the newest alone, each for so many requests that it answers."""

    def __init__(self, service: Any, write: Callable[[str], object], *, every: int) -> None:
        self.service, self.write, self.every = service, write, every
        self.accept = service._authorize
        self.requests = self.rotations = 0
        self.rotate()

    def rotate(self) -> None:
        self.rotations += 1
        self.write(f"AKIA{self.rotations}")
        self.service.access_keys = frozenset([f"AKIA{self.rotations}"])

    def authorize(self, request: HttpRequest) -> None:
        self.accept(request)
        self.requests += 1  # refused ones count for nothing: many of them would use up keys that nobody has had
        if self.requests % self.every == 0:
            self.rotate()


class Expiring(Rotation):
    """The same, with another word for it."""

    def authorize(self, request: HttpRequest) -> None:
        try:
            super().authorize(request)
        except S3Error:
            raise S3Error(400, "ExpiredToken") from None


def in_a_file(path: Path, key: str) -> None:
    there = path.with_suffix(".new")
    there.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
    there.replace(path)


def by_a_process(path: Path, key: str) -> None:
    there = path.with_suffix(".new")
    there.write_text(json.dumps({"Version": 1, "AccessKeyId": key, "SecretAccessKey": "s"}))
    there.replace(path)


def by_a_token(path: Path, key: str) -> None:
    there = path.with_suffix(".new")
    soon = datetime.now(UTC) + timedelta(seconds=LIFE_SECONDS)
    there.write_text(
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId><SessionToken>t</SessionToken>"
        f"<SecretAccessKey>s</SecretAccessKey><Expiration>{soon.isoformat()}</Expiration></Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    there.replace(path)


Keys = Callable[[Callable[[Path, str], None], str], None]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    """Writes a key where clients find it by a source; for tokens, behind a security token service."""
    path, token, config = tmp_path / "keys", tmp_path / "token", tmp_path / "config"

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
            assert asked["WebIdentityToken"] == ["a token"]
            body = path.read_bytes()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """The test says what matters."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as service:
        Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        token.write_text("a token")
        config.write_text(f"[default]\ncredential_process = /bin/cat {path}\n")
        variables = {
            in_a_file: {"AWS_SHARED_CREDENTIALS_FILE": str(path)},
            by_a_process: {"AWS_CONFIG_FILE": str(config)},
            by_a_token: {
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer",
                "AWS_ENDPOINT_URL_STS": f"http://127.0.0.1:{service.server_address[1]}",
            },
        }

        def write(source: Callable[[Path, str], None], key: str) -> None:
            source(path, key)
            for name, value in variables[source].items():
                monkeypatch.setenv(name, value)

        yield write
        service.shutdown()


@pytest.mark.parametrize(
    ("engine", "source", "rotation"),
    [
        ("native", in_a_file, Rotation),
        ("native", by_a_token, Rotation),
        ("native", by_a_process, Expiring),
        ("fsspec", by_a_token, Expiring),
        *(
            pytest.param(engine, source, rotation, marks=pytest.mark.slow)
            for engine in ENGINES
            for source in (in_a_file, by_a_process, by_a_token)
            for rotation in (Rotation, Expiring)
        ),
    ],
    indirect=["engine"],
)
def test_keys_are_replaced_several_times_in_one_save(
    server: S3Server,
    engine: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: Keys,
    source: Callable[[Path, str], None],
    rotation: type[Rotation],
) -> None:
    rotating = rotation(server.service, lambda key: keys(source, key), every=40)
    monkeypatch.setattr(server.service, "_authorize", rotating.authorize)
    options = {name: value for name, value in server.storage_options.items() if name not in ("key", "secret")}
    for number in range(80):
        (files / f"f{number}.bin").write_bytes(os.urandom(100))
    with ckptstore.open_store("s3://test/keys", storage_options=options, engine=engine) as store:
        before = rotating.rotations
        store.save_directory(0, files)
        assert rotating.rotations >= before + 2, rotating.requests
        assert store.save_directory(1, files).verify().ok


@pytest.mark.parametrize("source", [in_a_file, by_a_token])
def test_a_refusal_without_a_reason(
    server: S3Server, engine: str, keys: Keys, source: Callable[[Path, str], None]
) -> None:
    """S3 gives none to HEAD: whether other keys may help shows in an answer to GET."""
    options = {name: value for name, value in server.storage_options.items() if name not in ("key", "secret")}
    keys(source, "")
    with closing(open_storage("s3://test/head", storage_options=options, engine=engine)) as storage:
        for number, size_bytes in enumerate((1, 0)):
            keys(source, f"AKIA{number}")
            server.service.access_keys = frozenset([f"AKIA{number}"])
            if number:
                assert type(error_of(lambda: storage.stat("0"))) is StorageUnavailable
            storage.write(str(number), [memoryview(bytes(size_bytes))])
            assert storage.stat(str(number)).size_bytes == size_bytes
        server.faults.add(Fault(action="status", status=403, code="AccessDenied", times=None))
        assert type(error_of(lambda: storage.stat("0"))) is AccessDenied


def test_keys_that_are_gone_for_a_moment(
    server: S3Server, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes the file anew may empty it first: nobody is told that there are no credentials."""
    keys = tmp_path / "keys"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    in_a_file(keys, "AKIA1")
    server.service.access_keys = frozenset(["AKIA1"])
    options = {"endpoint_url": server.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
    with closing(open_storage("s3://test/gone", storage_options=options, engine=engine)) as storage:
        storage.write("k", [memoryview(b"1")])
        server.service.access_keys = frozenset(["AKIA2"])
        for half in ("", "[default]\naws_access_key_id = AKIA2\n", "[default"):
            keys.write_text(half)
            assert type(error_of(lambda: storage.write("k", [memoryview(b"2")]))) is StorageUnavailable, half
        in_a_file(keys, "AKIA2")
        storage.write("k", [memoryview(b"2")])
        assert sys.getsizeof(storage.read("k"))
