"""Training functions in which ckptstore keeps the files; they run in workers of Ray."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.events import BytesMoved, Event, FileStored, listening

ROWS, FEATURES, WIDTH = 16, 8, 64


def note(config: dict[str, Any], name: str, text: str) -> None:
    """Leave a line for the test."""
    directory = Path(config["notes"])
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("a") as file:
        file.write(f"{text}\n")


def notes(directory: Path, name: str) -> list[list[str]]:
    """The lines that workers have left, split into words."""
    path = directory / name
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def cache_of_ones_node(config: dict[str, Any]) -> None:
    """The nodes of the test cluster share a disk, so each gets a cache directory of its own."""
    worker: Any = ckptstore.ray.current_worker()
    os.environ["CKPTSTORE_CACHE_DIR"] = f"{config['notes']}/cache-{worker.node_id}"


def save_directories(config: dict[str, Any]) -> None:
    """Every rank saves a file for some steps, after those that are there; then all read the newest one."""
    cache_of_ones_node(config)
    store = ckptstore.ray.store(retention=ckptstore.KeepLatest(2), grace_seconds=0)
    rank = store.worker.rank if store.worker else 0
    checkpoint = ckptstore.ray.resume(store=store, prefer=config.get("prefer", "newest"))
    first = 0 if checkpoint is None else checkpoint.step + 1
    note(config, "resumed", f"{rank} {first}")
    if store.worker:
        place = store.worker
        assert place.broadcast(f"from rank {rank}") == "from rank 0"
        note(config, "places", f"{rank}/{place.world_size} {place.node_id} {place.path_of('there')}")
    for step in range(first, first + config["steps"]):
        path = Path(config["notes"], f"source-{rank}")
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.bin").write_bytes(bytes([step, rank]) * 100_000)
        checkpoint = store.save_directory(step, path, metrics={"loss": abs(step - 1.5), "phase": "train"})
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        sizes = [file.stat().st_size for file in directory.glob("model*")]
    note(config, "read", f"{rank} {len(sizes)} {sum(sizes)}")
    store.close()


def batch_of(step: int) -> Any:
    """The whole batch of a step: the same at any number of workers."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs.sum(dim=1, keepdim=True))


def new_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def losses_alone(steps: int) -> list[float]:
    """The loss curve of one process without any checkpoint: what every run must repeat."""
    import torch

    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(step)
        loss = ((model(inputs) - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parallel_model(config: dict[str, Any]) -> tuple[Any, Any]:
    """The model over all workers, by DDP or FSDP2, and its optimizer."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = new_model()
    if config["parallel"] == "fsdp":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(config: dict[str, Any], model: Any, optimizer: Any, step: int) -> Any:
    """One step over this worker's rows; the mean loss of all, which rank 0 notes."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch_of(step)
    part = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    loss = ((model(inputs[part]) - targets[part]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= world_size
    if rank == 0:
        note(config, "losses", f"{step} {mean.item()!r}")
    return mean


def fast_tier(config: dict[str, Any]) -> ckptstore.FastTier | None:
    """The nodes of the test cluster share a disk, so each gets a directory of its own."""
    return ckptstore.FastTier(disk_of_ones_node(config), **config["fast"]) if "fast" in config else None


def disk_of_ones_node(config: dict[str, Any]) -> Path:
    worker: Any = ckptstore.ray.current_worker()
    return Path(config["notes"], f"disk-{worker.node_id}")


def train(config: dict[str, Any]) -> None:
    """Train with DDP or FSDP2, save every other step, and go on from what is there."""
    import torch.distributed as dist

    store = ckptstore.ray.store(retention=ckptstore.KeepLatest(3), fast=fast_tier(config), **config.get("store", {}))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = parallel_model(config)
    state = {"model": model, "optimizer": optimizer}
    checkpoint = ckptstore.ray.resume(state, store, prefer=config.get("prefer", "newest"))
    first = checkpoint.step + 1 if checkpoint else 0
    note(config, "resumed", f"{rank} {world_size} {first}")
    listeners = ExitStack()
    if "strike" in config:
        strike_during_save(config, rank, listeners)
    end = config["steps"]
    for step in range(first, end):
        if step >= end:
            break
        mean = train_step(config, model, optimizer, step)
        time.sleep(config.get("pause_seconds", 0))
        metrics = {"loss": mean, "step": step}
        if step % 2 and config["how"] == "async":
            store.save_async(step, state, metrics=metrics, **config.get("options", {}))
        elif step % 2 and config["how"] == "sync":
            store.save(step, state, metrics=metrics)
        if "needed_seconds" in config:
            made = store.save_on_preemption(step, state, metrics=metrics, needed_seconds=config["needed_seconds"])
            if made is not None:
                end = min(end, step + 3)  # what is to come is the same again
            if made is not None and rank == 0:
                saved = -1 if made.checkpoint is None else made.checkpoint.step
                note(config, "preempted", f"{step} {saved} {len(made.node_ids)} {len(made.ranks)} {made.reason}")
    if config.get("hurry"):
        step = config["steps"]
        store.save_async(step, state, metrics={"step": step})
        assert store.save_async(step + 1, state, metrics={"step": step + 1}, on_busy="skip").skipped
        store.save_async(step + 2, state, metrics={"step": step + 2})
    store.close()
    assert store._late is None or not store._late.drains, "no rank holds what Ray has heard of"


def strike_during_save(config: dict[str, Any], rank: int, listeners: ExitStack) -> None:
    """When this worker has stored a part of a step, once in the life of the run: let the kernel end it, or let it hang
    until the test does something worse. With "lose" the disk of its node is gone too."""
    victim, step, how = config["strike"]
    marker = Path(config["notes"], "struck")

    def strike(event: Event) -> None:
        if isinstance(event, BytesMoved | FileStored) and f"step-{step:010d}" in event.key and not marker.exists():
            marker.touch()
            if how == "lose":
                disk = disk_of_ones_node(config)
                disk.rename(disk.with_name("lost"))  # at once: other threads go on to write into it
            if how in ("kill", "lose"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

    if rank == victim:
        listeners.enter_context(listening(strike))
