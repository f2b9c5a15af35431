"""torch_checkpointing on any storage: its directories are checkpoints of a store, its rename is their commit.

`StoreStorageConfig` goes where torch_checkpointing takes a `StorageConfig`. Its writers fill a temporary directory; the
rename of that directory, by one rank, becomes one record of the store's log. So a checkpoint is there whole or not at
all, on object stores too, and `ckptstore ls`, `verify`, `cp`, `report` and retention know it.
"""

from __future__ import annotations

from ckptstore.integrations.torch_checkpointing.storage_config import StoreStorageConfig

__all__ = ["StoreStorageConfig"]
