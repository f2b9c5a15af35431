"""Transfer of fast checkpoints between nodes: each node serves its files to the ranks of its job.

    read      a header: node, attempt, name, offset, size_bytes
              the reply: a header, {} or the error; then the bytes
    write     a header: node, attempt, name, size_bytes, is_written, algorithm; then the bytes
              the reply, when the file is durable: a header with the digest of the file as written, or the error

A connection begins with a proof in both directions, and then carries one request after another: see
`ckptstore.extensions.peers.channel`.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, InvalidInput, StorageUnavailable
from ckptstore.extensions.peers.channel import AUTHENTICATED_BYTES, Channel, NodeKeys, receive_into
from ckptstore.extensions.peers.line_client import Address, LineClient
from ckptstore.extensions.peers.line_server import LineServer
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.format.digest import Digest, Hasher
from ckptstore.format.layout import Attempt
from ckptstore.storage.disk import posix
from ckptstore.transfer.sources import Source

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_TEST_NETWORK = ("192.0.2.1", 9)
"""An address of RFC 5737: nothing is sent to it, but the system chooses the own address it would send from."""


class NodeServer(LineServer):
    """Serves the files of one node to the ranks of its job, on threads of its own, until it is closed."""

    serves = "its fast checkpoints"

    def __init__(
        self,
        disk: NodeDisk,
        keys: NodeKeys,
        *,
        interface: str | None = None,
        is_one_machine: bool,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Begin to serve. A client that is silent for the timeout in the middle of a request is given up.

        Raises InvalidInput when the interface does not exist or has no address, StorageError when no port can be
        listened to.
        """
        self._disk = disk
        host = LOOPBACK if is_one_machine else address_of(interface) if interface else ""
        hosts = [host] if host else own_addresses()
        if not hosts:
            raise InvalidInput(
                "This machine has no address under which others reach it",
                hint="Name a network interface: FastTier(interface=)",
            )
        try:
            listener = socket.create_server((host, 0), backlog=256)
        except OSError as error:
            raise posix.translate(error, what="Listening", file=host or "all addresses", directory="") from error
        port = listener.getsockname()[1]
        self.addresses: list[Address] = [(name, port) for name in hosts]
        """The addresses of the server, best first."""
        super().__init__(listener, keys.shared_with, node=disk.node, timeout_seconds=timeout_seconds)

    def answer(self, channel: Channel, request: Mapping[str, Any]) -> None:
        if request.get("is_written"):
            self._take(channel, request)
        else:
            self._give(channel, request)

    def _key(self, asked: Mapping[str, Any]) -> str:
        """Return the key of the file that a request names. Raises InvalidInput, StorageUnavailable for another node."""
        if asked["node"] != self._disk.node:
            raise StorageUnavailable(f"This is {self._disk.node}, and {asked['node']} was meant")
        attempt = Attempt.parse(str(asked["attempt"]))
        if attempt is None:
            raise InvalidInput(f"{str(asked['attempt'])[:80]!r} is not the name of an attempt directory")
        return attempt.key(str(asked["name"]))

    def _new_key(self, asked: Mapping[str, Any]) -> str:
        """As `_key`, for a file to write. Raises InvalidInput also if its attempt is certified."""
        key = self._key(asked)
        certificate = f"{key.removesuffix(str(asked['name']))}{CERTIFICATE_NAME}"
        if key == certificate or os.path.lexists(self._disk.storage.local_path(certificate)):
            raise InvalidInput(f"{key} cannot be written: its checkpoint is complete on {self._disk.node}")
        return key

    def _take(self, channel: Channel, asked: Mapping[str, Any]) -> None:
        """Receive and write a file. An error ends the connection: the rest of the bytes is not read."""
        try:
            hasher = Hasher(asked["algorithm"])
            _write(self._disk, self._new_key(asked), int(asked["size_bytes"]), channel, hasher)
        except CkptstoreError as error:
            channel.send({"error": error.to_wire()})
            raise ConnectionAbortedError from error
        channel.send({"digest": str(hasher.digest())})

    def _give(self, channel: Channel, asked: Mapping[str, Any]) -> None:
        try:
            descriptor = self._opened(self._key(asked))
        except CkptstoreError as error:
            channel.send({"error": error.to_wire()})
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            offset, size_bytes = int(asked["offset"]), int(asked["size_bytes"])
            has_bytes = os.fstat(descriptor).st_size - offset
            if not 0 <= size_bytes <= has_bytes or offset < 0:
                lost = StorageUnavailable(f"{asked['name']} has {has_bytes} bytes after {offset}")
                channel.send({"error": lost.to_wire()})
                return
            channel.send({})
            if size_bytes > AUTHENTICATED_BYTES:
                channel.line.sendfile(file, offset, size_bytes)
                return
            data = os.pread(descriptor, size_bytes, offset)
            channel.line.sendall(data)
            channel.prove([memoryview(data)])

    def _opened(self, key: str) -> int:
        path = self._disk.storage.local_path(key)  # refuses names with dots; no other user can write to the directory
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise posix.translate(error, what="Reading", file=key, directory=str(path)) from error


