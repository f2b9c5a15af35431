"""Send requests to the server of another process, over connections that are kept and used again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, StorageUnavailable, from_wire
from ckptstore.extensions.peers.channel import Channel, SharedKeys, greet
from ckptstore.extensions.peers.line_server import GREETING_SECONDS, set_up

Address = tuple[str, int]


class LineClient:
    """Connections to one `LineServer`. Safe for threads: each has a connection of its own."""

    reaching = ""
    """Says, in the error of a server that cannot be reached, what to do."""

    def __init__(
        self,
        node: str,
        addresses: Sequence[Address],
        keys: SharedKeys,
        *,
        rank: int = 0,
        server_rank: int = 0,
        timeout_seconds: float,
    ) -> None:
        """Connect to nobody yet. `rank` is the rank of this process, `server_rank` that of the process that serves,
        where each two ranks have keys of their own."""
        self.node = node
        """The name of the other node."""
        self._addresses, self._keys = list(addresses), keys
        self._rank, self._server_rank = rank, server_rank
        self._timeout_seconds = timeout_seconds
        self._idle: list[Channel] = []
        self._lock = threading.Lock()

    def talk(self, name: str, talk: Callable[[Channel], dict[str, Any]]) -> dict[str, Any]:
        """Call `talk` on an idle connection, or else on a new one, and return the reply. Raises the error in it."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None  # if the other side has closed it, the next is tried
            channel = idle or self._connected()
            try:
                answer = talk(channel)
            except (OSError, ValueError, TypeError) as error:
                channel.line.close()
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
                channel.line.close()
                raise
            if "error" in answer:
                channel.line.close()
                raise from_wire(dict(answer["error"]))
            with self._lock:
                self._idle.append(channel)
            return answer

    def is_other(self, addresses: Sequence[Address]) -> bool:
        """Return True if these are not the addresses of the server."""
        return set(addresses) != set(self._addresses)

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.line.close()

    def _connected(self) -> Channel:
        failures = []
        for address in list(self._addresses):
            connection: socket.socket | None = None
            seconds = min(GREETING_SECONDS, self._timeout_seconds)
            try:
                connection = socket.create_connection(address, timeout=seconds)
                channel = greet(
                    connection,
                    self._keys,
                    rank=self._rank,
                    server_rank=self._server_rank,
                    node=self.node,
                    seconds=seconds,
                )
                set_up(connection, self._timeout_seconds)
            except (OSError, ValueError) as error:
                if connection is not None:
                    connection.close()
                failures.append(f"{address[0]}:{address[1]}: {error}")
                continue
            self._addresses.sort(key=lambda other: other != address)
            return channel
        raise StorageUnavailable(
            f"{self.node} cannot be reached: {'; '.join(failures)}",
            hint=self.reaching,
        )
