"""The limits of the machine for the same bytes: system calls, plain requests, one memcpy, the line between nodes."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import Contender, Settings
from ckptstore.tools.bench.raw import MIB, Memory, copy, in_threads, read_into, write

_REQUEST_BYTES = 16 * MIB
_SENT_BYTES = 4 * MIB
_TIMEOUT_SECONDS = 120.0
_CORES = os.cpu_count() or 1


class Limit(Contender):
    """Holds the bytes of this rank in memory of its own."""

    family = "limit"
    role: ClassVar[Role] = "limit"

    @property
    def size_bytes(self) -> int:
        """The bytes of the state, in whole pages as direct writes require."""
        return -(-self.case.rank_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @cached_property
    def memory(self) -> Memory:
        """As many bytes as the state has."""
        return Memory(self.size_bytes)

    def prepare(self, place: str) -> None:
        """Allocate the memory before the clock runs."""
        assert len(self.memory.view) == self.size_bytes

    def wrong(self) -> str | None:
        return None

    def close(self) -> None:
        if "memory" in self.__dict__:
            self.memory.close()
            del self.memory


class RawDisk(Limit):
    """`pwrite` and `preadv`, with all settings that may be the fastest."""

    name = "raw disk"
    needs = ("disk", "there is no disk")
    tried_in_load = tuple({"threads": count} for count in (1, 2, 4) if count <= max(2, _CORES))

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        if action == "load":
            return [*cls.tried_in_load]
        # Direct writes leave nothing in memory, so they are for durable ones.
        kinds = ("buffered", "early", "direct") if case.durable else ("buffered",)
        return [
            {"kind": kind, "block_bytes": block_bytes, "one_file": one_file, "num_threads": 2}
            for kind, block_bytes, one_file in itertools.product(kinds, (MIB, 4 * MIB, 16 * MIB), (True, False))
        ]

    def save(self, place: str) -> None:
        self.write(self.directory(place))

    def write(self, directory: Path) -> None:
        """Write the bytes of this rank."""
        write(self.memory.view, directory, durable=self.case.durable, **self.settings)

    def prepare(self, place: str) -> None:
        super().prepare(place)
        Path(place).mkdir(parents=True, exist_ok=True)

    def load(self, place: str) -> None:
        paths = sorted(self.directory(place).iterdir())
        read_into(self.memory.view, paths, num_threads=self.settings["threads"])

    def directory(self, place: str) -> Path:
        """Return the directory of this rank."""
        return Path(place) / f"rank-{self.case.rank}"


class RawDiskLoad(RawDisk):
    """`preadv` of files that are all written the same way."""

    def write(self, directory: Path) -> None:
        write(self.memory.view, directory, kind="buffered", block_bytes=16 * MIB, one_file=False, durable=False)


class RawNode(RawDisk):
    """The bytes of this rank, with the settings that have been the fastest."""

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        slow = "buffered" if case.durable else ""
        found = super().sweep(case, "save")
        return [each for each in found if each["kind"] != slow and each["block_bytes"] > MIB and not each["one_file"]]


class BothCopies(RawNode):
    """The bytes of this rank twice, as a node with two copies writes them."""

    name = "raw disk, both copies"

    def save(self, place: str) -> None:
        for owner in ("own", "partner"):
            self.write(self.directory(place) / owner)

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self.directory(place).mkdir()


class RawRequests(Limit):
    """Plain writes and ranged reads of 16 MiB with the same client as ckptstore: no digests, no commit, no plan."""

    name = "raw requests"
    needs = ("bucket", "there is a disk")
    tried = ({"threads": 4}, {"threads": 16})

    _storage: Storage | None = None

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self._close_storage()
        self._storage = open_storage(place, storage_options=self.case.place.storage_options)

    def save(self, place: str) -> None:
        self._each(lambda storage, key, view: storage.write(key, [view]))

    def load(self, place: str) -> None:
        self._each(lambda storage, key, view: storage.read_into(key, 0, [view]))

    def _each(self, call: Callable[[Storage, str, memoryview], object]) -> None:
        """Call with the key and the bytes of each request."""
        storage = self._storage
        assert storage is not None

        def move(start: int) -> None:
            call(storage, f"raw/{self.case.rank}-{start}", self.memory.view[start : start + _REQUEST_BYTES])

        with ThreadPoolExecutor(self.settings["threads"]) as pool:
            list(pool.map(move, range(0, self.size_bytes, _REQUEST_BYTES)))

    def _close_storage(self) -> None:
        if self._storage is not None:
            self._storage.close()

    def close(self) -> None:
        self._close_storage()
        super().close()


class PlainSockets(Limit):
    """PUTs of 16 MiB from memory to sockets, a thread for each core: no client, no digest, no signature."""

    name = "plain sockets"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        if case.place.authority:
            return "they have no TLS"
        return None if case.place.endpoint_url else "only the test server takes what nobody signed"

    def save(self, place: str) -> None:
        url, location, view = urlsplit(str(self.case.place.endpoint_url)), parse_uri(place), self.memory.view

        def put(first: int) -> None:
            with closing(HTTPConnection(url.hostname or "", url.port)) as connection:
                for start in range(0, self.size_bytes, _REQUEST_BYTES)[first::_CORES]:
                    path = f"/{location.container}/{location.prefix}/{self.case.rank}-{start}"
                    connection.request("PUT", path, body=view[start : start + _REQUEST_BYTES])
                    answer = connection.getresponse()
                    text = answer.read()
                    if answer.status != HTTPStatus.OK:
                        raise OSError(f"{path}: {answer.status} {text!r}")

        in_threads(_CORES, put)


class Memcpy(Limit):
    """One copy of the state in memory: an asynchronous save cannot hold up a training on a CPU for less."""

    name = "memcpy"
    tried = ({"threads": 1}, {"threads": 2})

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._target = Memory(self.size_bytes)

    def save(self, place: str) -> None:
        copy(self._target, self.memory, num_threads=self.settings["threads"])

    def close(self) -> None:
        self._target.close()
        super().close()


class Loopback(Limit):
    """Every rank sends its bytes to a rank of the other node over TCP, and receives that one's."""

    name = "loopback"
    tried = ({"connections": 1}, {"connections": 2})

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

    def prepare(self, place: str) -> None:
        """Allocate nothing: the tensors themselves are sent."""

    def save(self, place: str) -> None:
        with ThreadPoolExecutor(2 * len(self._out)) as pool:
            sent = [pool.submit(_send, one, share) for one, share in zip(self._out, self._shares, strict=True)]
            received = [pool.submit(_receive, one, size) for one, size in zip(self._in, self._expected, strict=True)]
            for done in (*sent, *received):
                done.result()

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
