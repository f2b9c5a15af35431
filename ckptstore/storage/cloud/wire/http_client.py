"""HTTP/1.1 on sockets of our own, with TLS and without, for requests whose bodies are large.

A client library moves a body in pieces, and for each piece it waits for the socket and for the interpreter lock. This
module hands all views of a body to a `Line`, and has it fill memory in one call. `http.client` reads the bodies of
responses. The heads are written and read here, for half the processor time of a small request.
"""

from __future__ import annotations

import base64
import http.client
import io
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from ckptstore.storage.cloud.wire.line import Line, TlsLine

_HEAD_BYTES = 8 << 10
"""The buffer for the head of a response; bytes of the body in it are copied once more."""
_KEPT_CONNECTIONS = 64
_MOST_INTERIM = 16
"""The most 1xx responses before the final one; no server has a reason to send two."""
_PORTS = {"http": 80, "https": 443}
_BREAK = re.compile(r"[\0\r\n]")
_FOLD = re.compile(r"\r?\n[ \t]+")


class ProxyRefused(ConnectionError):
    """A proxy did not let a connection through to a server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the proxy answered {status}")
        self.status = status


class HttpClient:
    """Sends requests, with a connection for each one in flight. Safe for threads.

    An idle connection is kept for the next request to the same server. Nothing is retried.
    """

    def __init__(
        self,
        *,
        connect_seconds: float | None,
        read_seconds: float | None,
        keepalive: bool = False,
        trust: Callable[[], ssl.SSLContext],
        proxy_url: str | None = None,
    ) -> None:
        """Open no connection yet. `read_seconds` is the longest time that a connection may stand still, None for no
        limit; `keepalive` switches on TCP's. `trust` makes the context for https:// URLs when the first one comes.
        `proxy_url` is an http:// URL of a proxy, with its user and password."""
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._keepalive = keepalive
        self._trust = trust
        self._context: ssl.SSLContext | None = None
        self._proxy = urlsplit(proxy_url) if proxy_url else None
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Connection]] = {}
        self._closed = False

    def send(self, method: str, url: str, headers: Mapping[str, Any], views: Sequence[memoryview]) -> HttpAnswer:
        """Send a request with a body of these views, and read the head of the response.

        Raises OSError and `http.client.HTTPException`, and TimeoutError for a connection that stands still.
        """
        split = urlsplit(url)
        names = {name.lower() for name in headers}
        target = f"{split.path or '/'}{split.query and '?'}{split.query}"
        more: dict[str, Any] = {} if "host" in names else {"Host": _host_of(split)}
        if "accept-encoding" not in names:
            more["Accept-Encoding"] = "identity"
        if self._proxy is not None and split.scheme == "http":
            target, more = f"{_place_of(split)}{target}", more | _authorization(self._proxy)
        lines = [f"{method} {target} HTTP/1.1"]
        for name, value in (*more.items(), *headers.items()):
            lines.append(f"{name}: {value.decode('latin-1') if isinstance(value, bytes) else value}")
        if any(map(_BREAK.search, lines)):
            raise ValueError("the URL or a header has a line break")
        head = "\r\n".join((*lines, "", "")).encode("latin-1")
        connection = self._take(split)
        try:
            response = connection.exchange(method, head, views)
        except BaseException:
            connection.end()
            raise
        return HttpAnswer(self, connection, response)

    def close(self) -> None:
        """Close the idle connections, and each other one when its request is done."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close the idle connections; the others can be used again."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.end()

    def __del__(self) -> None:
        """Close the connections of a client that is dropped, for instance after its credentials expired."""
        self.close()

    def _take(self, split: SplitResult) -> _Connection:
        while True:
            with self._lock:
                idle = self._idle.get(_place_of(split))
                connection = idle.pop() if idle else None
            if connection is None:
                return _Connection(split, self._connected(split))
            if connection.line.is_alive():
                return connection
            connection.end()

    def _connected(self, split: SplitResult) -> Line:
        to = self._proxy or split
        connected = socket.create_connection((to.hostname, to.port or _PORTS[to.scheme]), self._connect_seconds)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, self._keepalive)
            if split.scheme == "http":
                return Line(connected, self._read_seconds)
            if self._proxy is not None:
                _tunnel(connected, split, self._proxy)
            with self._lock:
                self._context = self._context or self._trust()
            return TlsLine(connected, self._read_seconds, context=self._context, host=split.hostname or "")
        except BaseException:
            connected.close()
            raise

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for the next request to its server."""
        with self._lock:
            idle = self._idle.setdefault(connection.place, [])
            if not self._closed and len(idle) < _KEPT_CONNECTIONS:
                idle.append(connection)
                return
        connection.end()


def _place_of(split: SplitResult) -> str:
    """Return the scheme, the host and the port as they are in a URL, without a user."""
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}"


def _host_of(split: SplitResult) -> str:
    """Return the header Host, which has no port that its scheme has anyway."""
    return split.netloc.rpartition("@")[2].removesuffix(f":{_PORTS[split.scheme]}")


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(secret).decode()}"}


