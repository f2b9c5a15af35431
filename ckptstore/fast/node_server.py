"""How bytes of fast checkpoints get from node to node: each node serves its files to the ranks of its job.

    read      a header: token, node, attempt, name, offset, size_bytes
              the answer: a header, {} or the error; then the bytes
    write     a header: token, node, attempt, name, size_bytes, is_written; then the bytes
              the answer, when the file is durable: a header, the digest of what was written, or the error

A header is its length in 4 bytes, and JSON. A connection carries one request after another. Whoever does not know the
token of the job is sent away. The bytes are not encrypted, as those of torch's collectives are not; whoever reads them
checks digests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, InvalidInput, StorageUnavailable, from_wire
from ckptstore.fast.certificate import CERTIFICATE_NAME
from ckptstore.fast.node_disk import NodeDisk
from ckptstore.format.digest import crc32c
from ckptstore.format.layout import Attempt
from ckptstore.storage.disk import posix
from ckptstore.transfer.sources import Source

Address = tuple[str, int]

LOOPBACK = "127.0.0.1"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16
_SIOCGIFADDR = 0x8915
_TEST_NETWORK = ("192.0.2.1", 9)
"""Of RFC 5737: nothing is sent there, but the system says which of its addresses it would be sent from."""


class NodeServer:
    """The files of one node for the ranks of its job. Serves from threads of its own until it is closed."""

    def __init__(
        self,
        disk: NodeDisk,
        token: str,
        *,
        interface: str | None = None,
        is_one_machine: bool,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Raises InvalidInput for an interface that is not there, StorageError when nothing can be listened to. Who
        falls silent in the middle of something for the timeout is given up."""
        self._disk, self._token, self._timeout_seconds = disk, token, timeout_seconds
        host = LOOPBACK if is_one_machine else address_of(interface) if interface else ""
        try:
            self._listener = socket.create_server((host, 0), backlog=256)
        except OSError as error:
            raise posix.translate(error, what="Listening", file=host or "all addresses", directory="") from error
        port = self._listener.getsockname()[1]
        hosts = [host] if host else own_addresses()
        self.addresses: list[Address] = [(name, port) for name in hosts]
        """Where it can be reached, the best first."""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="ckptstore-node-server", daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more."""
        with self._lock:
            self._is_closed = True
            connections = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="ckptstore-node-server", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                _set_up(connection, self._timeout_seconds)
                while True:
                    asked = receive_header(connection)
                    connection.settimeout(self._timeout_seconds)
                    if not hmac.compare_digest(str(asked["token"]).encode(), self._token.encode()):
                        return
                    if asked.get("is_written"):
                        self._take(connection, asked)
                    else:
                        self._give(connection, asked)
                    connection.settimeout(None)  # who has shown the token may ask again after hours
        finally:
            with self._lock:
                self._open.discard(connection)

    def _key(self, asked: Mapping[str, Any]) -> str:
        """What is meant, distrusted."""
        if asked["node"] != self._disk.node:
            raise StorageUnavailable(f"This is {self._disk.node}, and {asked['node']} was meant")
        attempt = Attempt.parse(str(asked["attempt"]))
        if attempt is None:
            raise InvalidInput(f"{str(asked['attempt'])[:80]!r} is not the name of an attempt directory")
        return attempt.key(str(asked["name"]))

    def _new_key(self, asked: Mapping[str, Any]) -> str:
        """What may be written: a file of an attempt that is not certified."""
        key = self._key(asked)
        certificate = f"{key.removesuffix(str(asked['name']))}{CERTIFICATE_NAME}"
        if key == certificate or os.path.lexists(self._disk.storage.local_path(certificate)):
            raise InvalidInput(f"{key} cannot be written: its checkpoint is complete on {self._disk.node}")
        return key

    def _take(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        """Write a file. After an error what the other side still sends is not read: the connection ends."""
        try:
            crc = _written(self._disk, self._new_key(asked), int(asked["size_bytes"]), connection)
        except CkptstoreError as error:
            send_header(connection, {"error": error.to_wire()})
            raise ConnectionAbortedError from error
        send_header(connection, {"crc32c": crc})

    def _give(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        try:
            descriptor = self._opened(self._key(asked))
        except CkptstoreError as error:
            send_header(connection, {"error": error.to_wire()})
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            offset, size_bytes = int(asked["offset"]), int(asked["size_bytes"])
            has_bytes = os.fstat(descriptor).st_size - offset
            if not 0 <= size_bytes <= has_bytes or offset < 0:
                lost = StorageUnavailable(f"{asked['name']} has {has_bytes} bytes after {offset}")
                send_header(connection, {"error": lost.to_wire()})
                return
            send_header(connection, {})
            connection.sendfile(file, offset, size_bytes)

    def _opened(self, key: str) -> int:
        path = self._disk.storage.local_path(key)  # which refuses names with dots; the directory lets nobody else in
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise posix.translate(error, what="Reading", file=key, directory=str(path)) from error


def _written(disk: NodeDisk, key: str, size_bytes: int, connection: socket.socket) -> int:
    """Write what comes as a file, durable, and return its CRC32C. Raises StorageError; OSError of the connection."""
    storage, crc = disk.storage, 0
    part_bytes = min(storage.part_bytes(size_bytes), size_bytes)
    block = _memory(part_bytes)
    if size_bytes == part_bytes:
        receive_into(connection, block)
        storage.write(key, [block])
        crc = crc32c(block)
    else:
        writer = storage.open_parts(key, size_bytes)
        try:
            for offset in range(0, size_bytes, part_bytes):
                view = block[: min(part_bytes, size_bytes - offset)]
                receive_into(connection, view)
                crc = crc32c(view, crc)
                writer.write_part(offset, [view])
            writer.finish()
        except BaseException:
            writer.abort()
            raise
    storage.persist([key])
    return crc


def _memory(size_bytes: int) -> memoryview:
    """Memory that begins at a page where it is large: so a disk takes it without another copy."""
    return memoryview(bytearray(size_bytes) if size_bytes < mmap.PAGESIZE else mmap.mmap(-1, size_bytes))


class NodeClient:
    """The files of another node. Safe for threads: each has a connection of its own."""

    def __init__(self, node: str, addresses: Sequence[Address], token: str, *, timeout_seconds: float) -> None:
        self.node = node
        """Its name."""
        self._addresses, self._token = list(addresses), token
        self._timeout_seconds = timeout_seconds
        self._writing: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def read_into(self, attempt: Attempt, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views with a stretch of a file. Raises StorageUnavailable when the node does not answer, and what
        it says: FileMissing, StorageError."""
        asked = self._asked(attempt, name, offset=offset, size_bytes=sum(map(len, views)))

        def talk(connection: socket.socket) -> dict[str, Any]:
            send_header(connection, asked)
            answer = receive_header(connection)
            if "error" not in answer:
                for view in views:
                    receive_into(connection, view)
            return answer

        self._talk(name, talk)

    def write(
        self, attempt: Attempt, name: str, source: Source, scratch: memoryview, *, given_up: threading.Event
    ) -> int:
        """Send a file, and return the CRC32C of what the node has written, when that is durable.

        Raises StorageUnavailable when the node does not answer and when it is given up, what the node says
        (StorageFull, StorageError), and what the source raises.
        """
        asked = self._asked(attempt, name, size_bytes=source.size_bytes, is_written=True)

        def talk(connection: socket.socket) -> dict[str, Any]:
            with self._breakable(connection):
                if given_up.is_set():
                    raise StorageUnavailable(f"Nobody wants {name} on {self.node} any more", file=name)
                send_header(connection, asked)
                with source.open() as read:
                    for offset in range(0, source.size_bytes, len(scratch)):
                        views = read(offset, min(len(scratch), source.size_bytes - offset), scratch)
                        if not _sent(connection, views):
                            break  # it may have said why before it broke off
                return receive_header(connection)

        return int(self._talk(name, talk)["crc32c"])

    def _asked(self, attempt: Attempt, name: str, **more: Any) -> dict[str, Any]:
        return {"token": self._token, "node": self.node, "attempt": str(attempt), "name": name, **more}

    def _talk(self, name: str, talk: Callable[[socket.socket], dict[str, Any]]) -> dict[str, Any]:
        """Ask on a connection that is idle, or else on a new one: the other side may have closed what was idle."""
        while True:
            idle = self._take_idle()
            connection = idle or self._connected()
            try:
                answer = talk(connection)
            except (OSError, ValueError, TypeError) as error:
                connection.close()
                if isinstance(error, CkptstoreError):
                    raise
                if idle is not None and isinstance(error, ConnectionError):
                    continue
                raise StorageUnavailable(
                    f"{self.node} broke off at {name}: {error}",
                    file=name,
                    hint="Its process may have ended, or is of another start of the job",
                ) from error
            except BaseException:
                connection.close()
                raise
            if "error" in answer:
                connection.close()
                raise from_wire(dict(answer["error"]))
            with self._lock:
                self._idle.append(connection)
            return answer

    def _take_idle(self) -> socket.socket | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    @contextlib.contextmanager
    def _breakable(self, connection: socket.socket) -> Iterator[None]:
        """`interrupt` breaks off what is done in this context."""
        with self._lock:
            self._writing.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._writing.discard(connection)

    def interrupt(self) -> None:
        """Break off every `write` that goes on."""
        with self._lock:
            writing = list(self._writing)
        for connection in writing:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connected(self) -> socket.socket:
        failures = []
        for address in list(self._addresses):
            try:
                connection = socket.create_connection(address, timeout=min(10.0, self._timeout_seconds))
            except OSError as error:
                failures.append(f"{address[0]}:{address[1]}: {error}")
                continue
            _set_up(connection, self._timeout_seconds)
            self._addresses.sort(key=lambda other: other != address)
            return connection
        raise StorageUnavailable(
            f"{self.node} cannot be reached: {'; '.join(failures)}",
            hint="Nodes must reach each other on all TCP ports, as for torch.distributed; FastTier(interface=) chooses",
        )


