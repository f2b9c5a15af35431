"""torch_checkpointing on any storage: its directories are checkpoints of a store, its rename is their commit.

Pass a `StoreStorageConfig` as torch_checkpointing's `StorageConfig`. Its writers fill a temporary directory; the rename
of that directory, by one rank, becomes one record of the store's log. So a checkpoint exists whole or not at all, on
object stores too, and `ckptstore ls`, `verify`, `cp`, `report` and retention know it.

torch_checkpointing is loaded with the configuration, on first use.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torch-checkpointing")
