"""Hugging Face Transformers: a callback that stores what a Trainer writes to its disk, and hands it back.

transformers is loaded with the callback, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.integrations.transformers.callback import CheckpointStoreCallback

__all__ = ["CheckpointStoreCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.callback"), name)
