"""The ways in which the guides to Ray Train save and load: each as they have it, where Ray keeps, and where ckptstore
keeps. They run in workers of Ray, and the page counts the lines that differ."""

from __future__ import annotations

import difflib
import inspect
import os
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint

import ckptstore

INPUTS = torch.linspace(-1, 1, 16).unsqueeze(1)


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train_epoch(model: Any, optimizer: Any) -> dict[str, float]:
    loss = torch.nn.functional.mse_loss(model(INPUTS), 3 * INPUTS - 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}


def rank0_before(config: dict[str, Any]) -> None:
    model, optimizer = build()
    for _ in range(2):
        metrics = train_epoch(model, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)


def rank0_store(config: dict[str, Any]) -> None:
    model, optimizer = build()
    store = ckptstore.ray.store()
    for epoch in range(2):
        metrics = train_epoch(model, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = directory
            store.save_directory(epoch, checkpoint, metrics=metrics)
    store.close()


def sparse_before(config: dict[str, Any]) -> None:
    model, optimizer = build()
    for epoch in range(10, 16):
        metrics = train_epoch(model, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0 and epoch % 3 == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)


def sparse_store(config: dict[str, Any]) -> None:
    model, optimizer = build()
    store = ckptstore.ray.store()
    for epoch in range(10, 16):
        metrics = train_epoch(model, optimizer)
        if epoch % 3 == 0:
            store.save(epoch, {"model": model}, metrics=metrics)
        else:
            ckptstore.ray.report(metrics)
    store.close()


def shards_before(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rank = ray.train.get_context().get_world_rank()
        torch.save(torch.full((3,), rank), os.path.join(directory, f"model-rank={rank}.pt"))
        checkpoint = Checkpoint.from_directory(directory)
        ray.train.report({"loss": 1.0}, checkpoint=checkpoint)


def shards_store(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rank = ray.train.get_context().get_world_rank()
        torch.save(torch.full((3,), rank), os.path.join(directory, f"model-rank={rank}.pt"))
        with ckptstore.ray.store() as store:
            store.save_directory(20, directory, metrics={"loss": 1.0})


def resumed_before(config: dict[str, Any]) -> None:
    model, optimizer = build()
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            model.module.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
            optimizer.load_state_dict(torch.load(os.path.join(directory, "optimizer.pt")))
            start = torch.load(os.path.join(directory, "extra_state.pt"))["epoch"] + 1
    for epoch in range(start, 4):
        metrics = train_epoch(model, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                torch.save(optimizer.state_dict(), os.path.join(directory, "optimizer.pt"))
                torch.save({"epoch": epoch}, os.path.join(directory, "extra_state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report({**metrics, "start": start}, checkpoint=checkpoint)
        if epoch == 1:
            raise RuntimeError("Intentional error to showcase restoration!")


def resumed_report(config: dict[str, Any]) -> None:
    model, optimizer = build()
    start = 0
    state = {"model": model, "optimizer": optimizer, "epoch": -1}
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        ckptstore.ray.wrap(checkpoint).load(state)
        start = state["epoch"] + 1
    for epoch in range(start, 4):
        metrics = train_epoch(model, optimizer)
        state["epoch"] = epoch
        ckptstore.ray.report({**metrics, "start": start}, state=state)
        if epoch == 1:
            raise RuntimeError("Intentional error to showcase restoration!")


def resumed_store(config: dict[str, Any]) -> None:
    model, optimizer = build()
    state = {"model": model, "optimizer": optimizer, "epoch": -1}
    store = ckptstore.ray.store()
    ckptstore.ray.resume(state, store)
    start = state["epoch"] + 1
    for epoch in range(start, 4):
        metrics = train_epoch(model, optimizer)
        state["epoch"] = epoch
        store.save(epoch, state, metrics={**metrics, "start": start})
        if epoch == 1:
            raise RuntimeError("Intentional error to showcase restoration!")
    store.close()


def after_before(result: Any) -> Any:
    with result.checkpoint.as_directory() as directory:
        return torch.load(os.path.join(directory, "model-rank=1.pt"))


def served_before(checkpoint: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    with checkpoint.as_directory() as directory:
        model.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
    return model


def served_report(checkpoint: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    ckptstore.ray.wrap(checkpoint).load({"model": model}, include="model.*")
    return model


DERIVED: dict[str, str] = {}
"""The sources of the functions that are others with a few words changed."""


def source_of(name: str) -> str:
    return DERIVED.get(name) or inspect.getsource(globals()[name])


def derive(name: str, of: str, old: str, new: str) -> None:
    DERIVED[name] = source_of(of).replace(old, new).replace(f"def {of}(", f"def {name}(")
    exec(DERIVED[name], globals())


for pattern in ("rank0", "sparse", "shards"):
    derive(f"{pattern}_report", f"{pattern}_before", "ray.train.report(", "ckptstore.ray.report(")
derive("after_report", "after_before", "result.checkpoint.as", "ckptstore.ray.wrap(result.checkpoint).as")
derive("after_store", "after_report", "ray.wrap", "ray.resolve")
derive("served_store", "served_report", "ray.wrap", "ray.resolve")


def one_after_another(config: dict[str, Any]) -> None:
    """The patterns that start from nothing, in one run."""
    for pattern in ("rank0", "sparse", "shards"):
        globals()[f"{pattern}_{config['how']}"](config)


ROWS = {
    "rank0": "Rank 0 saves the model, all ranks report",
    "sparse": "A checkpoint every third epoch, metrics in each",
    "shards": "Each rank saves its shard",
    "resumed": "Model, optimizer and epoch, found again after a failure or by a new trainer",
    "after": "The files of `result.checkpoint`",
    "served": "A model from `result.checkpoint`, in an actor for instance",
}


def changed_lines(before: str, after: str) -> str:
    """The lines that are new or other ones, and those that go away, as `diff` counts them."""
    marks = [line[0] for line in difflib.ndiff(*(source_of(name).splitlines()[1:] for name in (before, after)))]
    return f"+{marks.count('+')} −{marks.count('-')}"


def table() -> str:
    """The table of the page, in its order."""
    lines = ["| in the guides to Ray Train | Ray keeps | ckptstore keeps |", "| --- | --- | --- |"]
    for name, what in ROWS.items():
        changed = [changed_lines(f"{name}_before", f"{name}_{how}") for how in ("report", "store")]
        lines.append(f"| {what} | {' | '.join(changed)} |")
    return "\n".join(lines)
