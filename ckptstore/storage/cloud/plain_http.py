"""HTTP/1.1 without TLS on sockets of our own, for requests whose bodies are large.

A client library moves a body in pieces, and for each piece it waits for the socket and for the interpreter lock. This
module lets the kernel wait: it takes the views of a body in one call, and fills memory in one call. `http.client`
writes the head of a request and reads that of a response.
"""

from __future__ import annotations

import http.client
import io
import math
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

_HEAD_BYTES = 8 << 10
"""The buffer for the head of a response; bytes of the body in it are copied once more."""
_MAX_VIEWS = 512
"""The most views in one call; Linux takes 1,024."""
_KEPT_CONNECTIONS = 64
_MOST_INTERIM = 16
"""The most 1xx responses before the final one; no server has a reason to send two."""


class PlainHttp:
    """Sends requests to http:// URLs, with a connection for each one in flight. Safe for threads.

    An idle connection is kept for the next request to the same server. Nothing is retried.
    """

    def __init__(self, *, connect_seconds: float | None, read_seconds: float | None, keepalive: bool = False) -> None:
        """Open no connection yet. `read_seconds` is the longest time that a connection may stand still, None for no
        limit; `keepalive` switches on TCP's."""
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._keepalive = keepalive
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Connection]] = {}
        self._closed = False

    def send(self, method: str, url: str, headers: Mapping[str, Any], views: Sequence[memoryview]) -> HttpAnswer:
        """Send a request with a body of these views, and read the head of the response.

        Raises OSError and `http.client.HTTPException`, and TimeoutError for a connection that stands still.
        """
        split = urlsplit(url)
        given = {name.lower() for name in headers}
        connection = self._take(split.netloc)
        try:
            connection.putrequest(
                method,
                f"{split.path or '/'}{split.query and '?'}{split.query}",
                skip_host="host" in given,
                skip_accept_encoding="accept-encoding" in given,
            )
            for name, value in headers.items():
                connection.putheader(name, value)
            response = connection.exchange(views)
        except BaseException:
            connection.end()
            raise
        return HttpAnswer(self, split.netloc, connection, response)

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

    def _take(self, server: str) -> _Connection:
        while True:
            with self._lock:
                idle = self._idle.get(server)
                connection = idle.pop() if idle else None
            if connection is None:
                break
            if connection.is_alive():
                return connection
            connection.end()
        connection = _Connection(server.rpartition("@")[2], timeout=self._connect_seconds)
        connection.open(self._read_seconds, keepalive=self._keepalive)
        return connection

    def _give_back(self, server: str, connection: _Connection) -> None:
        with self._lock:
            idle = self._idle.setdefault(server, [])
            if not self._closed and len(idle) < _KEPT_CONNECTIONS:
                idle.append(connection)
                return
        connection.end()


class HttpAnswer:
    """The response to a request, with a body that is read once. Closing it loses the unread rest of the body, and with
    it the connection."""

    def __init__(
        self, home: PlainHttp, server: str, connection: _Connection, response: http.client.HTTPResponse
    ) -> None:
        self.status = response.status
        self.headers = response.headers
        self._home = home
        self._server = server
        self._connection: _Connection | None = connection
        self._response = response
        self._release()

    def __enter__(self) -> HttpAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self) -> Iterator[bytes]:
        """Yield the rest of the body, for botocore, which parses it."""
        yield self.read()

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
                self._home._give_back(self._server, connection)


class _Response(http.client.HTTPResponse):
    """A response with stricter checks: `http.client` would treat 103 as final, read 100 without end, and use the first
    of two lengths, and then read the rest of such a response as that to the next request."""

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(_MOST_INTERIM):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(f"{_MOST_INTERIM} answers of 1xx came, and none that counts")

    def begin(self) -> None:
        super().begin()
        lengths = set(self.headers.get_all("content-length") or ())
        if len(lengths) > 1 or (lengths and self.headers.get("transfer-encoding")):
            raise http.client.HTTPException("the head of the answer says two lengths of its body")


class _Connection(http.client.HTTPConnection):
    """One connection. Its socket blocks, with timeouts that the kernel keeps."""

    response_class = _Response
    _head = b""

    def open(self, read_seconds: float | None, *, keepalive: bool) -> None:
        """Connect."""
        self.connect()
        self._line = line = self.sock
        line.settimeout(None)
        fraction, seconds = math.modf(read_seconds or 0.0)  # 0 waits for ever
        wait = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        if keepalive:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = _Incoming(line)

    def is_alive(self) -> bool:
        """Return True if nothing has come unrequested, such as the end of the connection."""
        try:
            self._line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def end(self) -> None:
        """Close it, also for a response that is still being read."""
        self.close()
        self._line.close()

    def send(self, data: Any) -> None:
        """Keep the head of a request: `exchange` sends it together with the body."""
        self._head = data

    def exchange(self, views: Sequence[memoryview]) -> http.client.HTTPResponse:
        """Send the prepared request with its body, and read the head of the response."""
        self.endheaders()
        try:
            self._send_all([memoryview(self._head), *views])
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a request need not read all of it: it may have sent the reason.
            try:
                response = self.getresponse()
            except (OSError, http.client.HTTPException):
                response = None
            if response is None:
                raise
            if response.status < 300:
                raise http.client.HTTPException(f"status {response.status} came before the body was sent") from None
            response.will_close = True
            return response
        return self.getresponse()

    def _send_all(self, views: Sequence[memoryview]) -> None:
        pending = [view for view in views if len(view)]
        first = 0
        while first < len(pending):
            try:
                count = self._line.sendmsg(pending[first : first + _MAX_VIEWS])
            except BlockingIOError:
                raise TimeoutError("the server takes nothing any more") from None
            while count:
                size_bytes = len(pending[first])
                if count < size_bytes:
                    pending[first] = pending[first][count:]
                    break
                count, first = count - size_bytes, first + 1


class _Incoming(io.RawIOBase):
    """The incoming bytes of a connection, and the part of a socket that `http.client` uses: it makes a file for each
    response. Closing either leaves the connection open, which `_Connection.end` closes."""

    def __init__(self, line: socket.socket) -> None:
        self._socket = line

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a file with a buffer for the head of a response; large reads go past the buffer."""
        assert mode == "rb"
        return io.BufferedReader(_Incoming(self._socket), _HEAD_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        """Read some bytes; a large view, whose bytes are sure to come, is filled in one call."""
        flags = socket.MSG_WAITALL if len(view) > _HEAD_BYTES else 0
        try:
            return self._socket.recv_into(view, 0, flags)
        except BlockingIOError:
            raise TimeoutError("the server sends nothing any more") from None
