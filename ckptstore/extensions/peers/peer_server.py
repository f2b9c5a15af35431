"""Serve extents of the files of checkpoints to other nodes: from memory, from finished copies on this node's disk, or
read once from the storage.

    request   file, offset, size_bytes: the URI of a file below an open store, and a stretch of one extent of it
    reply     {"wait": true} while the extent is being read, again and again; then
              {"no": reason}, or {"size_bytes", "digest"} and the bytes

A process has one server, at the port of its node, for all stores that it has open. Only files of attempts are served,
which never change, and only below the stores that this process reads itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ckptstore.config import PeerConfig
from ckptstore.errors import InvalidName
from ckptstore.extensions.peers.channel import AUTHENTICATED_BYTES, Channel, token_keys
from ckptstore.extensions.peers.extents import ExtentRead, Extents
from ckptstore.extensions.peers.line_client import Address
from ckptstore.extensions.peers.line_server import LineServer
from ckptstore.extensions.peers.served_store import ServedStore
from ckptstore.format.layout import CHECKPOINT_PREFIX, Attempt, check_name
from ckptstore.runtime.fork import in_forked_child
from ckptstore.transfer.moves import EXTENT_BYTES

GROUP = "peer/1"
"""The name of all peers when they prove who they are; versions that talk in another way have another number."""
_WAIT_SECONDS = 1.0
"""The interval at which a node that waits hears that it has to wait on."""
_IDLE_SECONDS = 1.0
"""The time without a request after which nobody seems to need this node any more."""

_SILENCE_SECONDS = 60.0
"""The longest silence of a client in the middle of a request."""


def is_shared(file: str) -> bool:
    """Return True for the URI of a file of an attempt: such files never change."""
    _, found, rest = f"/{file}".rpartition(f"/{CHECKPOINT_PREFIX}step-")
    directory, _, name = rest.partition("/")
    return bool(found and name) and Attempt.parse(f"step-{directory}") is not None


class PeerServer(LineServer):
    """The server of this process. It ends with the last store that shares it."""

    serves = "bytes of checkpoints"

    def __init__(self, listener: socket.socket, config: PeerConfig, num_reads: int) -> None:
        """Begin to serve at a socket that listens."""
        self.extents = Extents(config.peers_cache_bytes, num_reads)
        self._sources: list[ServedStore] = []
        self._requested_seconds = -_IDLE_SECONDS
        self._config = config
        super().__init__(listener, token_keys(config.peers_token), node=GROUP, timeout_seconds=_SILENCE_SECONDS)
        in_forked_child(self, PeerServer._after_fork)

    def _after_fork(self) -> None:
        """Leave the port to the parent: a child would keep it after the end of the parent, and answer nobody."""
        self._is_closed = True
        for line in (self._listener, *self._open):
            line.close()

    def answer(self, channel: Channel, request: Mapping[str, Any]) -> None:
        self._requested_seconds = time.monotonic()
        file, offset, size_bytes = str(request["file"]), int(request["offset"]), int(request["size_bytes"])
        piece = self.piece(file, offset, size_bytes, inline=False)
        if piece is None:
            channel.send({"no": "this node does not read that"})
            return
        while not piece.ended.wait(_WAIT_SECONDS):
            channel.send({"wait": True})
        self._requested_seconds = time.monotonic()
        if piece.data is None:
            channel.send({"no": piece.failure})
            return
        data = piece.bytes_at(offset, size_bytes)
        channel.send({"size_bytes": size_bytes, "digest": str(piece.digest_of(offset, size_bytes))})
        channel.line.sendall(data)
        if size_bytes <= AUTHENTICATED_BYTES:
            channel.prove([data])

    def piece(self, file: str, offset: int, size_bytes: int, *, inline: bool) -> ExtentRead | None:
        """Return a piece that covers a stretch, as `Extents.get` does; None where this process does not serve it."""
        source = self._source_of(file, offset, size_bytes)
        if source is None:
            return None
        read = partial(source.read, file[len(source.uri) + 1 :])
        return self.extents.get(file, offset, size_bytes, read, inline=inline)

    def _source_of(self, file: str, offset: int, size_bytes: int) -> ServedStore | None:
        """Return the store that has a stretch of one extent of a file, None if this process does not serve that."""
        last = offset + size_bytes - 1
        with self._lock:
            sources = self._sources[::-1]
        source = next((item for item in sources if file.startswith(f"{item.uri}/")), None)
        is_stretch = 0 <= offset <= last and offset // EXTENT_BYTES == last // EXTENT_BYTES
        if source is None or not is_shared(file) or not is_stretch:
            return None
        try:
            check_name(file[len(source.uri) + 1 :])
        except InvalidName:
            return None
        return source

    def add(self, source: ServedStore) -> bool:
        """Serve the files of one more store. Return False if the server is being closed."""
        with self._lock:
            if not self._is_closed:
                self._sources.append(source)
            return not self._is_closed

    def remove(self, source: ServedStore) -> None:
        """Serve the files of a store no more, once nobody has asked for a while; with the last one, end.

        It waits for others at most `peers_linger_seconds`.
        """
        deadline = time.monotonic() + self._config.peers_linger_seconds
        while time.monotonic() < min(deadline, self._requested_seconds + _IDLE_SECONDS):
            time.sleep(0.05)
        with self._lock:
            self._sources.remove(source)
            is_last = not self._sources
            self._is_closed = self._is_closed or is_last
        if is_last:
            self.close()


_servers: WeakValueDictionary[Address, PeerServer] = WeakValueDictionary()
_lock = threading.Lock()


def server_at(address: Address, source: ServedStore, config: PeerConfig, num_reads: int) -> PeerServer | None:
    """Return the server of this process at an address, which now serves a store as well; None if another process has
    the port, or it cannot be listened to. Raises nothing."""
    with _lock:
        server = _servers.get(address)
        if server is not None and server.add(source):
            return server
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            listener = socket.create_server(address, family=family, backlog=256)
        except OSError:
            return None
        server = _servers[address] = PeerServer(listener, config, num_reads)
        server.add(source)
        return server
