"""The targets of checkpoints that users save with `dcp.save` themselves: a directory on its own, or a store.

The coordinator alone begins and finishes; the other ranks write their files under the prefix that it chose.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ckptstore.config import StoreConfig, TransferConfig
from ckptstore.errors import InvalidInput
from ckptstore.format.layout import DCP_METADATA_NAME, MANIFEST_NAME
from ckptstore.format.manifest import Manifest, Receipt, sorted_receipts
from ckptstore.format.timings import Timings
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer
from ckptstore.transfer.opened import OpenedPlace, open_place

_OWN_FILE = re.compile(r"state-rank=\d{5,}-\d{2,}\.distcp")


class DcpTarget(Protocol):
    """A place for checkpoints. Pickled for `dcp.async_save` in a separate process."""

    @property
    def uri(self) -> str:
        """The location, without secrets."""

    def open(self) -> tuple[Storage, Transfer]:
        """Return the storage and its transfer; the same pair until `close`."""

    def begin(self, step: int | None) -> str:
        """Coordinator: return the prefix of the keys of a new checkpoint, which has no files yet. May raise."""

    def finish(
        self, prefix: str, receipts: Sequence[Receipt], *, world_size: int, timings: Callable[[], Timings] | None = None
    ) -> None:
        """Coordinator: make the checkpoint visible, once everything is stored. The manifest has the timings of the
        save."""

    def close(self) -> None:
        """Close the storage and the transfer that `open` made."""


class DirectoryTarget:
    """A directory that becomes one checkpoint: no log, no retention, readable by `Checkpoint.from_uri`."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        config: TransferConfig | None = None,
    ) -> None:
        """Keep the arguments; the directory is not opened yet."""
        self._given = os.fspath(uri)
        self._storage_options = storage_options
        self._config = config or TransferConfig.from_env()
        self._opened: OpenedPlace | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def uri(self) -> str:
        """The directory, without secrets."""
        return self.open()[0].uri

    def open(self) -> tuple[Storage, Transfer]:
        """Return the storage whose root is the directory, and its transfer."""
        if self._opened is None:
            config = StoreConfig.from_env(transfer=self._config)
            self._opened = open_place(self._given, config=config, storage_options=self._storage_options)
        return self._opened.storage, self._opened.transfer

    def begin(self, step: int | None) -> str:
        """Remove the files that a failed save left. Raises InvalidInput when the directory holds a checkpoint: nothing
        is ever overwritten."""
        storage, _ = self.open()
        found = {file.key for file in storage.list("")}
        held = found & {MANIFEST_NAME, DCP_METADATA_NAME}
        if held:
            raise InvalidInput(f"{storage.uri} holds a checkpoint already: {min(held)}", hint="Give a new directory")
        storage.delete([key for key in found if key == INDEX_NAME or _OWN_FILE.fullmatch(key)])
        return ""

    def finish(
        self, prefix: str, receipts: Sequence[Receipt], *, world_size: int, timings: Callable[[], Timings] | None = None
    ) -> None:
        """Write the manifest, last."""
        storage, _ = self.open()
        manifest = Manifest(
            store_id="",
            step=0,
            epoch=0,
            attempt=storage.uri.rstrip("/").rpartition("/")[2],
            kind="state",
            world_size=world_size,
            created_at=time.time(),
            files=tuple(sorted_receipts(receipts)),
            extra={} if timings is None else {"timings": timings().to_json()},
        )
        storage.write(prefix + MANIFEST_NAME, [memoryview(manifest.encode())])
        if self._config.durable:
            storage.persist([prefix + MANIFEST_NAME])

    def close(self) -> None:
        """End the threads and connections."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
