"""How bytes get from node to node: whom a node serves, what it takes, and what becomes of a side that breaks off."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import CkptstoreError, FileMissing, InvalidInput, InvalidName, StorageUnavailable
from ckptstore.fast.node_disk import NodeDisk
from ckptstore.fast.node_server import NodeClient, NodeServer, own_addresses, receive_header, send_header
from ckptstore.format.digest import crc32c
from ckptstore.format.layout import Attempt
from ckptstore.transfer.sources import MemorySource

ATTEMPT = Attempt(3, 1, "0123abcd")
TOKEN = "the token of the job"
NEVER = threading.Event()


@pytest.fixture
def disk(tmp_path: Path) -> NodeDisk:
    return NodeDisk.open(tmp_path / "disk", "id", node="b")


@contextmanager
def served(disk: NodeDisk, **options: Any) -> Iterator[NodeServer]:
    server = NodeServer(disk, TOKEN, is_one_machine=True, **options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def reached(server: NodeServer, *, token: str = TOKEN, node: str = "b", timeout_seconds: float = 20) -> Iterator[Any]:
    client = NodeClient(node, server.addresses, token, timeout_seconds=timeout_seconds)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def client(disk: NodeDisk) -> Iterator[NodeClient]:
    with served(disk) as server, reached(server) as client:
        yield client


def write(client: NodeClient, name: str, data: bytes, *, scratch_bytes: int = 1 << 20) -> int:
    source = MemorySource([memoryview(data)])
    return client.write(ATTEMPT, name, source, memoryview(bytearray(scratch_bytes)), given_up=NEVER)


def read(client: NodeClient, name: str, offset: int, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    half = size_bytes // 2
    client.read_into(ATTEMPT, name, offset, [memoryview(data)[:half], memoryview(data)[half:]])
    return bytes(data)


@pytest.mark.parametrize("size_bytes", [0, 1, 1000, (1 << 20) + 1, 20_000_001])
def test_what_is_sent_is_what_is_there(disk: NodeDisk, client: NodeClient, size_bytes: int) -> None:
    data = random.Random(size_bytes).randbytes(size_bytes)
    assert write(client, "a/b", data) == crc32c(data)
    assert disk.storage.read(ATTEMPT.key("a/b")) == data
    assert read(client, "a/b", size_bytes // 3, size_bytes // 2) == data[size_bytes // 3 :][: size_bytes // 2]


def test_what_is_not_there_is_told(client: NodeClient) -> None:
    with pytest.raises(FileMissing):
        read(client, "nothing", 0, 4)
    write(client, "short", b"abc")
    with pytest.raises(StorageUnavailable, match="3 bytes"):
        read(client, "short", 0, 4)
    assert read(client, "short", 0, 3) == b"abc"  # and the next request is served


@pytest.mark.parametrize("name", ["..", "../x", "/etc/passwd", "", "a//b", "a/./b", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(client: NodeClient, name: str) -> None:
    for ask in (lambda: read(client, name, 0, 4), lambda: write(client, name, b"data")):
        with pytest.raises(InvalidName):
            ask()


def test_links_are_not_followed(disk: NodeDisk, client: NodeClient, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    write(client, "a", b"data")
    (disk.storage.local_path(ATTEMPT.key("link"))).symlink_to(tmp_path / "secret")
    with pytest.raises(CkptstoreError):
        read(client, "link", 0, 6)
    write(client, "link", b"data")
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_nothing_is_written_into_what_is_complete(disk: NodeDisk, client: NodeClient) -> None:
    write(client, "a", b"data")
    with pytest.raises(InvalidInput, match="is complete"):
        write(client, "fast.json", b"{}")
    disk.storage.write(ATTEMPT.key("fast.json"), [memoryview(b"{}")])
    with pytest.raises(InvalidInput, match="is complete"):
        write(client, "a", b"other")
    assert read(client, "a", 0, 4) == b"data"


def test_who_does_not_know_the_token_is_sent_away(disk: NodeDisk) -> None:
    with served(disk) as server:
        for token in ("", "another", TOKEN[:-1]):
            with reached(server, token=token) as client, pytest.raises(StorageUnavailable, match="another start"):
                write(client, "a", b"data")
        with reached(server, node="c") as client, pytest.raises(StorageUnavailable, match="c was meant"):
            write(client, "a", b"data")
    assert list(disk.storage.list("")) == []


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\2\0\0\0[]", b"\4\0\0\0null", b"\2\0\0\0{}"]
)
def test_what_is_no_request_ends_the_connection(disk: NodeDisk, said: bytes) -> None:
    with served(disk) as server, socket.create_connection(server.addresses[0], timeout=20) as connection:
        connection.sendall(said)
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            """Sent away while something was still to be read."""
        with reached(server) as client:
            write(client, "a", b"data")


def test_a_connection_that_was_closed_while_it_was_idle_is_made_anew(disk: NodeDisk) -> None:
    with served(disk) as server, reached(server) as client:
        write(client, "a", b"data")
        for connection in list(server._open):
            connection.shutdown(socket.SHUT_RDWR)
        assert write(client, "b", b"more") == crc32c(b"more")
        for connection in list(server._open):
            connection.shutdown(socket.SHUT_RDWR)
        assert read(client, "b", 0, 4) == b"more"


def test_a_node_that_is_gone_is_named(disk: NodeDisk) -> None:
    with served(disk) as server, reached(server) as client:
        write(client, "a", b"data")
        server.close()
        time.sleep(0.05)
        with pytest.raises(StorageUnavailable, match="b cannot be reached"):
            write(client, "b", b"data")


def test_who_falls_silent_is_given_up(disk: NodeDisk) -> None:
    """On both sides: a server that does not answer, and a sender that stops in the middle of a file."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = NodeClient("b", [silent.getsockname()[:2]], TOKEN, timeout_seconds=0.3)
        with pytest.raises(StorageUnavailable, match="b broke off at a"):
            write(client, "a", b"data")
        client.close()
    with served(disk, timeout_seconds=0.3) as server, socket.create_connection(server.addresses[0]) as sender:
        asked = {"token": TOKEN, "node": "b", "attempt": str(ATTEMPT), "name": "a", "size_bytes": 99 << 20}
        send_header(sender, {**asked, "is_written": True})
        sender.sendall(b"some")
        sender.settimeout(20)
        with pytest.raises((OSError, ValueError)):
            receive_header(sender)
    assert list(disk.storage.list("")) == []


