"""An open place: its storage with retries, and the transfer that moves its bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptstore import extended
from ckptstore.config import PeerConfig, StoreConfig
from ckptstore.errors import InvalidInput
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.probe import is_server
from ckptstore.storage.retry import with_retries
from ckptstore.transfer import Transfer

_PEER_RETRY_SECONDS = 30.0
"""The longest time of tries of a read for other nodes: they can read for themselves."""


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
    peers: str | None = None,
) -> OpenedPlace:
    """Open the place at a URI, with the environment's configuration if `config` is None. Creates nothing.

    The peers of the configuration are asked where the storage is a server; those of the call must be of one. Raises
    InvalidInput if they are not, and as `open_storage` does.
    """
    config = StoreConfig.from_env() if config is None else config
    if peers is not None:
        config = replace(config, peer=PeerConfig.from_env(peers=peers))
    storage = open_storage(
        os.fspath(uri),
        storage_options=storage_options,
        engine=engine,
        fs=fs,
        durable=config.transfer.durable,
        direct_io=config.transfer.direct_io,
    )
    if peers and not is_server(storage):
        raise InvalidInput(
            f"peers are given for {storage.uri}, which no server keeps",
            hint="Leave peers out: every process reads that for itself",
        )
    found = None
    if config.peer.peers and is_server(storage):
        seconds = min(config.retry.retry_deadline_seconds, _PEER_RETRY_SECONDS)
        patient = with_retries(storage, replace(config.retry, retry_deadline_seconds=seconds))
        found = extended.Peers(patient, config.peer, num_reads=config.transfer.num_requests)
    storage = with_retries(storage, config.retry)
    transfer = Transfer(storage, config=config.transfer, retry=config.retry, peers=found)
    return OpenedPlace(storage=storage, transfer=transfer, config=config)
