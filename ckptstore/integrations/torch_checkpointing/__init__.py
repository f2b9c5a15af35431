"""torch_checkpointing on any storage: its directories are checkpoints of a store, its rename is their commit.

Pass a `StoreStorageConfig` as torch_checkpointing's `StorageConfig`. Its writers fill a temporary directory; the rename
of that directory, by one rank, becomes one record of the store's log. So a checkpoint exists whole or not at all, on
object stores too, and `ckptstore ls`, `verify`, `cp`, `report` and retention know it.

torch_checkpointing is loaded with the configuration, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.torch_checkpointing.storage_config import StoreStorageConfig

__all__ = ["StoreStorageConfig"]

__getattr__ = exports(__name__, {"StoreStorageConfig": "storage_config"}, extra="torch-checkpointing")
