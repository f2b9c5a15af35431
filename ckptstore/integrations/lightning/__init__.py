"""PyTorch Lightning: a callback that saves and resumes a Trainer, every rank its own part, through a store.

Lightning is loaded with the callback, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.integrations.lightning.callback import CheckpointStoreCallback

__all__ = ["CheckpointStoreCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.callback"), name)
