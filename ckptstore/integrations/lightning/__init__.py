"""PyTorch Lightning: a callback that saves and resumes a Trainer, every rank its own part, through a store.

Lightning is loaded with the callback, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.lightning.callback import CheckpointStoreCallback

__all__ = ["CheckpointStoreCallback"]

__getattr__ = exports(__name__, {"CheckpointStoreCallback": "callback"}, extra="lightning")
