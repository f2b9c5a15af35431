"""A storage without any power, for what has to do without."""

from __future__ import annotations

from ckptstore.storage.base import Storage
from ckptstore.storage.memory import MemoryStorage


class BareStorage(MemoryStorage):
    """The seven verbs of a storage in memory, and nothing else of it."""

    create = part_bytes = open_parts = copy = None  # type: ignore[assignment]

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner.uri)
