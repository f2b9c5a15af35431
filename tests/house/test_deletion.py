"""The core is whole alone: it saves, resumes, prunes and loads without extensions, integrations, tools and testing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from test_architecture import PACKAGE, WINGS

from ckptstore.testing.s3_server import s3_server

PROGRAM = """
import os, sys, torch
import ckptstore.loading.load_state, ckptstore.opening, ckptstore.saving.save_state, ckptstore.transfer.upload

def train(place):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rank": ckptstore.state.per_rank(RANK)}
    options = {"retention": ckptstore.KeepLatest(2), "grace_seconds": 0.0}
    for start in range(2):
        group = ckptstore.StorageGroup(RANK, WORLD_SIZE, f"start-{start}") if WORLD_SIZE > 1 else "solo"
        with ckptstore.open_store(place, group=group, **options) as store:
            resumed = store.resume(state)
            assert (resumed.step if resumed else 0) == 2 * start, resumed
            for step in (2 * start + 1, 2 * start + 2):
                model(torch.ones(1, 4)).sum().backward()
                state["optimizer"].step()
                store.save_async(step, state) if step % 2 else store.save(step, state)
            store.finish_by(60)
            bias = model.bias.detach().clone()
            with torch.no_grad():
                model.bias.zero_()
            assert store.load(state).step == 2 * start + 2
            assert torch.equal(model.bias, bias)
    if RANK == 0:
        with ckptstore.open_store(place, group="solo", **options) as store:
            store.prune()
            assert [one.step for one in store] == [2, 3, 4]  # the one that the last start resumed from stays
            assert all(one.verify().ok for one in store)
            assert store.trash() == []

def refused(call):
    try:
        call()
    except ckptstore.InvalidInput as error:
        assert str(error).startswith("This needs ckptstore."), error
        return
    raise AssertionError(call)

def check_missing(place):
    for name in ("FastTier", "merge", "Subscription", "open_publication"):
        refused(lambda: getattr(ckptstore, name))
    for name in ("export", "import_state"):
        refused(lambda: getattr(__import__("ckptstore.interchange").interchange, name))
    refused(lambda: ckptstore.dcp.StoreWriter)
    refused(lambda: ckptstore.ray.report)
    refused(lambda: ckptstore.open_store(place, fast=object()))
    with ckptstore.open_store(place, group="solo") as store:
        for call in (store.follow, store.history, store.dcp_target):
            refused(call)
        refused(lambda: store.annotate(4, {"loss": 1.0}))
        refused(lambda: store.thin(3, "optimizer.*"))

WORLD_SIZE, places = int(sys.argv[1]), sys.argv[2:]
RANK, children = 0, []
for rank in range(1, WORLD_SIZE):  # forked while nothing is opened, so that all is imported once
    children.append(os.fork())
    if children[-1] == 0:
        RANK, children = rank, []
        break
for place in places:
    train(place)
if WORLD_SIZE == 1:
    check_missing(places[0])
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_the_core_stands_alone(tmp_path: Path) -> None:
    """On a disk and on S3, on one rank and on four; what is missing is named in one sentence."""
    wings = [f"{wing}*" for wing in WINGS - {"ray", "__main__"}]
    shutil.copytree(PACKAGE, tmp_path / "ckptstore", ignore=shutil.ignore_patterns(*wings))
    with s3_server(buckets=["test"]) as server:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "AWS_ENDPOINT_URL": server.endpoint_url}
        environment |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        for number in ("1", "4"):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", PROGRAM, number, f"disk-{number}", f"s3://test/{number}"],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stderr
