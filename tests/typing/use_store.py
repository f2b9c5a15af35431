"""The calls of a training loop, with the types of their results. Checkers read this; nobody runs it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import torch

import ckptstore
from ckptstore import (
    Checkpoint,
    CheckpointStore,
    Entry,
    FastTier,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepSince,
    LoadReport,
    PendingSave,
    Receipt,
    StoreHealth,
    Trashed,
    open_store,
)


def use(state: dict[str, Any], directory: Path) -> None:
    retention = KeepLatest(3) | KeepBest(1, "loss") | KeepEvery(steps=1000) | KeepSince(3600) | KeepAll()
    assert_type(open_store("s3://bucket/run", retention=retention, missing="worst"), CheckpointStore)
    with open_store(directory, fast=FastTier(directory / "near"), group="solo") as store:
        assert_type(store, CheckpointStore)
        assert_type(store.resume(state, per_rank={"rng": "skip"}), Checkpoint | None)
        assert_type(store.load(state, include=["model.*"], dtype="state", read_once="node"), Checkpoint | None)
        checkpoint = store.save(1, state, metrics={"loss": 0.1}, incremental="reference")
        assert_type(checkpoint, Checkpoint)
        assert_type(store.save_directory(2, directory, suffix="never", shared=["config.json"]), Checkpoint)
        pending = store.save_async(3, state, on_busy="skip", stock_readable=True)
        assert_type(pending, PendingSave)
        assert_type(pending.skipped, bool)
        assert_type(pending.result(), Checkpoint | None)
        assert_type(store.drain(), Checkpoint | None)
        assert_type(store.latest(), Checkpoint | None)
        assert_type(store.best("loss"), Checkpoint | None)
        assert_type(store[1], Checkpoint)
        assert_type(list(store), list[Checkpoint])
        assert_type(store.entries(), list[Entry])
        assert_type(store.trash(), list[Trashed])
        assert_type(store.health(), StoreHealth)
        assert_type(store.stop_requested, bool)
        assert_type(store.finish_by(30), bool)


def misspell(store: CheckpointStore) -> None:
    open_store("runs/first", missing="last")  # type: ignore[arg-type]
    store.save(1, {}, exists="never")  # type: ignore[arg-type]
    store.save_async(1, {}, on_busy="drop")  # type: ignore[arg-type]
    store.save_directory(1, None, suffix="no")  # type: ignore[arg-type]
    store.load({}, read_once="nodes")  # type: ignore[arg-type]
    store.resume({}, per_rank="last")  # type: ignore[arg-type]


def look(checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    assert_type(Checkpoint.from_uri("gs://bucket/exports/final"), Checkpoint)
    assert_type(checkpoint.load(state), LoadReport)
    assert_type(checkpoint.load_report, LoadReport | None)
    assert_type(checkpoint.step, int)
    assert_type(checkpoint.metrics, dict[str, float])
    assert_type(checkpoint.metadata, dict[str, Any])
    assert_type(checkpoint.files, tuple[Receipt, ...])
    assert_type(checkpoint.keys(), list[str])
    assert_type(checkpoint.verify("5%").ok, bool)
    assert_type(checkpoint.to_directory("exports"), Path)
    assert_type(checkpoint.tensors["w"].shape, tuple[int, ...])
    with checkpoint.as_directory() as path:
        assert_type(path, Path)


def fail(error: ckptstore.CkptstoreError) -> None:
    assert_type(error.committed, bool | None)


def mark(weight: torch.Tensor) -> dict[str, Any]:
    return {"weight": ckptstore.state.replicated(weight), "rng": ckptstore.state.per_rank(torch.get_rng_state())}
