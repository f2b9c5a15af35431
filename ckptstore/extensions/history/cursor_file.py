"""Keep a cursor: in a file of its own, or by a name in the store that it belongs to."""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path

from ckptstore.errors import FileMissing, InvalidInput
from ckptstore.extensions.history.cursor import Cursor
from ckptstore.format.layout import cursor_key
from ckptstore.storage.base import Storage, create_if_able
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import local_path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class CursorFile:
    """The object or file that holds a cursor. One follower at a time may use it."""

    def __init__(self, cursor: str | os.PathLike[str], storage: Storage) -> None:
        """A text without a slash is a name in the store `storage`; any other one, and a `Path`, is a file.

        Raises InvalidInput for a name that no object can have, and for one that is also that of a file here.
        """
        self._storage, self._path = storage, None
        if isinstance(cursor, str) and "/" not in cursor:
            if _NAME.fullmatch(cursor) is None:
                raise InvalidInput(
                    f"{cursor!r} is not the name of a cursor",
                    hint="Letters, digits, '.', '_' and '-', at most 100; a file is written with a slash, as in ./name",
                )
            if os.path.lexists(cursor):
                raise InvalidInput(
                    f"{cursor} is a file here, and as a cursor a name without a slash is one kept in the store",
                    hint=f"Write ./{cursor} for the file, or choose another name",
                )
            self._key = cursor_key(cursor)
            return
        self._path = Path(local_path(cursor, "A cursor")).absolute()
        if self._path.is_dir() or not self._path.parent.is_dir():
            raise InvalidInput(f"{self._path} is a directory, or lies in none", hint="Give the path of a file")
        self._key = self._path.name

    @property
    def place(self) -> str:
        """The place for people."""
        return str(self._path or f"{self._storage.uri}/{self._key}")

    def read(self) -> Cursor | None:
        """Return the cursor, None if there is none yet. Raises CheckpointDamaged for what is none."""
        try:
            if self._path is not None:
                return Cursor.decode(self._path.read_bytes(), file=self.place)
            data = self._storage.read(self._key)
        except (FileMissing, FileNotFoundError):
            return None
        return Cursor.decode(data, file=self.place)

    def write(self, cursor: Cursor) -> None:
        """Replace the cursor, durably."""
        if self._path is None:
            _write(self._storage, self._key, cursor.encode())
            return
        with closing(open_storage(os.fspath(self._path.parent))) as directory:
            _write(directory, self._key, cursor.encode())


def _write(storage: Storage, key: str, data: bytes) -> None:
    # A disk replaces a file in one step, but makes a new one in two: a crash in between would leave half a cursor.
    if not create_if_able(storage, key, data):
        storage.write(key, [memoryview(data)])
        storage.persist([key])
