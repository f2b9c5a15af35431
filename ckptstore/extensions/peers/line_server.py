"""Serve requests of other processes that have proved who they are, each connection on a thread of its own.

Strangers cost little: only a few connect at once, and each for a short time. A process that has no descriptors, threads
or memory left refuses new connections, and accepts them again when it has some.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ckptstore.extensions.peers.channel import Channel, SharedKeys, welcome

logger = logging.getLogger("ckptstore")

MAX_STRANGERS = 64
"""The most connections without a proof at once; one more replaces the oldest of them."""
GREETING_SECONDS = 10.0
_PAUSE_SECONDS = 0.2
"""The time without new connections after descriptors, threads or memory have run out."""
_WARN_SECONDS = 60.0


class LineServer(ABC):
    """Accepts connections on a listening socket until it is closed, and has `answer` called for each request."""

    serves: ClassVar[str]
    """Names what it serves, in its warning."""

    def __init__(self, listener: socket.socket, keys: SharedKeys, *, node: str, timeout_seconds: float) -> None:
        """Take over the socket, and begin to serve: `answer` may be called before this returns. A client that is silent
        for the timeout in the middle of a request is given up."""
        self._listener, self._keys, self._node, self._timeout_seconds = listener, keys, node, timeout_seconds
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        """The connections without a proof, oldest first."""
        self._warned_seconds = -_WARN_SECONDS
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="ckptstore-node-server", daemon=True).start()

    def close(self) -> None:
        """Stop to serve, and close all connections."""
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
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._pause(error)
                continue
            try:
                self._let_in(connection)
            except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no more threads can be started
                self._forget(connection)
                connection.close()
                self._pause(error)

    def _let_in(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._open.add(connection)
            self._strangers[connection] = None
            waiting = next(iter(self._strangers)) if len(self._strangers) > MAX_STRANGERS else None
            if waiting is not None:
                del self._strangers[waiting]
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._serve, args=(connection,), name="ckptstore-node-server", daemon=True).start()

    def _pause(self, error: BaseException) -> None:
        """Wait after an error of a new connection, most often a lack of descriptors, and log it now and then."""
        if self._is_closed:
            return
        now = time.monotonic()
        if now - self._warned_seconds >= _WARN_SECONDS:
            self._warned_seconds = now
            logger.warning("%s cannot serve %s to other nodes for the moment: %s", self._node, self.serves, error)
        time.sleep(_PAUSE_SECONDS)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._strangers.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, MemoryError):
                set_up(connection, GREETING_SECONDS)
                channel = welcome(connection, self._keys, node=self._node, seconds=GREETING_SECONDS)
                with self._lock:
                    self._strangers.pop(connection, None)
                while True:
                    connection.settimeout(None)  # a proven client may send its next request after hours
                    request = channel.receive()
                    connection.settimeout(self._timeout_seconds)
                    self.answer(channel, request)
        finally:
            self._forget(connection)

    @abstractmethod
    def answer(self, channel: Channel, request: Mapping[str, Any]) -> None:
        """Answer one request. OSError, ValueError, KeyError, TypeError and MemoryError end the connection."""


def set_up(connection: socket.socket, timeout_seconds: float) -> None:
    """Prepare a new connection: no delays, and a look now and then whether the other side still exists."""
    connection.settimeout(timeout_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # between saves, nothing is said for hours
