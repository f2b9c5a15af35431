"""Hugging Face Transformers: a callback that stores a Trainer's checkpoints from its disk, and restores them.

transformers is loaded with the callback, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.transformers.callback import CheckpointStoreCallback

__all__ = ["CheckpointStoreCallback"]

__getattr__ = exports(__name__, {"CheckpointStoreCallback": "callback"}, extra="transformers")
