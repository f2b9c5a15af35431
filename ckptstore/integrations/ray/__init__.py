"""Checkpoints of Ray Train runs; `ckptstore.ray` has the public names.

It can be imported without Ray: a training function that runs under torchrun, or in a plain process, calls the same
names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.ray.context import Worker, current_worker
    from ckptstore.integrations.ray.kept_by_ray.reporting import report
    from ckptstore.integrations.ray.kept_by_ray.upload_fn import safe_metrics, upload_fn
    from ckptstore.integrations.ray.preemption import PreemptionSave
    from ckptstore.integrations.ray.ray_store import RayStore, store
    from ckptstore.integrations.ray.repairing import Repair, repair
    from ckptstore.integrations.ray.resuming import resolve, resume, wrap
    from ckptstore.integrations.ray.retried_s3 import s3_filesystem

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

__getattr__ = exports(
    __name__,
    {
        "PreemptionSave": "preemption",
        "RayStore": "ray_store",
        "Repair": "repairing",
        "Worker": "context",
        "current_worker": "context",
        "repair": "repairing",
        "report": "kept_by_ray.reporting",
        "resolve": "resuming",
        "resume": "resuming",
        "s3_filesystem": "retried_s3",
        "safe_metrics": "kept_by_ray.upload_fn",
        "store": "ray_store",
        "upload_fn": "kept_by_ray.upload_fn",
        "wrap": "resuming",
    },
)


def __dir__() -> list[str]:
    return list(__all__)
