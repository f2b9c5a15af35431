"""What the processes of the test of missing files run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from state_worker import job

from ckptstore import CheckpointStore


def load_after_a_loss(root: str) -> list[int]:
    """Load with one rank reading for all: a file is lost that all want, then one that a single rank wants."""
    with job(root) as store:
        for step in (1, 2, 3):
            store.save(step, {"w": torch.full((600, 300), float(step)), f"own{dist.get_rank()}": torch.tensor(step)})
        found = []
        for step in (3, 2):
            lose(store, step, "*" if step == 3 else f"*rank={dist.get_world_size() - 1:05d}*")
            state = {"w": torch.zeros(600, 300)} if step == 3 else {f"own{dist.get_rank()}": torch.tensor(0)}
            checkpoint = store.load(state, read_once="job")
            found.append(checkpoint.step)
        return found


def lose(store: CheckpointStore, step: int, pattern: str) -> None:
    """On rank 0: files with the tensors of a step."""
    path = Path(store[step].uri)
    if dist.get_rank() == 0:
        for file in path.glob(f"{pattern}.distcp"):
            file.unlink()
    dist.barrier()
