"""A disk as an object store would be: it can be read and written, and has no paths to hand out."""

from __future__ import annotations

from ckptstore.storage.disk.local import LocalStorage


class NoPaths:
    """A disk that gives no paths away, as an object store has none: what is on it must be downloaded."""

    def __init__(self, root: str) -> None:
        self._disk = LocalStorage(root)
        self.uri = f"nopaths:{root}"
        for verb in ("write", "read", "read_into", "stat", "list", "delete", "close"):
            setattr(self, verb, getattr(self._disk, verb))
