"""A job that has saved to its nodes goes back: nobody goes on from what it left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptstore import FastTier, KeepEvery, open_store


@pytest.mark.parametrize("target", [1, 2])
def test_what_a_job_left_behind_on_its_nodes_is_void(tmp_path: Path, target: int) -> None:
    """Steps 1 and 2 are in the store, 3 and 4 on the node alone."""
    root = tmp_path / "store"

    def state(step: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((10,), float(step))}

    def tier() -> FastTier:
        return FastTier(tmp_path / "fast", keep=9, drain=KeepEvery(steps=1000))

    with open_store(root, fast=tier()) as store:
        store.resume()
        for step in (1, 2):
            store.save_async(step, state(step)).durable()
        for step in (3, 4):
            store.save(step, state(step))
        assert store.roll_back(target).step == target
    with open_store(root, fast=tier()) as store:
        found = store.resume()
        assert (found.step, found.is_durable) == (target, True)
        store.save(5, state(5))
        store.drain()
        store.roll_back(target)
        store.save(6, state(6))
    with open_store(root, fast=tier()) as store:
        assert store.resume().step == 6
