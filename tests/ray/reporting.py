"""Training functions whose checkpoints Ray keeps; they run in workers of Ray."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from keeping import cache_of_ones_node, new_model, note, parallel_model, train_step

import ckptstore


def upload_into_the_run(config: dict[str, Any]) -> None:
    """Each report is of files that lie in the run's directory already, and asynchronous: Ray deletes what it is
    reported when the upload is over. Once with a function that has nothing to do, as Ray's guide shows it, once with
    ckptstore's."""
    import ray.train
    from ray.train.collective import barrier

    storage = ray.train.get_context().get_storage()
    for number, upload in enumerate([lambda checkpoint, name: checkpoint, ckptstore.ray.upload_fn()]):
        directory = Path(storage.experiment_fs_path, f"written-{number}")
        directory.mkdir(exist_ok=True)
        (directory / f"model-{ray.train.get_context().get_world_rank()}.pt").write_text("bytes")
        barrier()
        ray.train.report(
            {"number": number},
            ray.train.Checkpoint.from_directory(str(directory)),
            checkpoint_dir_name=directory.name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
        )


def report_in_every_way(config: dict[str, Any]) -> None:
    """One report of each kind: Ray keeps and ckptstore stores, ckptstore keeps, Ray alone, and metrics."""
    import ray.train

    store = ckptstore.ray.store()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "vocabulary").write_text("the same on all ranks")
        for kind in ("report", "store", "ray"):
            Path(directory, f"model-{ray.train.get_context().get_world_rank()}.pt").write_text(kind)
            if kind == "report":
                ckptstore.ray.report({"kind": kind}, directory=directory, shared=["vocabulary"])
            elif kind == "store":
                store.save_directory(0, directory, metrics={"kind": kind}, shared=["vocabulary"])
            else:
                ray.train.report({"kind": kind}, ray.train.Checkpoint.from_directory(directory))
        ckptstore.ray.report({"kind": "metrics"})
    store.close()


LOSSES: list[Any] = [0.5, 0.3, math.nan, None, 0.4]
"""The loss of each step; None where it is not reported."""


def report_scores(config: dict[str, Any]) -> None:
    """Report scalars of numpy, a NaN and no score at all. One report of rank 1 fails before, and training goes on."""
    import numpy as np
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.pt").write_bytes(bytes([rank]) * 1000)
        try:
            ckptstore.ray.report({"loss": 0.0}, directory=directory if rank == 0 else "/nowhere", step=0)
        except ckptstore.InvalidSource as error:
            note(config, "failed", f"{rank} {error.rank}")
        for step, loss in enumerate(LOSSES):
            metrics = {"step": np.int64(step)} | ({} if loss is None else {"loss": np.float32(loss)})
            stored = ckptstore.ray.report(metrics, directory=directory if step % 2 or rank == 0 else None, step=step)
            assert stored is not None
            assert stored.verify().ok
            ckptstore.ray.report({"alone": step})


def train(config: dict[str, Any]) -> None:
    """Train with DDP or FSDP2, and report after every step, in one of the ways that there are."""
    import ray.train
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = parallel_model(config)
    first = _restore(config, model, optimizer, ray.train.get_checkpoint())
    note(config, "resumed", f"{rank} {world_size} {first}")
    upload = ckptstore.ray.upload_fn()
    for step in range(first, config["steps"]):
        mean = train_step(config, model, optimizer, step)
        if step == config.get("kill_at") and rank == world_size - 1 and not Path(config["notes"], "killed").exists():
            Path(config["notes"], "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        _report(config["how"], {"loss": mean, "step": step}, model, optimizer, step, upload)


def _report(how: str, metrics: dict[str, Any], model: Any, optimizer: Any, step: int, upload: Any) -> None:
    import ray.train
    import torch

    if how == "state":
        state = {"model": model, "optimizer": optimizer, "epoch": step}
        ckptstore.ray.report(metrics, state=state, step=step)
        return
    directory = tempfile.mkdtemp()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": step}, f"{directory}/part.pt"
    )
    if how == "directory":
        ckptstore.ray.report(metrics, directory=directory, step=step)
        shutil.rmtree(directory)
        return
    mode = ray.train.CheckpointUploadMode[how.upper()]
    ray.train.report(
        ckptstore.ray.safe_metrics(metrics),
        ray.train.Checkpoint.from_directory(directory),
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=True,
        checkpoint_upload_fn=upload,
    )


def _restore(config: dict[str, Any], model: Any, optimizer: Any, found: Any) -> int:
    import ray.train
    import torch

    if found is None:
        return 0
    checkpoint = ckptstore.ray.wrap(found)
    if config["how"] == "state":
        state = {"model": model, "optimizer": optimizer, "epoch": -1}
        checkpoint.load(state)
        return int(state["epoch"]) + 1
    cache_of_ones_node(config)
    rank = ray.train.get_context().get_world_rank()
    with checkpoint.as_directory() as directory:
        saved = torch.load(directory / f"part-rank={rank:05d}.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epoch"]) + 1


def warm_start(config: dict[str, Any]) -> None:
    """Rank 0 alone reads what another run has kept, in each contract; DDP brings it to the others."""
    import ray.train
    import torch
    from torch.nn.parallel import DistributedDataParallel

    old = new_model()
    torch.nn.init.constant_(old[0].bias, 7.0)
    with ckptstore.ray.store() as store:
        store.save(0, {"model": old})
        pointer = ray.train.get_checkpoint()
    ckptstore.ray.report({}, state={"model": old}, step=1)
    kept = ray.train.get_checkpoint()
    rank = ray.train.get_context().get_world_rank()
    for open_it, found in ((ckptstore.ray.wrap, kept), (ckptstore.ray.wrap, pointer), (ckptstore.ray.resolve, pointer)):
        model = new_model()
        if rank == 0:
            open_it(found, group="solo").load({"model": model})
        note(config, "warm", f"{rank} {DistributedDataParallel(model).module[0].bias[0].item()}")