class Slow:
    """A source that can be read for ever."""

    size_bytes = 1 << 40
    payloads: Sequence[tuple[int, int]] = ()
    in_memory = True

    def __init__(self) -> None:
        self.reads = 0

    @contextmanager
    def open(self) -> Iterator[Any]:
        def read(offset: int, size_bytes: int, scratch: memoryview) -> list[memoryview]:
            self.reads += 1
            time.sleep(0.01)
            return [scratch[:1000]]

        yield read


class Nowhere:
    """What large files, for which a test has no room, are written to."""

    def write_part(self, *_: object) -> None: ...

    def abort(self) -> None: ...


def test_what_is_given_up_is_not_read_any_more(disk: NodeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.fast.partner import _Sending
    from ckptstore.transfer.planned import PlannedFile

    monkeypatch.setattr(type(disk.storage), "open_parts", lambda *_: Nowhere())
    with served(disk) as server, reached(server) as client:
        source = Slow()
        sending = _Sending(client, [PlannedFile(ATTEMPT.key("a"), source)])
        sending.give_up()
        reads = source.reads
        time.sleep(0.1)
        assert source.reads == reads
        with pytest.raises(CkptstoreError):
            sending.result(lambda: None)


class Meeting:
    """A source of which the first byte is read once all parties read theirs."""

    size_bytes = 5000
    payloads: Sequence[tuple[int, int]] = ()
    in_memory = True

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    @contextmanager
    def open(self) -> Iterator[Any]:
        def read(offset: int, size_bytes: int, scratch: memoryview) -> list[memoryview]:
            self._barrier.wait(30)
            return [memoryview(b"x" * size_bytes)]

        yield read


def test_two_files_are_on_their_way_to_the_partner_at_once(client: NodeClient) -> None:
    from ckptstore.fast.partner import _Sending
    from ckptstore.transfer.planned import PlannedFile

    barrier = threading.Barrier(2)
    files = [PlannedFile(ATTEMPT.key(name), Meeting(barrier)) for name in "abcd"]
    assert _Sending(client, files).result(lambda: None) == [crc32c(b"x" * 5000)] * 4
    assert _Sending(client, []).result(lambda: None) == []


def test_the_first_error_ends_what_else_is_on_its_way(disk: NodeDisk, client: NodeClient) -> None:
    """Else a save that has failed would wait for all that can still be sent."""
    from ckptstore.fast.partner import _Sending
    from ckptstore.transfer.planned import PlannedFile

    class Broken(Slow):
        size_bytes = 5000

        @contextmanager
        def open(self) -> Iterator[Any]:
            def read(offset: int, size_bytes: int, scratch: memoryview) -> list[memoryview]:
                while not endless.reads:
                    time.sleep(0.01)
                raise InvalidInput("the source is broken")

            yield read

    endless = Slow()
    endless.size_bytes = 1 << 30
    sources = {"a": endless, "b": Broken(), "c": Slow()}
    sending = _Sending(client, [PlannedFile(ATTEMPT.key(name), source) for name, source in sources.items()])
    with pytest.raises(InvalidInput, match="the source is broken"):
        sending.result(lambda: None)
    assert endless.reads > 0
    assert sources["c"].reads == 0
    sending.give_up()


def test_an_address_is_found() -> None:
    assert own_addresses()[-1] == "127.0.0.1"
