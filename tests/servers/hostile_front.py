"""A proxy in front of a server of objects that does not keep to the letter, where it is told to."""

from __future__ import annotations

import gzip
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import unquote

from loopback import answering

Headers = list[tuple[str, str]]


@dataclass
class Reply:
    """An answer on its way back, and the range that was asked for (None: the whole)."""

    status: int
    headers: Headers
    body: bytes
    asked: tuple[int, int] | None
    whole: bytes
    """All of the file."""

    def put(self, name: str, value: str | None) -> None:
        """Set a header, or leave it out."""
        self.headers = [each for each in self.headers if each[0].lower() != name.lower()]
        if value is not None:
            self.headers.append((name, value))

    def get(self, name: str) -> str:
        """A header, "" where there is none."""
        return next((value for each, value in self.headers if each.lower() == name.lower()), "")


def ignores_the_range(reply: Reply) -> None:
    reply.status, reply.body = 200, reply.whole
    reply.put("Content-Range", None)


def answers_another_range(reply: Reply) -> None:
    if reply.asked is not None:
        first, last = reply.asked
        shift = 1 if last + 1 < len(reply.whole) else -1
        reply.body = reply.whole[first + shift : last + 1 + shift]
        reply.put("Content-Range", f"bytes {first + shift}-{last + shift}/{len(reply.whole)}")


def says_no_range(reply: Reply) -> None:
    reply.put("Content-Range", None)


def compresses(reply: Reply) -> None:
    reply.body = gzip.compress(reply.body)
    reply.put("Content-Encoding", "gzip")


def says_another_length(reply: Reply) -> None:
    reply.body = reply.body[: len(reply.body) // 2]


def answers_an_odd_status(reply: Reply) -> None:
    reply.status = 203


def answers_an_older_version(reply: Reply) -> None:
    reply.put("ETag", '"0123456789abcdef"')
    reply.put("x-goog-generation", "1")


def breaks_off(reply: Reply) -> None:
    reply.put("Content-Length", str(len(reply.body)))
    reply.body = reply.body[: len(reply.body) // 2]


def is_gone(reply: Reply) -> None:
    reply.status, reply.body = 404, b""
    reply.headers = []


def ends_early(reply: Reply) -> None:
    reply.status, reply.body = 416, b""
    reply.headers = []


def flips_a_bit(reply: Reply) -> None:
    if reply.body:
        reply.body = bytes([reply.body[0] ^ 1]) + reply.body[1:]


Manner = Callable[[Reply], None]


@dataclass
class Wire:
    """A request whose head has come, on its connection."""

    line: socket.socket
    _forward: Callable[[], bytes]
    _drop: Callable[[], object]

    def answer(self) -> bytes:
        """Have the server answer the request, whose body is read for that; the whole answer as it is on the wire."""
        return self._forward()

    def drop(self) -> None:
        """Read the body, for nobody."""
        self._drop()

    def reset(self) -> None:
        """End the connection in the middle."""
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


OnWire = Callable[[Wire], bool | None]
"""What is done in the place of an answer; true where the connection goes on."""
OK = b'HTTP/1.1 200 OK\r\nETag: "00000000000000000000000000000000"\r\nContent-Length: 0\r\n\r\n'


def says_ok_before_the_body(wire: Wire) -> None:
    wire.line.sendall(OK)
    time.sleep(0.05)


def says_ok_and_drops_the_body(wire: Wire) -> bool:
    wire.line.sendall(OK)
    wire.drop()
    return True


def goes_on_with_100(wire: Wire) -> None:
    while True:
        wire.line.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def hints_first(wire: Wire) -> bool:
    wire.line.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n")
    answer = wire.answer()
    time.sleep(0.05)
    wire.line.sendall(answer)
    return True


def ends_with_103(wire: Wire) -> None:
    wire.answer()
    wire.line.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")


def resets_in_the_body(wire: Wire) -> None:
    answer = wire.answer()
    wire.line.sendall(answer[: answer.index(b"\r\n\r\n") + 4 + 100][:-1])
    time.sleep(0.02)
    wire.reset()


def answers_twice(wire: Wire) -> bool:
    answer = wire.answer()
    wire.line.sendall(answer)
    time.sleep(0.02)
    wire.line.sendall(answer)
    return True


def says_two_lengths(wire: Wire) -> bool:
    wire.line.sendall(wire.answer().replace(b"\r\n", b"\r\nContent-Length: 3\r\n", 1))
    return True


def says_length_and_chunks(wire: Wire) -> bool:
    wire.line.sendall(wire.answer().replace(b"\r\n", b"\r\nTransfer-Encoding: chunked\r\n", 1))
    return True


def says_no_status(wire: Wire) -> None:
    wire.answer()
    wire.line.sendall(b"\x16\x03\x01\x02\x00 what\r\n\r\n")


def says_an_impossible_status(wire: Wire) -> None:
    wire.line.sendall(wire.answer().replace(b" 20", b" -20", 1))


def says_nothing_of_the_file(wire: Wire) -> bool:
    head, _, body = wire.answer().partition(b"\r\n\r\n")
    kept = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"etag", b"last-modified", b"x-"))]
    wire.line.sendall(b"\r\n".join(kept) + b"\r\n\r\n" + body)
    return True


