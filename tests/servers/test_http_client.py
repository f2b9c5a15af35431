"""HTTP on our own sockets, with TLS and without: bodies of any shape, servers that break off, stand still or refuse,
certificates and proxies that are refused."""

from __future__ import annotations

import itertools
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from loopback import answering

from ckptstore.errors import InvalidInput, StorageError, StorageUnavailable
from ckptstore.storage.cloud.wire.http_client import _HEAD_BYTES as HEAD_BYTES
from ckptstore.storage.cloud.wire.http_client import HttpClient
from ckptstore.storage.cloud.wire.line import trusting
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3.certificates import make_certificates, serving
from ckptstore.testing.s3_server import S3Server, s3_server

pytestmark = pytest.mark.slow

MIB = 1 << 20
DATA = memoryview(os.urandom(9 * MIB + 17))
numbers = itertools.count()


class Echo(BaseHTTPRequestHandler):
    """Gives back what was put, the way that the path asks for."""

    protocol_version = "HTTP/1.1"
    stored = b""
    connections: ClassVar[list[object]] = []

    def setup(self) -> None:
        super().setup()
        self.connections.append(self.connection)

    def do_PUT(self) -> None:
        type(self).stored = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for start in range(0, len(self.stored), 3 * MIB):
                chunk = self.stored[start : start + 3 * MIB]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
            return
        if self.path == "/until-close":
            self.send_header("connection", "close")
        else:
            self.send_header("content-length", str(len(self.stored)))
        self.end_headers()
        self.wfile.write(self.stored)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, certificate: Path) -> ssl.SSLContext | None:
    """The context of the servers of a test, None without TLS."""
    return serving(certificate) if request.param == "https" else None


@pytest.fixture
def echo(tls: ssl.SSLContext | None) -> Iterator[str]:
    Echo.connections.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def client_of(certificate: Path, read_seconds: float = 5, **more: Any) -> HttpClient:
    return HttpClient(connect_seconds=5, read_seconds=read_seconds, trust=lambda: trusting(str(certificate)), **more)


@pytest.fixture
def http(certificate: Path) -> Iterator[HttpClient]:
    client = client_of(certificate)
    yield client
    client.close()


Script = Callable[[socket.socket], None]


