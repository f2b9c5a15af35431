"""Look a second time, in another way, before a file counts as damaged: a proxy, a cache, a connection or a page of
memory can deliver wrong bytes, an older file or none, though the file is whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ckptstore.errors import CheckpointDamaged, FileMissing, UnsupportedVersion
from ckptstore.storage.base import Storage, create_if_able

logger = logging.getLogger("ckptstore")
T = TypeVar("T")


def looked_twice(storage: Storage, key: str, look: Callable[[], T]) -> T:
    """Return the result of `look`; call it again, after a `doubt` of the key, if it raises CheckpointDamaged,
    UnsupportedVersion or FileMissing. Errors of the second call are raised."""
    try:
        return look()
    except (CheckpointDamaged, FileMissing, UnsupportedVersion) as error:
        first = error.message  # not the error: its traceback keeps the buffers alive
    storage.doubt(key)
    found = look()
    tell(storage, key, first)
    return found


def has_bytes(storage: Storage, key: str, data: bytes) -> bool:
    """Return True if a file has these bytes; if it seems to have others, it is read again as in `looked_twice`.
    Raises FileMissing."""
    if storage.read(key) == data:
        return True
    storage.doubt(key)
    return storage.read(key) == data


def created(storage: Storage, key: str, data: bytes) -> bool:
    """Create the key, or write it where the storage cannot create-if-absent; return True if it now holds `data`."""
    is_new = create_if_able(storage, key, data)
    if is_new is None:
        storage.write(key, [memoryview(data)])
        storage.persist([key])
    return is_new is not False or has_bytes(storage, key, data)


def tell(storage: Storage, key: str, what: str) -> None:
    """Warn of a file that was whole at the second look."""
    logger.warning(
        "%s of %s was whole when it was read again in another way; at first: %s. Something on the way does not "
        "give what is stored",
        key,
        storage.uri,
        what,
    )