def answers_to_a_condition(wire: Wire) -> bool:
    wire.drop()
    wire.line.sendall(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")
    return True


def has_a_head_without_end(wire: Wire) -> None:
    wire.line.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        wire.line.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")


@dataclass
class Front:
    """The proxy. `manner` is done to answers to reads of keys that `match` fits, `times` of them."""

    server: tuple[str, int]
    manner: Manner | None = None
    match: str = ""
    whole: bytes = b""
    times: int = 0
    on_wire: OnWire | None = None
    method: str = "GET"
    done: int = 0
    connections: set[int] = field(default_factory=set)
    """On how many connections it was done."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def misbehave(self, manner: Manner, match: str, *, whole: bytes = b"", times: int = 1 << 30) -> None:
        """Begin. `whole` is the file that is read."""
        self.manner, self.match, self.whole, self.times, self.done = manner, match, whole, times, 0
        self.connections.clear()

    def misbehave_on_wire(self, on_wire: OnWire, method: str, match: str, *, times: int = 1 << 30) -> None:
        """Begin to do that in the place of answers to requests of this method."""
        self.behave()
        self.on_wire, self.method, self.match, self.times, self.done = on_wire, method, match, times, 0

    def behave(self) -> None:
        """End."""
        self.manner = self.on_wire = None
        self.method = "GET"

    def takes(self, method: str, target: str, connection: int) -> bool:
        """Whether it is done to this request."""
        with self._lock:
            is_on = self.manner is not None or self.on_wire is not None
            wanted = is_on and method == self.method and re.search(self.match, unquote(target)) is not None
            if not wanted or self.done >= self.times:
                return False
            self.done += 1
            self.connections.add(connection)
            return True


@contextmanager
def hostile_front(url: str) -> Iterator[tuple[str, Front]]:
    """A proxy before the server at a URL, and its own URL."""
    host, _, port = url.partition("://")[2].rstrip("/").partition("/")[0].rpartition(":")
    front = Front((host, int(port)))
    with answering(lambda connection, number: _serve(connection, front, number)) as front_url:
        yield front_url, front


def _serve(connection: socket.socket, front: Front, number: int) -> None:
    with connection, suppress(OSError, ValueError), socket.create_connection(front.server) as onward:
        coming, answers = connection.makefile("rb"), onward.makefile("rb")
        while True:
            line = coming.readline().decode()
            if not line:
                return
            method, target, _ = line.split(" ")
            address = f"{front.server[0]}:{front.server[1]}"  # emulators look at the name by which they are asked
            headers = [(name, address if name.lower() == "host" else value) for name, value in _headers(coming)]
            names = {name.lower(): value for name, value in headers}
            if names.pop("expect", ""):  # of s3fs alone
                headers = [each for each in headers if each[0].lower() != "expect"]
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            is_hit = front.takes(method, target, number)
            size_bytes = int(names.get("content-length", 0))

            def forwarded(
                head: bytes = _head(line.strip(), headers), size_bytes: int = size_bytes, method: str = method
            ) -> tuple[str, Headers, bytes]:
                onward.sendall(head + coming.read(size_bytes))
                status_line, found = answers.readline().decode().strip(), _headers(answers)
                is_empty = method == "HEAD" or " 204" in status_line or " 304" in status_line
                return status_line, found, b"" if is_empty else _body(answers, found)

            if is_hit and (on_wire := front.on_wire) is not None:
                is_head = method == "HEAD"  # whose length is that of what it has not
                wire = Wire(
                    connection,
                    lambda made=forwarded, keeps=is_head: _whole(*made(), keeps_length=keeps),
                    lambda size=size_bytes: coming.read(size),
                )
                if on_wire(wire):
                    continue
                return
            status_line, found, data = forwarded()
            if not is_hit or not status_line.split(" ")[1].startswith("2"):
                plain = [each for each in found if each[0].lower() != "transfer-encoding"]
                if method != "HEAD" and not any(each[0].lower() == "content-length" for each in plain):
                    plain.append(("Content-Length", str(len(data))))
                connection.sendall(_head(status_line, plain) + data)
                continue
            asked = re.match(r"bytes=(\d+)-(\d+)", names.get("range") or names.get("x-ms-range") or "")
            reply = Reply(
                int(status_line.split(" ")[1]),
                [each for each in found if each[0].lower() != "transfer-encoding"],
                data,
                (int(asked[1]), int(asked[2])) if asked else None,
                front.whole,
            )
            assert front.manner is not None
            length = reply.get("content-length")
            front.manner(reply)
            if front.manner is not breaks_off:
                reply.put("Content-Length", str(len(reply.body)))
            connection.sendall(_head(f"HTTP/1.1 {reply.status} Odd", reply.headers) + reply.body)
            if front.manner is breaks_off:
                assert length
                return


def _whole(status_line: str, headers: Headers, body: bytes, *, keeps_length: bool) -> bytes:
    if keeps_length:
        return _head(status_line, headers)
    plain = [each for each in headers if each[0].lower() not in ("transfer-encoding", "content-length")]
    return _head(status_line, [*plain, ("Content-Length", str(len(body)))]) + body


def _headers(file: BinaryIO) -> Headers:
    found: Headers = []
    while line := file.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        found.append((name, value.strip()))
    return found


def _body(file: BinaryIO, headers: Headers) -> bytes:
    names = {name.lower(): value for name, value in headers}
    if names.get("transfer-encoding", "").lower() != "chunked":
        return file.read(int(names.get("content-length", 0)))
    data = b""
    while size := int(file.readline().split(b";")[0], 16):
        data += file.read(size)
        file.readline()
    _headers(file)
    return data


def _head(line: str, headers: Headers) -> bytes:
    return "".join([f"{line}\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"]).encode("latin-1")


@contextmanager
def options_behind(server: Any) -> Iterator[tuple[dict[str, Any], Front]]:
    """The options of a server, as they lead there through a front, and the front."""
    url = server.endpoint_url if hasattr(server, "endpoint_url") else server.url
    with hostile_front(url) as (front_url, front):
        host, front_host = (each.partition("://")[2].rstrip("/").partition("/")[0] for each in (url, front_url))
        options = {
            name: value.replace(host, front_host) if isinstance(value, str) else value
            for name, value in server.storage_options.items()
        }
        yield options, front