def _tunnel(connected: socket.socket, split: SplitResult, proxy: SplitResult) -> None:
    """Have a proxy let a connection through to a server. Raises ProxyRefused."""
    host = f"[{split.hostname}]" if ":" in (split.hostname or "") else split.hostname
    server = f"{host}:{split.port or _PORTS[split.scheme]}"
    headers = {"Host": server, **_authorization(proxy)}
    head = "".join(f"{line}\r\n" for line in (f"CONNECT {server} HTTP/1.1", *map(": ".join, headers.items()), ""))
    connected.sendall(head.encode("latin-1"))
    with _Response(connected, method="CONNECT") as answer:
        answer.begin()
        if not 200 <= answer.status < 300:
            raise ProxyRefused(answer.status)


class HttpAnswer:
    """The response to a request, with a body that is read once. Closing it loses the unread rest of the body, and with
    it the connection."""

    def __init__(self, home: HttpClient, connection: _Connection, response: _Response) -> None:
        self.status = response.status
        self.headers = response.fields
        self._home = home
        self._connection: _Connection | None = connection
        self._response = response
        self._release()

    def __enter__(self) -> HttpAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, size: int | None = None, **_: Any) -> Iterator[bytes]:
        """Yield the rest of the body, at once or in pieces of a size, for botocore and requests. Raises IncompleteRead
        for one that broke off."""
        while data := self.read(size):
            yield data
        if self._response.length:
            self.close()
            raise http.client.IncompleteRead(b"", self._response.length)

    def read(self, size: int | None = None) -> bytes:
        """Return so many bytes, or the rest of the body."""
        with self._ended_by_errors():
            data = self._response.read(size)
        self._release()
        return data

    def readinto(self, view: memoryview) -> int:
        """Fill the view as far as the body goes."""
        with self._ended_by_errors():
            count = self._response.readinto(view)
        self._release()
        return count

    def close(self) -> None:
        """Release the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """Close the connection on an error, so that the reader need not."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _release(self) -> None:
        """Keep the connection for the next request, once the body is read to its end."""
        if self._connection is not None and self._response.isclosed():
            connection, self._connection = self._connection, None
            if self._response.will_close:
                connection.end()
            else:
                self._home.give_back(connection)


class _Response(http.client.HTTPResponse):
    """A response whose head is read here: `http.client` would treat 103 as final, read 100 without end, and use the
    first of two lengths, and then read the rest of such a response as that to the next request."""

    fields: Mapping[str, str]
    """The headers, with names in small letters; those of one name are joined by commas."""

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(_MOST_INTERIM):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(f"{_MOST_INTERIM} answers of 1xx came, and none that counts")

    def begin(self) -> None:
        version, self.status, _ = self._read_status()
        if not version.startswith("HTTP/1."):
            raise http.client.UnknownProtocol(version)
        fields: dict[str, str] = {}
        lines = b"".join(http.client._read_headers(self.fp))  # type: ignore[attr-defined]
        for line in _FOLD.sub(" ", lines.decode("latin-1")).split("\n"):
            name, colon, value = line.partition(":")
            if colon:
                name, value = name.strip().lower(), value.strip()
                fields[name] = f"{fields[name]}, {value}" if name in fields else value
        coding, kept = fields.get("transfer-encoding", ""), fields.get("connection", "").lower()
        lengths = {text.strip() for text in fields.get("content-length", "").split(",")}
        if len(lengths) > 1 or (coding and "content-length" in fields):
            raise http.client.HTTPException("the head of the answer says two lengths of its body")
        self.fields, length = fields, lengths.pop()
        self.chunked, self.chunk_left = coding.lower() == "chunked", None
        self.length = int(length) if length.isascii() and length.isdigit() else None
        if self._method == "HEAD" or self.status in (204, 304):  # type: ignore[attr-defined]
            self.length = 0
        is_open = "close" not in kept and (version != "HTTP/1.0" or "keep-alive" in kept)
        self.will_close = not is_open or (self.length is None and not self.chunked)


class _Connection:
    """One connection."""

    def __init__(self, split: SplitResult, line: Line) -> None:
        self.place = _place_of(split)
        self.line = line

    def end(self) -> None:
        """Close it, also for a response that is still being read."""
        self.line.close()

    def exchange(self, method: str, head: bytes, views: Sequence[memoryview]) -> _Response:
        """Send a request, and read the head of the response."""
        response = _Response(_Incoming(self.line), method=method)  # type: ignore[arg-type]
        try:
            self.line.send_all([memoryview(head), *views])
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a request need not read all of it: it may have sent the reason.
            try:
                response.begin()
            except (OSError, http.client.HTTPException):
                raise error from None
            if response.status < 300:
                raise http.client.HTTPException(f"status {response.status} came before the body was sent") from None
            response.will_close = True
            return response
        response.begin()
        return response


class _Incoming(io.RawIOBase):
    """The incoming bytes of a connection, and the part of a socket that `http.client` uses: it makes a file for each
    response. Closing either leaves the connection open, which `_Connection.end` closes."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a file with a buffer for the head of a response; large reads go past the buffer."""
        assert mode == "rb"
        return io.BufferedReader(_Incoming(self._line), _HEAD_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        """Read some bytes; a large view, whose bytes are sure to come, is filled in one call."""
        return self._line.recv_into(view, whole=len(view) > _HEAD_BYTES)
