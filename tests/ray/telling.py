"""Training functions that report metrics; they run in workers of Ray, without torch."""

from __future__ import annotations

from typing import Any

import ckptstore

NUM_REPORTS = 20


def report_with_ray_alone(config: dict[str, Any]) -> None:
    """What every user of Ray writes."""
    import ray.train

    for number in range(NUM_REPORTS):
        ray.train.report({"number": number})


def report_metrics(config: dict[str, Any]) -> None:
    """The same through ckptstore."""
    for number in range(NUM_REPORTS):
        ckptstore.ray.report({"number": number})
