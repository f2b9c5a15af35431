"""Saves and loads in a process of its own, for the memory that they take beside the state."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import torch
from scale_worker import peak_memory

from ckptstore import open_store

MIB = 1 << 20


def peaks(directory: str, total_bytes: int, budget_bytes: int) -> dict[str, int]:
    """Peak memory above the state, of a save and of a load, for tensors as they come and for those that need copies."""
    plain = {f"t{number}": torch.ones(16 * MIB, dtype=torch.uint8) for number in range(total_bytes // (16 * MIB))}
    strided = {name: tensor.view(4096, 4096).t() for name, tensor in plain.items()}
    small = {f"s{number}": torch.ones(4096, dtype=torch.uint8) for number in range(total_bytes // (64 << 10))}
    found = {}
    warm = {"t": torch.ones(8 * MIB, dtype=torch.uint8)}
    for name, state in {"contiguous": plain, "transposed": strided, "small": small}.items():
        root = Path(directory) / name
        with open_store(root, durable=False, memory_budget_bytes=budget_bytes) as store:
            store.save(0, warm)
            store.load(warm)
            gc.collect()
            with peak_memory() as saving:
                store.save(1, state)
            gc.collect()
            with peak_memory() as loading:
                store.load(state)
        found[f"save, {name}"], found[f"load, {name}"] = saving.size_bytes, loading.size_bytes
        shutil.rmtree(root)
    return found
