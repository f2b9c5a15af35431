"""The limits of the machine for the same bytes: system calls, plain requests, one memcpy."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.raw import MIB, Memory, Way, copy, read_into, ways

_REQUEST_BYTES = 16 * MIB


class Limit(Contender):
    """Holds the bytes of this rank in memory of its own."""

    family = "limit"
    role: ClassVar[Role] = "limit"

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._memory: Memory | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of the state, in whole pages as direct writes require."""
        return -(-self.case.rank_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def memory(self) -> Memory:
        """As many bytes as the state has."""
        if self._memory is None:
            self._memory = Memory(self.size_bytes)
        return self._memory

    def wrong(self) -> str | None:
        return None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class RawDisk(Limit):
    """`pwrite` and `preadv`, with all settings that may be the fastest."""

    name = "raw disk"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None if case.place.is_local else "there is no disk"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        cores = os.cpu_count() or 1
        if action == "load":
            return [{"threads": count} for count in (1, 2, 4) if count <= max(2, cores)]
        names = ("kind", "block_bytes", "one_file", "num_threads")
        return [{name: getattr(way, name) for name in names} for way in ways(durable=case.durable)]

    def save(self, place: str) -> Wait | None:
        Way(durable=self.case.durable, **self.settings).write(self.memory.view, self._directory(place))
        return None

    def prepare(self, place: str) -> None:
        assert len(self.memory.view) == self.size_bytes  # allocated before the clock runs
        Path(place).mkdir(parents=True, exist_ok=True)

    def load(self, place: str) -> None:
        paths = sorted(self._directory(place).iterdir())
        read_into(self.memory.view, paths, num_threads=self.settings["threads"])

    def _directory(self, place: str) -> Path:
        return Path(place) / f"rank-{self.case.rank}"


class RawDiskLoad(RawDisk):
    """`preadv` of files that are all written the same way."""

    def save(self, place: str) -> Wait | None:
        way = Way(kind="buffered", block_bytes=16 * MIB, one_file=False, durable=False)
        way.write(self.memory.view, self._directory(place))
        return None


class RawRequests(Limit):
    """Plain writes and ranged reads of 16 MiB with the same client as ckptstore: no digests, no commit, no plan."""

    name = "raw requests"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return "there is a disk" if case.place.is_local else None

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"threads": count} for count in (4, 16)]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._opened: dict[str, Storage] = {}

    def _storage(self, place: str) -> Storage:
        if place not in self._opened:
            self._opened[place] = open_storage(place, storage_options=self.case.place.storage_options)
        return self._opened[place]

    def prepare(self, place: str) -> None:
        assert len(self.memory.view) == self.size_bytes
        self._storage(place)

    def save(self, place: str) -> Wait | None:
        storage, view = self._storage(place), self.memory.view

        def write(start: int) -> None:
            storage.write(self._key(start), [view[start : start + _REQUEST_BYTES]])

        self._each(write)
        return None

    def load(self, place: str) -> None:
        storage, view = self._storage(place), self.memory.view
        self._each(lambda start: storage.read_into(self._key(start), 0, [view[start : start + _REQUEST_BYTES]]))

    def _key(self, start: int) -> str:
        return f"raw/{self.case.rank}-{start}"

    def _each(self, call: Any) -> None:
        with ThreadPoolExecutor(self.settings["threads"]) as pool:
            list(pool.map(call, range(0, self.size_bytes, _REQUEST_BYTES)))

    def close(self) -> None:
        for storage in self._opened.values():
            storage.close()
        self._opened.clear()
        super().close()


class PlainSockets(Limit):
    """PUTs of 16 MiB from memory to sockets, a thread for each core: no client, no digest, no signature."""

    name = "plain sockets"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None if case.place.endpoint_url else "only the test server takes what nobody signed"

    def prepare(self, place: str) -> None:
        assert len(self.memory.view) == self.size_bytes

    def save(self, place: str) -> Wait | None:
        url, location, view = urlsplit(str(self.case.place.endpoint_url)), parse_uri(place), self.memory.view
        starts, num_threads = range(0, self.size_bytes, _REQUEST_BYTES), os.cpu_count() or 1

        def put(first: int) -> None:
            with closing(HTTPConnection(url.hostname or "", url.port)) as connection:
                for start in starts[first::num_threads]:
                    path = f"/{location.container}/{location.prefix}/{self.case.rank}-{start}"
                    connection.request("PUT", path, body=view[start : start + _REQUEST_BYTES])
                    answer = connection.getresponse()
                    if answer.status != HTTPStatus.OK:
                        raise OSError(f"{path}: {answer.status} {answer.read()!r}")
                    answer.read()

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(put, range(num_threads)))
        return None


class Memcpy(Limit):
    """One copy of the state in memory: an asynchronous save cannot hold up a training on a CPU for less."""

    name = "memcpy"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"threads": count} for count in (1, 2)]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._target = Memory(self.size_bytes)

    def prepare(self, place: str) -> None:
        assert len(self.memory.view) == self.size_bytes

    def save(self, place: str) -> Wait | None:
        copy(self._target, self.memory, num_threads=self.settings["threads"])
        return None

    def close(self) -> None:
        self._target.close()
        super().close()
