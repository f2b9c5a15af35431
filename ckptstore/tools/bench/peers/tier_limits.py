"""The limits of the machine for a fast tier of two copies: the disk twice, and the line between nodes."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import Wait
from ckptstore.tools.bench.peers.limits import Limit, RawDisk
from ckptstore.tools.bench.raw import MIB, Way

_SENT_BYTES = 4 * MIB
_TIMEOUT_SECONDS = 120.0


class RawNode(RawDisk):
    """The bytes of this rank, with few settings."""

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        """Return the settings that have been the fastest."""
        kinds = ("early", "direct") if case.durable else ("buffered",)
        return [
            {"kind": kind, "block_bytes": size, "one_file": False, "num_threads": 2}
            for kind in kinds
            for size in (4 * MIB, 16 * MIB)
        ]


class BothCopies(RawNode):
    """The bytes of this rank twice, as a node with two copies writes them."""

    name = "raw disk, both copies"

    def save(self, place: str) -> Wait | None:
        way = Way(durable=self.case.durable, **self.settings)
        for copy in ("own", "partner"):
            way.write(self.memory.view, self._directory(place) / copy)
        return None

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self._directory(place).mkdir()


class Loopback(Limit):
    """Every rank sends its bytes to a rank of the other node over TCP, and receives that one's."""

    name = "loopback"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"connections": 1}, {"connections": 2}]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        views = [tensor.view(-1).view(torch.uint8).numpy().data for tensor in case.local.values()]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports = case.gather(listener.getsockname()[1])
            partner = ports[(case.rank + case.world_size // 2) % case.world_size]
            count = settings["connections"]
            self._out = [socket.create_connection(("127.0.0.1", partner), _TIMEOUT_SECONDS) for _ in range(count)]
            self._in = [listener.accept()[0] for _ in range(count)]
        self._shares = [views[number::count] for number in range(count)]
        sizes = case.gather([sum(map(len, share)) for share in self._shares])
        self._expected = sizes[(case.rank - case.world_size // 2) % case.world_size]

    def save(self, place: str) -> Wait | None:
        with ThreadPoolExecutor(2 * len(self._out)) as pool:
            sent = [pool.submit(_send, one, share) for one, share in zip(self._out, self._shares, strict=True)]
            received = [pool.submit(_receive, one, size) for one, size in zip(self._in, self._expected, strict=True)]
            for done in (*sent, *received):
                done.result()
        return None

    def close(self) -> None:
        for one in (*self._out, *self._in):
            one.close()
        super().close()


def _send(connection: socket.socket, views: list[memoryview]) -> None:
    for view in views:
        for start in range(0, len(view), _SENT_BYTES):
            connection.sendall(view[start : start + _SENT_BYTES])


def _receive(connection: socket.socket, size_bytes: int) -> None:
    block = memoryview(bytearray(_SENT_BYTES))
    connection.settimeout(_TIMEOUT_SECONDS)
    while size_bytes:
        count = connection.recv_into(block[: min(len(block), size_bytes)])
        if not count:
            raise ConnectionResetError("the other rank has gone")
        size_bytes -= count
