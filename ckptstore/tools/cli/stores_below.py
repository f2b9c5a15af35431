"""The stores below a prefix, found by their `store.json`, in a bounded number of requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError
from ckptstore.format.layout import STORE_KEY
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_store_json
from ckptstore.opening import open_store
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.retry import retrying

MOST_LISTED = 100_000
"""The most files below the prefix to look at, 100 requests on most object stores; on a disk the most directories."""
MOST_STORES = 1000
"""The most stores to open, each for some requests."""
_MARK = f"/{STORE_KEY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBelow:
    """One store below a prefix, and what its log says."""

    uri: str
    num_checkpoints: int = 0
    latest_step: int | None = None
    latest_created_at: float | None = None
    kept_by: str = KEPT_BY_CKPTSTORE
    error: str = ""
    """Why it could not be read."""


def stores_below(uri: str, storage_options: Mapping[str, Any]) -> tuple[list[StoreBelow], bool]:
    """Return the stores below a prefix, by name, and whether these are all.

    On a disk directories are looked at, except those inside of stores and behind links. An object store lists files
    alone, those of the stores included. Of either no more than MOST_LISTED are looked at. Raises StorageError.
    """
    with closing(open_storage(uri, storage_options=storage_options)) as root:
        found, is_all = _on_disk(root) if isinstance(root, Disk) else _in_bucket(root)
    names = sorted(found)
    return [_look(f"{uri.rstrip('/')}/{name}", storage_options) for name in names[:MOST_STORES]], (
        is_all and len(names) <= MOST_STORES
    )


def _in_bucket(root: Storage) -> tuple[list[str], bool]:
    # With a bound of its own: retries around a whole listing would read it to its end first.
    listed = retrying(RetryConfig.from_env(), "list", lambda: [*islice(root.list(""), MOST_LISTED + 1)])
    keys = [file.key for file in listed[:MOST_LISTED]]
    return [key.removesuffix(_MARK) for key in keys if key.endswith(_MARK)], len(listed) <= MOST_LISTED


def _on_disk(root: Disk) -> tuple[list[str], bool]:
    top, found, unread = root.local_path(""), list[str](), list[OSError]()
    for number, (path, directories, files) in enumerate(os.walk(top, onerror=unread.append)):
        if number == MOST_LISTED:
            return found, False
        if STORE_KEY in files:
            directories.clear()
            found.append(os.path.relpath(path, top).replace(os.sep, "/"))
    return found, not unread


def _look(uri: str, storage_options: Mapping[str, Any]) -> StoreBelow:
    try:
        with open_store(uri, storage_options=storage_options) as store:
            job = job_of(store)
            identity = read_store_json(job.storage)
            newest = job.log.newest()
            number = newest.state.latest if newest else None
            latest = job.log.records([] if number is None else [number])
            return StoreBelow(
                uri=uri,
                num_checkpoints=len(newest.state.live) if newest else 0,
                latest_step=latest[0].entry.step if latest else None,
                latest_created_at=latest[0].entry.created_at if latest else None,
                kept_by=identity.kept_by if identity else KEPT_BY_CKPTSTORE,
            )
    except CkptstoreError as error:
        return StoreBelow(uri=uri, error=f"{error.code}: {error.message}")
