"""What GCS and Azure may answer: every refusal is an error of ours, of the right class."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread
from typing import Any

import pytest
from loopback import AZURE_KEY
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
from ckptstore.storage.open import open_storage

pytestmark = pytest.mark.slow

OPERATIONS: dict[str, Callable[[Any], object]] = {
    "write": lambda storage: storage.write("k", [memoryview(b"x")]),
    "create": lambda storage: storage.create("k", b"x"),
    "read": lambda storage: storage.read("k"),
    "read_into": lambda storage: storage.read_into("k", 0, [memoryview(bytearray(9))]),
    "stat": lambda storage: storage.stat("k"),
    "list": lambda storage: list(storage.list("")),
    "delete": lambda storage: storage.delete(["k"]),
    "copy": lambda storage: storage.copy("k", "l"),
    "write_part": lambda storage: storage.open_parts("k", 17 << 20).write_part(0, [memoryview(bytes(16 << 20))]),
}
ANSWERS = [
    (503, "ServerBusy", StorageThrottled),
    (429, "rateLimitExceeded", StorageThrottled),
    (500, "InternalError", StorageUnavailable),
    (408, "OperationTimedOut", StorageUnavailable),
    (403, "AuthorizationFailure", AccessDenied),
    (507, "QuotaExceeded", StorageFull),
    (400, "InvalidInput", StorageError),
]


class Refusing(ThreadingHTTPServer):
    """Answers everything with one refusal; status 0 resets the connection."""

    daemon_threads = True
    status, code = 503, "ServerBusy"
    together = Barrier(1)
    """The number of requests that are answered at the same time."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Refusing

    def answer(self) -> None:
        if self.server.status == 0:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        length = int(self.headers.get("content-length") or 0)
        while length > 0:
            length -= len(self.rfile.read(min(length, 1 << 20)))
        self.server.together.wait(10)
        code = self.server.code
        if "/storage/v1" in self.path:
            body = json.dumps({"error": {"code": self.server.status, "errors": [{"reason": code}]}}).encode()
        else:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("x-ms-error-code", code)
        self.send_header("content-type", "application/xml" if body.startswith(b"<") else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what matters."""


@pytest.fixture(scope="module")
def refusing() -> Iterator[Refusing]:
    with Refusing(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=["gs", "az"])
def storage(request: pytest.FixtureRequest, refusing: Refusing) -> Iterator[Any]:
    scheme = request.param
    connection = f"AccountName=acc;AccountKey={AZURE_KEY};BlobEndpoint={refusing.url}/acc;"
    options = {"gs": {"token": "anon", "endpoint_url": refusing.url}, "az": {"connection_string": connection}}
    storage = open_storage(f"{scheme}://test/run", storage_options=options[scheme])
    yield storage
    storage.close()


@pytest.mark.parametrize(("status", "code", "expected"), ANSWERS, ids=[str(answer[0]) for answer in ANSWERS])
def test_a_refusal_is_an_error_of_its_class(
    storage: Any, refusing: Refusing, status: int, code: str, expected: type[CkptstoreError]
) -> None:
    refusing.status, refusing.code = status, code
    for name, operation in OPERATIONS.items():
        error = error_of(lambda operation=operation: operation(storage))  # type: ignore[misc]
        assert type(error) is expected, f"{name}: {error!r}"
        assert str(status) in str(error)
        assert AZURE_KEY not in str(error)
        assert "127.0.0.1" not in str(error)


def test_what_is_missing_is_missing(storage: Any, refusing: Refusing) -> None:
    refusing.status = 404
    refusing.code = "notFound" if storage.uri.startswith("gs") else "BlobNotFound"
    for name in ("read", "read_into", "stat", "copy"):
        error = error_of(lambda name=name: OPERATIONS[name](storage))  # type: ignore[misc]
        assert type(error) is FileMissing, f"{name}: {error!r}"
    assert error_of(lambda: storage.delete(["k", "l"])) is None


def test_requests_in_flight_share_one_renewal(refusing: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing.status, refusing.code = 401, "authError"
    monkeypatch.setattr(refusing, "together", Barrier(4))
    options = {"token": "anon", "endpoint_url": refusing.url}
    with closing(open_storage("gs://test/run", storage_options=options)) as storage:
        write = OPERATIONS["write"]
        with ThreadPoolExecutor(4) as pool:
            errors = list(pool.map(lambda _: error_of(lambda: write(storage)), range(4)))
        assert [type(error) for error in errors] == [StorageUnavailable] * 4
        monkeypatch.undo()
        assert type(error_of(lambda: write(storage))) is AccessDenied


def test_a_create_that_meets_another_one_is_false(storage: Any, refusing: Refusing) -> None:
    is_azure = storage.uri.startswith("az")
    refusing.status, refusing.code = (409, "BlobAlreadyExists") if is_azure else (412, "conditionNotMet")
    assert storage.create("k", b"x") is False


def test_a_metadata_service_of_azure_that_times_out_is_asked_again() -> None:
    from azure.core.exceptions import ClientAuthenticationError
    from azure.identity import CredentialUnavailableError

    from ckptstore.storage.cloud import chains

    refused = chains.azure_refusal(ClientAuthenticationError("IMDS timed out"), what="read", key="k")
    assert type(refused) is StorageUnavailable
    absent = CredentialUnavailableError(message="no response from the IMDS endpoint: timed out")
    assert type(chains.azure_refusal(absent, what="read", key="k")) is AccessDenied
