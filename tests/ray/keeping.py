"""Training functions in which ckptstore keeps the files; they run in workers of Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ckptstore


def record(config: dict[str, Any], name: str, text: str) -> None:
    """Leave a note for the test."""
    directory = Path(config["notes"])
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("a") as file:
        file.write(f"{text}\n")


def save_directories(config: dict[str, Any]) -> None:
    """Every rank saves a file for some steps, after those that are there; then all read the newest one."""
    worker = ckptstore.ray.current_worker()
    assert worker is not None
    os.environ["CKPTSTORE_CACHE_DIR"] = f"{config['notes']}/cache-{worker.node_id}"
    store = ckptstore.ray.store(retention=ckptstore.KeepLatest(2), grace_seconds=0)
    checkpoint = ckptstore.ray.resume(store=store)
    first = 0 if checkpoint is None else checkpoint.step + 1
    record(config, "resumed", f"{worker.rank} {first}")
    for step in range(first, first + config["steps"]):
        path = Path(config["notes"], f"source-{worker.rank}")
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.bin").write_bytes(bytes([step, worker.rank]) * 100_000)
        checkpoint = store.save_directory(step, path, metrics={"loss": abs(step - 1.5), "phase": "train"})
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        sizes = {file.name: file.stat().st_size for file in directory.glob("model*")}
    record(config, "read", f"{worker.rank} {len(sizes)} {sum(sizes.values())}")
    store.close()