def _set_up(connection: socket.socket, timeout_seconds: float) -> None:
    connection.settimeout(timeout_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # between saves, nothing is said for hours


def _sent(connection: socket.socket, views: Sequence[memoryview]) -> bool:
    """Send these; False when the other side does not listen any more."""
    try:
        for view in views:
            connection.sendall(view)
    except ConnectionError:
        return False
    return True


def send_header(connection: socket.socket, header: Mapping[str, Any]) -> None:
    """Send what comes before bytes, or stands alone."""
    data = json.dumps(header).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_header(connection: socket.socket) -> dict[str, Any]:
    """What `send_header` has sent. Raises OSError at the end of the connection, ValueError for anything else."""
    length = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(length))
    (size_bytes,) = _LENGTH.unpack(length)
    if size_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size_bytes} bytes")
    data = bytearray(size_bytes)
    receive_into(connection, memoryview(data))
    header = json.loads(data)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the view. Raises OSError when the connection ends before."""
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. Raises InvalidInput for one that is not there, or has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            shown = ", ".join(name for _, name in socket.if_nameindex())
            raise InvalidInput(
                f"The network interface {interface!r} has no address: {error.strerror}", hint=f"There are {shown}"
            ) from error
    return socket.inet_ntoa(found[20:24])


def own_addresses() -> list[str]:
    """Addresses under which other machines may reach this one, the best first; the loopback last."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(_TEST_NETWORK)
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*found, LOOPBACK]))
