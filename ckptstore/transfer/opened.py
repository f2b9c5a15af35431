"""An open place: its storage with retries, and the transfer that moves its bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.retried import with_retries
from ckptstore.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPlace:
    """The storage at one URI, its transfer and their configuration."""

    storage: Storage
    transfer: Transfer
    config: StoreConfig

    def sizes_bytes(self) -> dict[str, int]:
        """Return the size of every file below it, by name."""
        return {file.key: file.size_bytes for file in self.storage.list("")}

    def close(self) -> None:
        """Close the transfer and the connections."""
        self.transfer.close()
        self.storage.close()


def open_place(
    uri: str | os.PathLike[str],
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: str | None = None,
    fs: object = None,
) -> OpenedPlace:
    """Open the place at a URI, with the environment's configuration if `config` is None. Creates nothing.

    Raises InvalidInput as `open_storage` does.
    """
    config = StoreConfig.from_env() if config is None else config
    storage = open_storage(
        os.fspath(uri),
        storage_options=storage_options,
        engine=engine,
        fs=fs,
        durable=config.transfer.durable,
        direct_io=config.transfer.direct_io,
    )
    storage = with_retries(storage, config.retry)
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    return OpenedPlace(storage=storage, transfer=transfer, config=config)
