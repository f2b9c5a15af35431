"""ckptstore: distributed checkpoint storage for PyTorch.

Names are loaded on first use, so that `import ckptstore` costs next to nothing and needs no third party.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.catalogue import Entry
    from ckptstore.checkpoint import Checkpoint
    from ckptstore.errors import (
        AccessDenied,
        CacheError,
        CheckpointDamaged,
        CheckpointGone,
        CkptstoreError,
        FileMissing,
        GroupMissing,
        InvalidInput,
        InvalidMetadata,
        InvalidMetric,
        InvalidName,
        InvalidSource,
        InvalidState,
        InvalidStep,
        NotDurable,
        NoUsableCheckpoint,
        RankFailed,
        RankTimeout,
        SaveBusy,
        SourceChanged,
        StateMismatch,
        StepExists,
        StorageArchived,
        StorageError,
        StorageFull,
        StorageThrottled,
        StorageUnavailable,
        StoreFenced,
        StoreForked,
        StoreMissing,
        StoreNotShared,
        UnsupportedVersion,
    )
    from ckptstore.fast.tier import FastTier
    from ckptstore.format.manifest import Receipt
    from ckptstore.group import StorageGroup
    from ckptstore.loading.load_report import LoadReport
    from ckptstore.opening import open_store
    from ckptstore.retention import KeepAll, KeepBest, KeepEvery, KeepLatest, KeepSince
    from ckptstore.saving.background import PendingSave
    from ckptstore.saving.health import StoreHealth
    from ckptstore.store import CheckpointStore
    from ckptstore.upkeep.prune import Trashed

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "CacheError",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointGone",
    "CheckpointStore",
    "CkptstoreError",
    "Entry",
    "FastTier",
    "FileMissing",
    "GroupMissing",
    "InvalidInput",
    "InvalidMetadata",
    "InvalidMetric",
    "InvalidName",
    "InvalidSource",
    "InvalidState",
    "InvalidStep",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepSince",
    "LoadReport",
    "NoUsableCheckpoint",
    "NotDurable",
    "PendingSave",
    "RankFailed",
    "RankTimeout",
    "Receipt",
    "SaveBusy",
    "SourceChanged",
    "StateMismatch",
    "StepExists",
    "StorageArchived",
    "StorageError",
    "StorageFull",
    "StorageGroup",
    "StorageThrottled",
    "StorageUnavailable",
    "StoreFenced",
    "StoreForked",
    "StoreHealth",
    "StoreMissing",
    "StoreNotShared",
    "Trashed",
    "UnsupportedVersion",
    "__version__",
    "open_store",
]

_HOMES = {
    "Checkpoint": "ckptstore.checkpoint",
    "CheckpointStore": "ckptstore.store",
    "Entry": "ckptstore.catalogue",
    "FastTier": "ckptstore.fast.tier",
    "KeepAll": "ckptstore.retention",
    "KeepBest": "ckptstore.retention",
    "KeepEvery": "ckptstore.retention",
    "KeepLatest": "ckptstore.retention",
    "KeepSince": "ckptstore.retention",
    "LoadReport": "ckptstore.loading.load_report",
    "PendingSave": "ckptstore.saving.background",
    "Receipt": "ckptstore.format.manifest",
    "StorageGroup": "ckptstore.group",
    "StoreHealth": "ckptstore.saving.health",
    "Trashed": "ckptstore.upkeep.prune",
    "open_store": "ckptstore.opening",
}
"""Where a name is defined; every other public name is an error."""

_SUBMODULES = {"dcp": "ckptstore.dcp", "ray": "ckptstore.ray", "state": "ckptstore.state"}
"""Loaded on first use, and not part of `from ckptstore import *`: they need torch, or Ray."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(_SUBMODULES[name])
    if name not in __all__:
        raise AttributeError(f"module 'ckptstore' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "ckptstore.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES]
