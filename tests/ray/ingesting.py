"""Training functions that are fed by Ray Data; they run in workers of Ray."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

from keeping import note

import ckptstore

BATCH_SIZE = 8
SAVE_EVERY = 2


def train(config: dict[str, Any]) -> None:
    """Note the rows of every batch. The last worker dies once, in the middle of the second epoch and between saves."""
    import ray.train

    store = ckptstore.ray.store()
    rank, died = ray.train.get_context().get_world_rank(), Path(config["notes"], "died")
    shard = ray.train.get_dataset_shard("train")
    state = {"epoch": 0, "batches_done": 0}
    found = ckptstore.ray.resume(state, store)
    step = found.step if found else 0
    note(config, "resumed", f"{rank} {state['epoch']} {state['batches_done']}")
    for epoch in range(state["epoch"], config["epochs"]):
        batches = shard.iter_torch_batches(
            batch_size=BATCH_SIZE, device="cpu", local_shuffle_buffer_size=2 * BATCH_SIZE, local_shuffle_seed=epoch
        )
        for batch in islice(batches, state["batches_done"], None):
            state["epoch"], state["batches_done"] = epoch, state["batches_done"] + 1
            note(
                config, "batches", f"{rank} {epoch} {state['batches_done']} {' '.join(map(str, batch['row'].tolist()))}"
            )
            step += 1
            if step % SAVE_EVERY == 0:
                store.save(step, state)
            elif epoch == 1 and rank == 1 and state["batches_done"] > 2 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        state["batches_done"] = 0
    store.close()