def _write(disk: NodeDisk, key: str, size_bytes: int, channel: Channel, hasher: Hasher) -> None:
    """Receive a file, write it durably, and hash it. Raises StorageError, and OSError of the connection."""
    connection = channel.line
    storage = disk.storage
    part_bytes = min(storage.part_bytes(size_bytes), size_bytes)
    block = _memory(part_bytes)
    if size_bytes == part_bytes:
        receive_into(connection, block)
        if size_bytes <= AUTHENTICATED_BYTES:
            channel.check([block])
        storage.write(key, [block])
        hasher.update(block)
    else:
        writer = storage.open_parts(key, size_bytes)
        try:
            for offset in range(0, size_bytes, part_bytes):
                view = block[: min(part_bytes, size_bytes - offset)]
                receive_into(connection, view)
                hasher.update(view)
                writer.write_part(offset, [view])
            writer.finish()
        except BaseException:
            writer.abort()
            raise
    storage.persist([key])


def _memory(size_bytes: int) -> memoryview:
    """Return new memory. Large memory begins at a page, so that a disk takes it without another copy."""
    return memoryview(bytearray(size_bytes) if size_bytes < mmap.PAGESIZE else mmap.mmap(-1, size_bytes))


class NodeClient(LineClient):
    """Reads and writes files of another node. Safe for threads: each has a connection of its own."""

    reaching = "Nodes must reach each other on all TCP ports, as for torch.distributed; FastTier(interface=) chooses"

    def __init__(
        self,
        node: str,
        addresses: Sequence[Address],
        keys: NodeKeys,
        *,
        rank: int,
        server_rank: int,
        timeout_seconds: float,
    ) -> None:
        """Take the rank of this process, and that of the process that serves the files of the node."""
        super().__init__(
            node,
            addresses,
            keys.shared_with,
            rank=rank,
            server_rank=server_rank,
            timeout_seconds=timeout_seconds,
        )
        self._writing: set[socket.socket] = set()
        self._writing_lock = threading.Lock()

    def read_into(self, attempt: Attempt, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views with a range of a file.

        Raises StorageUnavailable when the node does not answer, and the errors of the node: FileMissing, StorageError.
        """
        asked = self._asked(attempt, name, offset=offset, size_bytes=sum(map(len, views)))

        def talk(channel: Channel) -> dict[str, Any]:
            channel.send(asked)
            answer = channel.receive()
            if "error" not in answer:
                for view in views:
                    receive_into(channel.line, view)
                if asked["size_bytes"] <= AUTHENTICATED_BYTES:
                    channel.check(views)
            return answer

        self.talk(name, talk)

    def write(
        self,
        attempt: Attempt,
        name: str,
        source: Source,
        scratch: memoryview,
        *,
        algorithm: str,
        given_up: threading.Event,
    ) -> Digest:
        """Send a file, and return the digest of the file that the node has written, when that is durable.

        Raises StorageUnavailable when the node does not answer and when `given_up` is set, the errors of the node
        (StorageFull, StorageError), and those of the source.
        """
        asked = self._asked(attempt, name, size_bytes=source.size_bytes, is_written=True, algorithm=algorithm)

        def talk(channel: Channel) -> dict[str, Any]:
            with self._breakable(channel.line):
                if given_up.is_set():
                    raise StorageUnavailable(f"Nobody wants {name} on {self.node} any more", file=name)
                channel.send(asked)
                is_small = source.size_bytes <= AUTHENTICATED_BYTES
                block = memoryview(bytearray(source.size_bytes)) if is_small else scratch
                with source.open() as read:
                    for offset in range(0, source.size_bytes, len(block) or 1):
                        views = read(offset, min(len(block), source.size_bytes - offset), block)
                        if not _sent(channel, views, proves=is_small):
                            break  # it may have sent an error before it broke off
                if is_small and not source.size_bytes:
                    _sent(channel, [], proves=True)
                return channel.receive()

        return Digest.parse(self.talk(name, talk)["digest"])

    def _asked(self, attempt: Attempt, name: str, **more: Any) -> dict[str, Any]:
        return {"node": self.node, "attempt": str(attempt), "name": name, **more}

    @contextlib.contextmanager
    def _breakable(self, connection: socket.socket) -> Iterator[None]:
        """Let `interrupt` break this connection while the context lasts."""
        with self._writing_lock:
            self._writing.add(connection)
        try:
            yield
        finally:
            with self._writing_lock:
                self._writing.discard(connection)

    def interrupt(self) -> None:
        """Break off every `write` in progress."""
        with self._writing_lock:
            writing = list(self._writing)
        for connection in writing:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _sent(channel: Channel, views: Sequence[memoryview], *, proves: bool) -> bool:
    """Send these, and their HMAC with `proves`. Return False if the other side has closed the connection."""
    try:
        for view in views:
            channel.line.sendall(view)
        if proves:
            channel.prove(views)
    except ConnectionError:
        return False
    return True


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises InvalidInput if it does not exist or has none."""
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
    """Return addresses by which other machines may reach this one, best first. Loopback addresses are left out."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(_TEST_NETWORK)
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return [address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback]
