"""What ckptstore tests itself with, for the tests of back-ends and jobs of your own. pytest is needed for
`StorageContract` alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


_LAZY = {"StorageContract": "storage_contract", "with_faults": "stores"}
"""Not loaded before they are used: pytest, and everything that a store needs."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
