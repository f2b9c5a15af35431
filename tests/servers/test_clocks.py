"""The clocks of Azure, which every shared key signs, and of Google, which every service account's assertion states."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import closing
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
from loopback import AZURE_KEY
from outcomes import error_of

from ckptstore.errors import AccessDenied, StorageUnavailable
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage

pytestmark = pytest.mark.slow

ENGINES = ["native", "fsspec"]
DAY_SECONDS = 86_400.0
SKEW_SECONDS = 900.0
TOO_OLD = (
    "<?xml version='1.0'?><Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate the request. "
    "Make sure the value of Authorization header is formed correctly including the signature.</Message>"
    "<AuthenticationErrorDetail>Request date header too old: '{}'</AuthenticationErrorDetail></Error>"
)
SHORT_LIVED = (
    "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. "
    "Check your iat and exp values in the JWT claim."
)


class Clocked(ThreadingHTTPServer):
    """A container of Azure, and a token service of Google, with a clock."""

    daemon_threads = True
    ahead_seconds = 0.0
    refusals = 0
    """The number of requests to refuse for their date, whatever it is."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def refuses(self, signed_seconds: float) -> bool:
        """Whether a request with such a date is refused."""
        self.refusals -= 1
        return self.refusals >= 0 or abs(signed_seconds - time.time() - self.ahead_seconds) > SKEW_SECONDS


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Clocked

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/token":
            claims = parse_qs(body.decode())["assertion"][0].split(".")[1]
            issued = json.loads(base64.urlsafe_b64decode(claims + "=="))["iat"]
            if self.server.refuses(issued):
                self.reply(400, json.dumps({"error": "invalid_grant", "error_description": SHORT_LIVED}).encode())
            else:
                self.reply(200, json.dumps({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}).encode())
            return
        path, date = self.path.partition("?")[0], self.headers["x-ms-date"] or self.headers["date"]
        if self.server.refuses(parsedate_to_datetime(date).timestamp()):
            self.reply(403, TOO_OLD.format(date).encode(), {"x-ms-error-code": "AuthenticationFailed"})
        elif self.command == "PUT":
            self.server.blobs[path] = body
            self.reply(201)
        else:
            blob = self.server.blobs[path]
            span = {"content-range": f"bytes 0-{len(blob) - 1}/{len(blob)}"} if "x-ms-range" in self.headers else {}
            self.reply(206 if span else 200, blob, span)

    do_GET = do_PUT = do_POST = do_HEAD = answer

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = {"content-type": "application/json" if body.startswith(b"{") else "application/xml"}
        more |= {"etag": '"1"', "last-modified": formatdate(usegmt=True), "x-ms-blob-type": "BlockBlob"}
        for name, value in {**more, **(headers or {}), "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() + self.server.ahead_seconds, usegmt=True)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what matters."""


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    with Clocked() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def private_key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    made = rsa.generate_private_key(65537, 2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return made.private_bytes(*form).decode()


def in_azure(clocked: Clocked, engine: str) -> Storage:
    connection = f"AccountName=acc;AccountKey={AZURE_KEY};BlobEndpoint={clocked.url}/acc;"
    return open_storage("az://test/run", storage_options={"connection_string": connection}, engine=engine)


def in_google(clocked: Clocked, engine: str, fake_gcs: Any, private_key: str) -> Storage:
    account = {"type": "service_account", "client_email": "trainer@project.example", "private_key": private_key}
    token = {**account, "token_uri": f"{clocked.url}/token"}
    options = {"token": token, "endpoint_url": fake_gcs.url}
    return open_storage("gs://test/clock", storage_options=options, engine=engine)


def tried(storage: Storage, times: int = 4) -> list[Any]:
    """What so many tries to write and to read end with."""
    data = [memoryview(b"1")]
    errors = [error_of(lambda: storage.write("k", data)) for _ in range(times)]
    return errors if errors[-1] else [*errors, error_of(lambda: storage.read("k"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signature_for_azure_that_grew_old_is_made_anew(clocked: Clocked, engine: str) -> None:
    with closing(in_azure(clocked, engine)) as storage:
        clocked.refusals = 1
        errors = tried(storage)
        assert type(errors[0]) is StorageUnavailable
        assert not any(errors[1:])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ahead_seconds", [DAY_SECONDS, -DAY_SECONDS])
def test_the_clock_of_azure_counts(clocked: Clocked, engine: str, ahead_seconds: float) -> None:
    with closing(in_azure(clocked, engine)) as storage:
        clocked.ahead_seconds = ahead_seconds
        errors = tried(storage)
        if engine != "fsspec":  # adlfs signs by the clock of this machine alone
            assert not any(errors[-2:])
            return
        assert type(errors[-1]) is AccessDenied
        assert "clock of this machine" in str(errors[-1])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_assertion_for_google_that_grew_old_is_made_anew(
    clocked: Clocked, engine: str, fake_gcs: Any, private_key: str
) -> None:
    with closing(in_google(clocked, engine, fake_gcs, private_key)) as storage:
        clocked.refusals = 1
        errors = tried(storage)
        assert type(errors[0]) is StorageUnavailable or engine == "fsspec"  # gcsfs tries again by itself
        assert not any(errors[1:])


@pytest.mark.parametrize("engine", ["native", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_a_clock_that_google_does_not_take_is_named(
    clocked: Clocked, engine: str, fake_gcs: Any, private_key: str
) -> None:
    with closing(in_google(clocked, engine, fake_gcs, private_key)) as storage:
        clocked.ahead_seconds = DAY_SECONDS
        error = tried(storage, 2)[-1]
        assert type(error) is AccessDenied
        assert "clock of this machine" in str(error)
