"""A proxy in front of a server of objects that does not keep to the letter, where it is told to."""

from __future__ import annotations

import gzip
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO
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
class Front:
    """The proxy. `manner` is done to answers to reads of keys that `match` fits, `times` of them."""

    server: tuple[str, int]
    manner: Manner | None = None
    match: str = ""
    whole: bytes = b""
    times: int = 0
    done: int = 0
    connections: set[int] = field(default_factory=set)
    """On how many connections it was done."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def misbehave(self, manner: Manner, match: str, *, whole: bytes = b"", times: int = 1 << 30) -> None:
        """Begin. `whole` is the file that is read."""
        self.manner, self.match, self.whole, self.times, self.done = manner, match, whole, times, 0
        self.connections.clear()

    def behave(self) -> None:
        """End."""
        self.manner = None

    def takes(self, method: str, target: str, connection: int) -> bool:
        """Whether it is done to this request."""
        with self._lock:
            wanted = self.manner is not None and method == "GET" and re.search(self.match, unquote(target)) is not None
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
            body = coming.read(int(names.get("content-length", 0)))
            onward.sendall(_head(line.strip(), headers) + body)
            if method == "PUT" and names.get("expect"):
                return
            is_hit = front.takes(method, target, number)
            status_line, found = answers.readline().decode().strip(), _headers(answers)
            data = b"" if method == "HEAD" or " 204" in status_line or " 304" in status_line else _body(answers, found)
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
