"""A storage without any power, for what has to do without."""

from __future__ import annotations

from ckptstore.storage.base import Storage


class BareStorage(Storage):
    """The seven verbs of another storage, and nothing else of it."""

    uri = ""

    def __init__(self, inner: Storage) -> None:
        self.uri, self.write, self.read, self.read_into = inner.uri, inner.write, inner.read, inner.read_into
        self.stat, self.list, self.delete, self.close = inner.stat, inner.list, inner.delete, inner.close