@contextmanager
def scripted(tls: ssl.SSLContext | None, *scripts: Script) -> Iterator[str]:
    """A server whose first connection goes through the first script, and so on; then it is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for script in scripts:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a reset drops what was not sent yet
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            with connection:
                script(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def head_of(connection: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(1 << 16)
    return found


def put(http: HttpClient, url: str, views: list[memoryview]) -> int:
    length = str(sum(map(len, views)))
    with http.send("PUT", url, {"Content-Length": length}, views) as answer:
        answer.read()
        return answer.status


def got(http: HttpClient, url: str, size_bytes: int, piece_bytes: int) -> bytearray:
    found = bytearray(size_bytes)
    with http.send("GET", url, {}, ()) as answer, memoryview(found) as view:
        start = 0
        while count := answer.readinto(view[start : start + piece_bytes]):
            start += count
    return found


EDGES = [0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, len(DATA)]


@pytest.mark.parametrize("way", ["length", "chunked", "until-close"])
@pytest.mark.parametrize("size_bytes", EDGES)
def test_a_body_comes_back_as_it_was_sent(http: HttpClient, echo: str, way: str, size_bytes: int) -> None:
    assert put(http, f"{echo}/x", [DATA[:1], DATA[1:1], DATA[1:size_bytes]] if size_bytes else []) == 200
    for piece_bytes in (HEAD_BYTES + 1, MIB, len(DATA)):
        assert got(http, f"{echo}/{way}", size_bytes, piece_bytes) == DATA[:size_bytes]
    if way != "until-close":
        assert len(Echo.connections) == 1, "the connection is used again"


def test_a_body_that_was_not_read_takes_its_connection_along(http: HttpClient, echo: str) -> None:
    put(http, f"{echo}/x", [DATA])
    http.send("GET", f"{echo}/x", {}, ()).close()
    assert got(http, f"{echo}/x", len(DATA), MIB) == DATA
    assert len(Echo.connections) == 2


def test_a_connection_that_the_server_has_closed_is_not_used(http: HttpClient, tls: ssl.SSLContext | None) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    def once(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(answer)

    with scripted(tls, once, once) as url:
        for _ in range(2):
            with http.send("GET", f"{url}/x", {}, ()) as found:
                assert found.read() == b"ok"
            for connection in http._idle[url]:
                connection.line._socket.recv(1, socket.MSG_PEEK)  # until the end of the connection is here


def test_an_ok_before_the_body_was_read_is_no_ok(http: HttpClient, tls: ssl.SSLContext | None) -> None:
    def agree(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_RD)
        connection.recv(1)

    # The end of the connection may overtake the answer, which is then not heard.
    with scripted(tls, agree) as url, pytest.raises((HTTPException, ConnectionError), match=r"before the body|reset"):
        http.send("PUT", f"{url}/x", {"Content-Length": str(len(DATA))}, [DATA])


def test_a_refusal_before_the_body_was_read_is_heard(http: HttpClient, tls: ssl.SSLContext | None) -> None:
    def refuse(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 4\r\n\r\nSlow")
        connection.shutdown(socket.SHUT_RD)
        connection.recv(1)

    with (
        scripted(tls, refuse) as url,
        http.send("PUT", f"{url}/x", {"Content-Length": str(len(DATA))}, [DATA]) as found,
    ):
        assert (found.status, found.read()) == (503, b"Slow")
    assert not http._idle.get(url), "nobody knows what is left in that connection"


@pytest.mark.parametrize("stands", ["before the answer", "in the answer", "in the upload"])
def test_a_server_that_stands_still_is_an_error_in_time(
    stands: str, tls: ssl.SSLContext | None, certificate: Path
) -> None:
    gone = threading.Event()

    def script(connection: socket.socket) -> None:
        head_of(connection)
        if stands == "in the answer":
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(DATA))
            connection.sendall(DATA[: 5 * MIB])
        gone.wait(30)

    views = [memoryview(bytes(64 * MIB))] if stands == "in the upload" else []
    length = str(sum(map(len, views)))

    def ask(http: HttpClient, url: str) -> None:
        with http.send("GET", f"{url}/x", {"Content-Length": length}, views) as answer:
            answer.readinto(memoryview(bytearray(len(DATA))))

    with scripted(tls, script) as url, closing(client_of(certificate, 0.3)) as http:
        with pytest.raises(TimeoutError, match="any more"):
            ask(http, url)
        gone.set()


@pytest.mark.parametrize("bad", ["x\r\nInjected: 1", "x\nInjected: 1"])
def test_a_line_break_in_a_header_is_refused(http: HttpClient, echo: str, bad: str) -> None:
    with pytest.raises(ValueError, match="header"):
        http.send("GET", f"{echo}/x", {"X": bad}, ())


@pytest.fixture
def over_tls(tls_s3: S3Server, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    opened: list[Any] = []

    def open_(**changed: Any) -> Any:
        options = {**tls_s3.storage_options, **changed}
        opened.append(open_storage(f"s3://test/tls/{next(numbers)}", storage_options=options))
        return opened[-1]

    yield open_
    for storage in opened:
        storage.close()


BAD = {
    "of nobody": ({}, "127.0.0.1", "is not trusted"),
    "of another host": ({"host": "127.0.0.2"}, "127.0.0.1", "is for another (name|address)"),
    "of last week": ({"expired": True}, "127.0.0.1", "has expired"),
    "by another name": ({}, "localhost", "is for another name"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_certificate_is_refused_in_one_sentence(
    fault: str, tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, host, words = BAD[fault]
    authority = make_certificates(tmp_path, **how)
    trusted = str(certificate if fault == "of nobody" else authority)
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    with s3_server(buckets=["test"], authority=authority) as server:
        options = {**server.storage_options, "endpoint_url": server.endpoint_url.replace("127.0.0.1", host)}
        options["client_kwargs"] = {"region_name": "us-east-1", "verify": trusted}
        with closing(open_storage("s3://test/tls", storage_options=options)) as storage:
            for call in (lambda: storage.read("k"), lambda: storage.open_parts("k", 64 * MIB)):
                with pytest.raises(StorageError) as caught:
                    call()
                where = rf"at {host}:[0-9]+: the certificate of the server {words}"
                assert re.search(f"{where}$", caught.value.message), caught.value.message
                assert type(caught.value) is StorageError, "another try changes nothing"
                assert caught.value.hint
        assert not server.log


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_of_certificates_that_is_none_is_named(content: bytes | None, over_tls: Any, tmp_path: Path) -> None:
    path = tmp_path / "bundle.pem"
    if content is not None:
        path.write_bytes(content)
    storage = over_tls(client_kwargs={"region_name": "us-east-1", "verify": str(path)})
    with pytest.raises(InvalidInput, match="trusted certificates cannot be used: "):
        storage.read("k")


def test_a_body_without_a_length_cannot_be_cut(http: HttpClient, certificate: Path) -> None:
    """TLS has an end of its own, and the end of the connection is none."""

    def cut(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nsome")
        connection.shutdown(socket.SHUT_RDWR)

    with (
        scripted(serving(certificate), cut) as url,
        http.send("GET", f"{url}/x", {}, ()) as answer,
        pytest.raises(ConnectionResetError, match="TLS did not"),
    ):
        answer.read()


def test_damaged_records_are_an_error(http: HttpClient, certificate: Path) -> None:
    def garble(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        with socket.socket(fileno=os.dup(connection.fileno())) as below:
            below.sendall(b"\x17\x03\x03\x00\x40" + bytes(64))

    with (
        scripted(serving(certificate), garble) as url,
        http.send("GET", f"{url}/x", {}, ()) as answer,
        pytest.raises(ssl.SSLError, match=r"(?i)record mac"),
    ):
        answer.read()


def test_no_tls_where_it_is_expected_is_an_error(http: HttpClient) -> None:
    def speak_plainly(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    with scripted(None, speak_plainly) as url, pytest.raises(ssl.SSLError):
        http.send("GET", f"{url.replace('http', 'https')}/x", {}, ())


@pytest.mark.parametrize(("status", "error"), [(403, StorageError), (407, StorageError), (503, StorageUnavailable)])
def test_a_proxy_that_refuses_is_named(
    status: int, error: type[StorageError], monkeypatch: pytest.MonkeyPatch, over_tls: Any
) -> None:
    heads: list[bytes] = []

    def refuse(connection: socket.socket, _number: int) -> None:
        with connection:
            heads.append(head_of(connection))
            connection.sendall(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\nno" % status)

    with answering(refuse) as url:
        monkeypatch.setenv("https_proxy", url.replace("://", "://user:canary%21@"))
        storage = over_tls(endpoint_url="https://s3.invalid:7443")
        with pytest.raises(error, match=r"through the proxy 127\.0\.0\.1") as caught:
            storage.read("k")
        assert (f"refuses with {status}" in str(caught.value)) == (status < 500)
        assert type(caught.value) is error
        assert "canary" not in repr(caught.value) + str(caught.value.__cause__)
    assert heads[0].startswith(b"CONNECT s3.invalid:7443 HTTP/1.1\r\nHost: s3.invalid:7443\r\n")
    assert b"\r\nProxy-Authorization: Basic dXNlcjpjYW5hcnkh\r\n" in heads[0]
