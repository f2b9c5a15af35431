"""Testing tools of ckptstore itself, for tests of your own back-ends and jobs. Only `StorageContract` needs pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports
from ckptstore.testing.faults import (
    Call,
    CountCalls,
    Delay,
    FailAt,
    Hook,
    KillAt,
    TearAt,
    combine,
    hook_from_environment,
    wrap,
)
from ckptstore.testing.ranks import RanksFailed, run_ranks

if TYPE_CHECKING:
    from ckptstore.testing.storage_contract import StorageContract
    from ckptstore.testing.stores import with_faults

__all__ = [
    "Call",
    "CountCalls",
    "Delay",
    "FailAt",
    "Hook",
    "KillAt",
    "RanksFailed",
    "StorageContract",
    "TearAt",
    "combine",
    "hook_from_environment",
    "run_ranks",
    "with_faults",
    "wrap",
]

__getattr__ = exports(__name__, {"StorageContract": "storage_contract", "with_faults": "stores"})
"""They need pytest, and everything that a store needs."""
