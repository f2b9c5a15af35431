"""How bytes get from node to node: whom a node serves, what it takes, and what becomes of a side that breaks off."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import CkptstoreError, FileMissing, InvalidInput, InvalidName, StorageUnavailable
from ckptstore.extensions.peers import line_server
from ckptstore.extensions.peers.channel import Channel, NodeKeys, greet
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.nodes.node_server import NodeClient, NodeServer, own_addresses
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt
from ckptstore.transfer.sources import MemorySource

ATTEMPT = Attempt(3, 1, "0123abcd")
NEVER = threading.Event()


def keys_of_a_job(num_ranks: int = 2) -> list[NodeKeys]:
    """The keys of ranks that have met: rank 0 asks, rank 1 serves node "b"."""
    found = [NodeKeys() for _ in range(num_ranks)]
    for keys in found:
        keys.of_ranks, keys.job = [one.public for one in found], "start"
    return found


KEYS = keys_of_a_job()


@pytest.fixture
def disk(tmp_path: Path) -> NodeDisk:
    return NodeDisk.open(tmp_path / "disk", "id", node="b")


@contextmanager
def served(disk: NodeDisk, **options: Any) -> Iterator[NodeServer]:
    server = NodeServer(disk, KEYS[1], is_one_machine=True, **options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def reached(
    server: NodeServer, *, keys: NodeKeys = KEYS[0], node: str = "b", timeout_seconds: float = 20
) -> Iterator[Any]:
    client = NodeClient(node, server.addresses, keys, rank=0, server_rank=1, timeout_seconds=timeout_seconds)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def client(disk: NodeDisk) -> Iterator[NodeClient]:
    with served(disk) as server, reached(server) as client:
        yield client


def write(client: NodeClient, name: str, data: bytes, *, scratch_bytes: int = 1 << 20) -> Digest:
    source, scratch = MemorySource([memoryview(data)]), memoryview(bytearray(scratch_bytes))
    return client.write(ATTEMPT, name, source, scratch, algorithm="crc32c", given_up=NEVER)


def read(client: NodeClient, name: str, offset: int, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    half = size_bytes // 2
    client.read_into(ATTEMPT, name, offset, [memoryview(data)[:half], memoryview(data)[half:]])
    return bytes(data)


@pytest.mark.parametrize("size_bytes", [0, 1, 1000, (1 << 20) + 1, 20_000_001])
def test_what_is_sent_is_what_is_there(disk: NodeDisk, client: NodeClient, size_bytes: int) -> None:
    data = random.Random(size_bytes).randbytes(size_bytes)
    assert write(client, "a/b", data) == Digest.of(data)
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


@pytest.mark.parametrize("data", [b"", b"other"])
def test_a_refusal_is_heard_though_the_line_breaks_before_all_is_sent(
    disk: NodeDisk, client: NodeClient, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    disk.storage.write(ATTEMPT.key("fast.json"), [memoryview(b"{}")])
    prove = Channel.prove

    def late(channel: Channel, views: Sequence[memoryview]) -> None:
        if threading.current_thread() is threading.main_thread() and [*map(bytes, views)] in ([], [data]):
            time.sleep(0.2)  # until the node has refused, and closed its side
            raise ConnectionResetError
        prove(channel, views)

    monkeypatch.setattr(Channel, "prove", late)
    with pytest.raises(InvalidInput, match="is complete"):
        write(client, "a", data)


def test_who_has_no_key_of_the_job_is_sent_away(disk: NodeDisk) -> None:
    other_start, stranger = NodeKeys(), NodeKeys()
    other_start.of_ranks, other_start.job = KEYS[0].of_ranks, KEYS[0].job
    stranger.of_ranks, stranger.job = KEYS[0].of_ranks, "another start"
    with served(disk) as server:
        for keys in (other_start, stranger):
            with reached(server, keys=keys) as client, pytest.raises(StorageUnavailable, match="key of the job"):
                write(client, "a", b"data")
        with reached(server, node="c") as client, pytest.raises(StorageUnavailable, match="c cannot be reached"):
            write(client, "a", b"data")
        with reached(server) as client:
            client._rank = 7
            with pytest.raises(StorageUnavailable):
                write(client, "a", b"data")
    assert list(disk.storage.list("")) == []


@contextmanager
def between(server: NodeServer, change: Callable[[bytes, bool], bytes]) -> Iterator[Any]:
    """Somebody on the line between two nodes, who sees all that is sent and may change it."""
    seen = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    ends: list[socket.socket] = []

    def passed(source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(change(data, is_request))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                one, _ = listener.accept()
                other = socket.create_connection(server.addresses[0])
                ends.extend((one, other))
                for pair in ((one, other, True), (other, one, False)):
                    threading.Thread(target=passed, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    client = NodeClient("b", [listener.getsockname()], KEYS[0], rank=0, server_rank=1, timeout_seconds=5)
    try:
        yield client, seen
    finally:
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_no_key_is_sent_and_what_is_overheard_opens_nothing(disk: NodeDisk) -> None:
    requests = bytearray()

    def overheard(data: bytes, is_request: bool) -> bytes:
        requests.extend(data if is_request else b"")
        return data

    with served(disk) as server, between(server, overheard) as (client, seen):
        write(client, "a", b"data")
        secret = KEYS[0].shared_with(1)
        assert secret == KEYS[1].shared_with(0)
        for form in (secret, secret.hex().encode(), f"{KEYS[0]._private:x}".encode()):
            assert form not in seen
        before = disk.storage.stat(ATTEMPT.key("a")).version
        with socket.create_connection(server.addresses[0], timeout=5) as replay, suppress(OSError):
            replay.sendall(requests)
            while replay.recv(1 << 16):
                pass
        assert disk.storage.stat(ATTEMPT.key("a")).version == before


@pytest.mark.parametrize("who", ["request", "answer"])
@pytest.mark.parametrize("what", [b"data", b'"size_bytes": 4', b'"digest"', b"other"])
def test_what_is_changed_on_the_line_is_found(disk: NodeDisk, who: str, what: bytes) -> None:
    def change(data: bytes, is_request: bool) -> bytes:
        return data.replace(what, what[:-1] + b"9") if is_request == (who == "request") else data

    with served(disk) as server:
        with reached(server) as honest:
            write(honest, "there", b"other")
        with between(server, change) as (client, _):
            outcomes: list[Any] = []
            for ask in (lambda: write(client, "a", b"data"), lambda: read(client, "there", 0, 5)):
                try:
                    outcomes.append(ask())
                except StorageUnavailable:
                    outcomes.append(None)
    assert outcomes[0] in (None, Digest.of(b"data"))
    assert outcomes[1] in (None, b"other")
    if outcomes[0] is not None:
        assert disk.storage.read(ATTEMPT.key("a")) == b"data"


def test_a_server_that_is_no_server_of_the_job_is_not_believed() -> None:
    """It says that it has written what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                said = b'{"nonce": "00", "proof": "00", "digest": "crc32c:00000000"}'
                connection.sendall(len(said).to_bytes(4, "little") + said)
                connection.recv(1 << 16)

    threading.Thread(target=pretend, daemon=True).start()
    client = NodeClient("b", [listener.getsockname()], KEYS[0], rank=0, server_rank=1, timeout_seconds=5)
    with pytest.raises(StorageUnavailable, match="does not have the key"):
        write(client, "a", b"data")
    listener.close()


