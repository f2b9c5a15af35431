"""What ckptstore tests itself with, for the tests of back-ends and jobs of your own. pytest is needed for
`StorageContract` alone."""

from __future__ import annotations

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
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "StorageContract":
        from ckptstore.testing.storage_contract import StorageContract

        return StorageContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
