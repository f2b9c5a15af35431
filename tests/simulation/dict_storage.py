"""A storage with locks and a clock of its own, in a module that the simulation does not know."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckptstore.errors import CheckpointDamaged, FileMissing
from ckptstore.storage.base import Storage, StoredFile

PLACES: defaultdict[str, dict[str, tuple[bytes, float]]] = defaultdict(dict)


class DictStorage(Storage):
    uri = ""

    def __init__(self, uri: str) -> None:
        self.uri = f"dict://{uri.partition('://')[2]}"
        self.files = PLACES[uri]
        self.lock = threading.Lock()

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        with self.lock:
            self.files[key] = (b"".join(views), time.time())

    def read(self, key: str) -> bytes:
        with self.lock:
            if key not in self.files:
                raise FileMissing(f"There is no {key}", file=key)
            return self.files[key][0]

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        data = self.read(key)
        for view in views:
            piece = data[offset : offset + len(view)]
            if len(piece) < len(view):
                raise CheckpointDamaged(f"{key} ends early", file=key)
            view[:] = piece
            offset += len(view)

    def stat(self, key: str) -> StoredFile:
        return StoredFile(key, len(self.read(key)), self.files[key][1])

    def list(self, prefix: str) -> Iterator[StoredFile]:
        return iter([self.stat(key) for key in [*self.files] if key.startswith(prefix)])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.files.pop(key, None)

    def close(self) -> None:
        """Nothing is held."""

    def create(self, key: str, data: bytes) -> bool:
        with self.lock:
            if key in self.files:
                return False
            self.files[key] = (data, time.time())
            return True


class Forgets(DictStorage):
    """Loses a record when another one is put in its place."""

    def create(self, key: str, data: bytes) -> bool:
        if super().create(key, data):
            return True
        if key.startswith("log/"):
            self.files[key] = (data, time.time())
        return False