def is_sent_away(stranger: socket.socket) -> bool:
    """Whether the server ends a connection, within the time of the socket."""
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_a_stranger_more_takes_the_place_of_the_first(disk: NodeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_server, "MAX_STRANGERS", 4)
    with served(disk) as server:
        strangers = [socket.create_connection(server.addresses[0], timeout=5) for _ in range(20)]
        assert all(map(is_sent_away, strangers[:16]))
        strangers[-1].settimeout(0.3)
        assert not is_sent_away(strangers[-1])
        with reached(server) as client:
            assert write(client, "a", b"data") == Digest.of(b"data")
        for stranger in strangers:
            stranger.close()


def test_a_stranger_who_says_little_does_not_stay(disk: NodeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_server, "GREETING_SECONDS", 0.6)
    with served(disk) as server, socket.create_connection(server.addresses[0], timeout=0.1) as stranger:
        began = time.monotonic()
        with suppress(ConnectionError):
            for byte in b"\xff\x0f\0\0" + b" " * 200:  # a greeting that never ends, byte by byte
                if is_sent_away(stranger):
                    break
                stranger.sendall(bytes([byte]))
        assert 0.3 < time.monotonic() - began < 10


def test_a_stranger_who_proves_nothing_is_sent_away(disk: NodeDisk) -> None:
    with served(disk) as server, socket.create_connection(server.addresses[0], timeout=5) as stranger:
        for said in (b'{"rank": 0, "node": "b", "nonce": "00"}', b'{"proof": "00"}'):
            stranger.sendall(len(said).to_bytes(4, "little") + said)
        stranger.recv(1 << 12)  # the nonce of the server, and its proof
        assert is_sent_away(stranger)


