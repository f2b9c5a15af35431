"""What a report tells of a fast tier: from the log, and from the disk of this node where it is asked to look there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptstore import FastTier, KeepEvery, open_store

Commands = Callable[..., Any]


def job(root: Path, *steps: int, durable: tuple[int, ...] = (), rate: float | None = None) -> None:
    """Resume, save these steps on the node, and end as a job that is killed does: some are in the store."""
    fast = FastTier(root / "fast", keep=9, drain=KeepEvery(steps=1000), drain_bytes_per_second=rate)
    with open_store(root / "store", fast=fast) as store:
        store.resume()
        for step in steps:
            pending = store.save_async(step, {"w": torch.full((10,), float(step))}, metrics={"loss": 1 / step})
            pending.result()
            if step in durable:
                pending.durable()
        store._deadline.set(0.0)


def test_what_is_on_the_node_and_where_jobs_went_on(tmp_path: Path, report: Commands, run: Commands) -> None:
    job(tmp_path, 1, 2, 3, 4, durable=(1, 3))
    job(tmp_path, 5, rate=1.0)
    (first,) = report(tmp_path / "store")["stores"]
    assert [(one["step"], one["save_number"], one["saves_before"]) for one in first["checkpoints"]][:2] == [
        (1, 1, 0),
        (3, 3, 1),
    ]
    assert all(one["committed_at"] >= one["created_at"] for one in first["checkpoints"])
    assert [(one["epoch"], one["step"], one["source"]) for one in first["resumes"]] == [(1, None, None), (2, 4, None)]
    texts = [change["text"] for change in first["changes"] if change["kind"] == "resume"]
    assert texts == [
        "the job of writer epoch 1 found nothing and began anew",
        "the job of writer epoch 2 went on from step 4, which the nodes had and the store had not",
    ]
    assert (first["fast_directory"], first["fast"], first["health"]["last_fast_step"]) == ("", [], None)

    paths = {path.name[5:15]: path for path in (tmp_path / "fast").glob("*/checkpoints/*")}
    (paths["0000000002"] / "fast.json").chmod(0o600)
    (paths["0000000002"] / "fast.json").write_bytes(b"{}")
    told = run("report", tmp_path / "store", "--fast", tmp_path / "fast", "--html", tmp_path / "page.html")
    assert "is not an object of the store format" in told.stderr
    (seen,) = report(tmp_path / "store", "--fast", tmp_path / "fast")["stores"]
    found = {one["step"]: one for one in seen["fast"]}
    assert {step: one["standing"] for step, one in found.items()} == {
        1: "durable",
        2: "damaged",
        3: "durable",
        4: "only-here",
        5: "only-here",
    }
    assert [one["is_usable"] for one in found.values()].count(False) == 1
    assert found[5]["metrics"] == {"loss": 0.2}
    health = seen["health"]
    assert (health["last_fast_step"], health["last_fast_at"]) == (5, found[5]["created_at"])
    assert health["not_durable_since"] == found[4]["created_at"]
    (tmp_path / "fast").chmod(0o755)
    (unsafe,) = report(tmp_path / "store", "--fast", tmp_path / "fast")["stores"]
    assert unsafe["fast"] == []
    assert "lets other users in" in unsafe["health"]["trouble"][0]
    run("report", tmp_path / "store", "--fast", tmp_path / "typo", "--json", code=2)
