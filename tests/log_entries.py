"""Entries of checkpoints, as the log has them."""

from __future__ import annotations

from typing import Any

from ckptstore.format.entry import CheckpointEntry


def entry(step: int = 1, epoch: int = 1, **fields: Any) -> CheckpointEntry:
    """That of one attempt; `fields` replace any of its own."""
    values: dict[str, Any] = {
        "step": step,
        "epoch": epoch,
        "attempt": f"step-{step:010d}-e{epoch:04d}-0123abcd",
        "manifest_sha256": "ab" * 32,
        "kind": "directory",
        "world_size": 2,
        "size_bytes": 10,
        "num_files": 1,
        "created_at": 1.5,
        **fields,
    }
    return CheckpointEntry(**values)
