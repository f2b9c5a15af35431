"""Hugging Face Transformers: a callback that stores what a Trainer writes to its disk, and hands it back.

transformers is loaded with the callback, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.transformers.callback import CheckpointStoreCallback

__all__ = ["CheckpointStoreCallback"]

__getattr__ = exports(__name__, {"CheckpointStoreCallback": "callback"}, extra="transformers")
