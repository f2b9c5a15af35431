"""Training functions that report metrics; they run in workers of Ray, without torch."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from keeping import note

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


def miss_a_metric(config: dict[str, Any]) -> None:
    """In both contracts a checkpoint without the metric that it is ranked by; then one rank reports alone."""
    rank = ckptstore.ray.current_worker().rank  # type: ignore[union-attr]
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: note(config, "warnings", f"{rank} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("ckptstore.ray").addHandler(handler)
    store = ckptstore.ray.store(retention=ckptstore.KeepBest(1, metric="loss", mode="min"))
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.bin").write_bytes(bytes([rank]))
        for step, metrics in enumerate([{"loss": 0.5}, {"accuracy": 1}, {"loss": 0.7}]):
            store.save_directory(step, directory, metrics=metrics)
        note(config, "kept", " ".join(str(checkpoint.step) for checkpoint in store))
        for step, metrics in enumerate([{"loss": 0.4}, {"accuracy": 1}, {"loss": 0.7}], start=3):
            ckptstore.ray.report(metrics, directory=directory, step=step)
    store.close()
    if rank == 0:
        os.environ["CKPTSTORE_RANK_TIMEOUT_SECONDS"] = "1"
        try:
            ckptstore.ray.report({"alone": True}, storage_options={})  # other options, so the timeout is read anew
        except ckptstore.RankTimeout as error:
            note(config, "timeout", str(error))
