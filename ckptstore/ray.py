"""Checkpoints of Ray Train runs: the public names. What they do is in `ckptstore.integrations.ray`.

It can be imported where Ray is not installed: a training function that runs under torchrun, or in a plain process,
calls the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptstore.integrations import ray as _ray

if TYPE_CHECKING:
    from ckptstore.integrations.ray import (
        PreemptionSave,
        RayStore,
        Repair,
        Worker,
        current_worker,
        repair,
        report,
        resolve,
        resume,
        s3_filesystem,
        safe_metrics,
        store,
        upload_fn,
        wrap,
    )

__all__ = [
    "PreemptionSave",
    "RayStore",
    "Repair",
    "Worker",
    "current_worker",
    "repair",
    "report",
    "resolve",
    "resume",
    "s3_filesystem",
    "safe_metrics",
    "store",
    "upload_fn",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_ray, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