@pytest.mark.parametrize("used_up", ["descriptors", "threads"])
def test_a_server_outlives_what_is_used_up(
    disk: NodeDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, used_up: str
) -> None:
    with served(disk) as server, reached(server) as client:
        write(client, "a", b"data")
        if used_up == "threads":
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", _no_thread)
                with socket.create_connection(server.addresses[0], timeout=20) as other, suppress(ConnectionResetError):
                    assert other.recv(1) == b""
        else:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            others = [socket.socket() for _ in range(3)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(socket.socket.fileno, others)) + 1, limits[1]))
            held = []
            try:
                with suppress(OSError):
                    while True:
                        held.append(os.dup(0))
                for other in others:
                    other.connect(server.addresses[0])
                time.sleep(0.5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in held:
                    os.close(descriptor)
                for other in others:
                    other.close()
        until = time.monotonic() + 20
        while "cannot serve its fast checkpoints to other nodes for the moment" not in caplog.text:
            assert time.monotonic() < until, caplog.text
            time.sleep(0.01)  # the server hangs up before it says so
        with reached(server) as again:
            assert read(again, "a", 0, 4) == b"data"


def _no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


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
        assert write(client, "b", b"more") == Digest.of(b"more")
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
        client = NodeClient("b", [silent.getsockname()], KEYS[0], rank=0, server_rank=1, timeout_seconds=0.3)
        with pytest.raises(StorageUnavailable, match="b cannot be reached"):
            write(client, "a", b"data")
        client.close()
    with served(disk, timeout_seconds=0.3) as server, socket.create_connection(server.addresses[0]) as sender:
        channel = greet(sender, KEYS[0].shared_with, rank=0, server_rank=1, node="b", seconds=10)
        asked = {"node": "b", "attempt": str(ATTEMPT), "name": "a", "size_bytes": 99 << 20}
        channel.send({**asked, "is_written": True})
        sender.sendall(b"some")
        sender.settimeout(20)
        with pytest.raises((OSError, ValueError)):
            channel.receive()
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
    from ckptstore.extensions.tier.partner import _Sending
    from ckptstore.transfer.moves import PlannedFile

    monkeypatch.setattr(type(disk.storage), "open_parts", lambda *_: Nowhere())
    with served(disk) as server, reached(server) as client:
        source = Slow()
        sending = _Sending(client, [PlannedFile(ATTEMPT.key("a"), source)], algorithm="crc32c")
        sending.give_up()
        reads = source.reads
        time.sleep(0.1)
        assert source.reads == reads
        with pytest.raises(CkptstoreError):
            sending.result()


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
    from ckptstore.extensions.tier.partner import _Sending
    from ckptstore.transfer.moves import PlannedFile

    barrier = threading.Barrier(2)
    files = [PlannedFile(ATTEMPT.key(name), Meeting(barrier)) for name in "abcd"]
    assert _Sending(client, files, algorithm="crc32c").result() == [Digest.of(b"x" * 5000)] * 4
    assert _Sending(client, [], algorithm="crc32c").result() == []


def test_the_first_error_ends_what_else_is_on_its_way(disk: NodeDisk, client: NodeClient) -> None:
    """Else a save that has failed would wait for all that can still be sent."""
    from ckptstore.extensions.tier.partner import _Sending
    from ckptstore.transfer.moves import PlannedFile

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
    sending = _Sending(
        client, [PlannedFile(ATTEMPT.key(name), source) for name, source in sources.items()], algorithm="crc32c"
    )
    with pytest.raises(InvalidInput, match="the source is broken"):
        sending.result()
    assert endless.reads > 0
    assert sources["c"].reads == 0
    sending.give_up()


def test_an_address_is_found_and_is_not_that_of_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ("host", [], ["127.0.1.1", "10.0.0.5", "127.0.0.1"])
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: found)
    addresses = own_addresses()
    assert "10.0.0.5" in addresses
    assert all(not address.startswith("127.") for address in addresses)
