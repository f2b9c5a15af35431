"""Training functions of the Ray benchmark. Steps take a fixed time; what a save blocks is told by rank 0."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.shapes import State, difference, empty_like, rank_state


def new_state(config: dict[str, Any], rank: int) -> State:
    """This worker's share of the state: what differs from rank to rank, as under FSDP."""
    state = rank_state("tensors", config["size_bytes"] // config["num_workers"], rank=rank)
    return {f"rank{rank}.{name}": tensor for name, tensor in state.items()}


def train(config: dict[str, Any]) -> None:
    """Save after each of some steps in one way; rank 0 notes what each save blocked and how long all of it took."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    state = new_state(config, rank)
    save, finish = _saver(config, state)
    save(0)  # the first one starts threads and connections
    samples = []
    started = time.perf_counter()
    for step in range(1, config["num_steps"] + 1):
        time.sleep(config["step_seconds"])
        with Meter() as meter:
            save(step)
        samples.append(asdict(meter.sample()))
    finish()
    if rank == 0:
        told = {"samples": samples, "seconds": time.perf_counter() - started}
        Path(config["told"]).write_text(json.dumps(told))


def _saver(config: dict[str, Any], state: dict[str, Any]) -> Any:
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode

    rank, way = ray.train.get_context().get_world_rank(), config["way"]
    if way.startswith("ckptstore"):
        durable = "durable" in way
        store = ckptstore.ray.store(retention=ckptstore.KeepLatest(2), grace_seconds=0, durable=durable)
        kind = store.save if way == "ckptstore, save" else store.save_async
        return lambda step: kind(step, state, metrics={"step": step}), store.close

    mode = CheckpointUploadMode.ASYNC if way.endswith("ASYNC") else CheckpointUploadMode.SYNC

    def report(step: int) -> None:
        directory = tempfile.mkdtemp(dir=config["scratch"])
        torch.save(state, f"{directory}/model-rank={rank}.pt")
        ray.train.report(
            {"step": step},
            Checkpoint.from_directory(directory),
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=True,
        )

    def finish() -> None:
        """Every upload is over when Ray has registered what was reported."""
        ray.train.get_all_reported_checkpoints()

    return report, finish


def restore(config: dict[str, Any]) -> None:
    """Load this worker's share of the newest checkpoint; each rank notes how long it took."""
    import ray.train
    import torch.distributed.fsdp  # a training that shards its state has taken this second before
    from ray.train.collective import barrier

    context = ray.train.get_context()
    rank = context.get_world_rank()
    own = tempfile.mkdtemp(dir=config["scratch"])  # the nodes here share a disk, others do not
    os.environ["CKPTSTORE_CACHE_DIR"], tempfile.tempdir = f"{own}/cache", own
    expected = new_state(config, rank)
    state = empty_like(expected)
    barrier()
    with Meter() as meter:
        if config["way"] == "ckptstore":
            assert ckptstore.ray.resume(state, ckptstore.ray.store()) is not None
        else:
            checkpoint = ray.train.get_checkpoint()
            with checkpoint.as_directory() as directory:
                loaded = torch.load(f"{directory}/model-rank={rank}.pt", mmap=True)
                for key, value in loaded.items():
                    state[key].copy_(value)
    assert difference(state, expected) is None
    Path(config["told"], str(rank)).write_text(json.dumps(asdict(meter.sample())))
    barrier()
    shutil.rmtree(own)
