"""What a failure costs: the table of `docs/explain/how-the-fast-tier-works.md`, row by row.

Rows kept elsewhere: processes that are killed at any system call of a save, a drain or a resume (`tests/outside`), full
disks and zombies (`test_fast_tier`).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from fast_jobs import NO_DRAIN, Jobs, durable, of, resume, save, state_of, steps
from thread_ranks import in_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trees import flip, heard

from ckptstore import CheckpointStore, FastTier, KeepEvery, StorageGroup, open_store
from ckptstore.errors import CkptstoreError
from ckptstore.events import FastBypassed
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

pytestmark = pytest.mark.slow

Row = Callable[[Jobs], object]
SECONDS = 60
DURABLE, NEWEST = 1, 3
"""Of the steps that are saved before a row, the one that is in the store, and the last one."""
TIER = {"keep": 3, "drain": KeepEvery(steps=1_000_000)}


def lose(*nodes: str) -> Row:
    return lambda jobs: [shutil.rmtree(jobs.disk(node)) for node in nodes]


def tear(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


def harm(how: Callable[[Path], None], name: str, *nodes: str) -> Row:
    def happens(jobs: Jobs) -> None:
        for path in (jobs.attempts(node)[-1] / name for node in nodes):
            if path.exists():
                how(path)

    return happens


SHARD, INDEX = "state-rank=00000-00.distcp", "tensors.index"
ROWS: dict[str, tuple[Row, str, int, int]] = {
    "a node is lost": (lose("a"), "ab", DURABLE, NEWEST),
    "a node is lost, another takes its place": (lose("b"), "ac", DURABLE, NEWEST),
    "a node and its partner are lost": (lose("a", "b"), "ab", DURABLE, DURABLE),
    "the job is moved": (lambda _: None, "cd", DURABLE, DURABLE),
    "a bit is flipped": (harm(flip, SHARD, "a"), "ab", 2, NEWEST),
    "a file is torn": (harm(tear, SHARD, "a"), "ab", 2, NEWEST),
    "a file is missing": (harm(Path.unlink, SHARD, "a"), "ab", 2, NEWEST),
    "a bit of the index is flipped": (harm(flip, INDEX, "a"), "ab", 2, NEWEST),
    "the index is torn": (harm(tear, INDEX, "a"), "ab", 2, NEWEST),
    "the index is missing": (harm(Path.unlink, INDEX, "a"), "ab", 2, NEWEST),
    "a bit of a certificate is flipped": (harm(flip, "fast.json", "a"), "ab", 2, NEWEST),
    "a certificate is missing": (harm(Path.unlink, "fast.json", "a"), "ab", NEWEST, NEWEST),
    "all certificates are missing": (harm(Path.unlink, "fast.json", "a", "b"), "ab", 2, 2),
    "a bit is flipped in both copies": (harm(flip, SHARD, "a", "b"), "ab", 2, 2),
    "a file is torn in both copies": (harm(tear, SHARD, "a", "b"), "ab", 2, 2),
    "a file is missing in both copies": (harm(Path.unlink, SHARD, "a", "b"), "ab", 2, 2),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The disks and the store of a job that has ended, for each number of copies."""
    found = {}
    for copies in (1, 2):
        jobs = Jobs(tmp_path_factory.mktemp(f"copies-{copies}"))
        tier = {**TIER, "copies": copies}
        jobs.run("ab", durable(1), drain_bytes_per_second=None, **tier)
        jobs.run("ab", lambda store, rank: (resume(store, rank), save(2, 3)(store, rank)), **tier)
        found[copies] = jobs.root
    return found


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_what_a_lost_or_damaged_disk_costs(
    before: dict[int, Path], tmp_path: Path, skipped: list[str], row: str, copies: int
) -> None:
    (happens, nodes, *wanted), jobs = ROWS[row], Jobs(tmp_path / "root")
    shutil.copytree(before[copies], jobs.root)
    happens(jobs)
    step = wanted[copies - 1]

    def flow(store: CheckpointStore, rank: int) -> Any:
        return resume(store, rank), save(4)(store, rank).is_durable

    assert jobs.run(nodes, flow, copies=copies, **TIER) == [(of(step, rank)[0], False) for rank in range(2)]
    if row == "all certificates are missing":  # a save that was never complete needs no word, and goes
        assert (skipped, NEWEST in steps(jobs, "a")) == ([], False)
    elif step == 2:
        assert skipped, "what is not used is told"


def test_a_node_that_cannot_be_reached_costs_no_checkpoint(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        is_durable = [save(1)(store, rank).is_durable]
        if rank == 1:
            store._job.tier.place.server.close()
        return [*is_durable, *(save(step)(store, rank).is_durable for step in (2, 3)), resume(store, rank)]

    with heard(FastBypassed) as bypassed:
        assert jobs.run("ab", flow, copies=2) == [[False, True, True, of(3, rank)[0]] for rank in range(2)]
    assert len(bypassed) == 4
    again = jobs.run("ab", lambda store, rank: save(4)(store, rank).is_durable, copies=2)
    assert again == [False] * 2, "a new start serves again"


def test_what_two_lost_nodes_had_is_told_on_all_ranks(jobs: Jobs) -> None:
    jobs.run("abc", durable(1), copies=2, drain_bytes_per_second=None)
    jobs.run("abc", lambda store, rank: (resume(store, rank), save(2)(store, rank)), copies=2, **TIER)
    lose("a", "b")(jobs)
    ends = jobs.run("abc", lambda store, rank: store.resume(state_of(0, rank)).load_report.passed_over, copies=2)
    assert ends[0] == ends[1] == ends[2]
    (told,) = ends[0]
    assert told.startswith("step 2: on c: no node that is here has the files of rank 0")


def stop_and_start(server: S3Server, seconds: float) -> None:
    server.close()
    time.sleep(seconds)
    server.start()


def throttle(server: S3Server, seconds: float) -> None:
    server.faults.add(
        Fault(action="status", times=None, probability=0.3), Fault(action="bandwidth", times=None, bytes_per_second=1e6)
    )
    time.sleep(seconds)
    server.faults.clear()


@pytest.mark.parametrize(
    ("trouble", "seconds"),
    [(throttle, 1.0), (stop_and_start, 2.0), pytest.param(stop_and_start, 60.0, marks=pytest.mark.long)],
)
def test_the_bucket_is_slow_or_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[S3Server, float], None], seconds: float
) -> None:
    """Saves do not hear of it. What waits for the store is there when the store is."""
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.01")
    begun, back = threading.Barrier(3), threading.Event()

    def train(rank: int) -> Any:
        seat = StorageGroup(rank, 2, "start", f"node{rank}")  # in a directory, as those of torch meet without the store
        group = seat.open(LocalStorage(tmp_path / "board"), rank_timeout_seconds=SECONDS)
        tier = FastTier(tmp_path / f"disk-{rank}", copies=2, node=f"node{rank}")
        with open_store("s3://test/run", group=group, fast=tier, storage_options=server.storage_options) as store:
            store.save_async(1, state_of(1, rank)).durable(SECONDS)
            begun.wait(SECONDS)
            began = time.monotonic()
            saves = [save(step)(store, rank).is_durable for step in (2, 3, 4)]
            assert time.monotonic() - began < 30, "a save has waited for the store"
            assert store.health().not_durable_seconds is not None
            assert back.wait(2 * SECONDS)
            last = store.save_async(9, state_of(9, rank)).durable(2 * SECONDS)
            return saves, last.step, store.health().away_seconds

    def strikes() -> None:
        begun.wait(SECONDS)
        trouble(server, seconds)
        back.set()

    with s3_server(buckets=["test"]) as server:
        director = threading.Thread(target=strikes)
        director.start()
        assert in_threads(2, train) == [([False] * 3, 9, None)] * 2
        director.join()
        with open_store("s3://test/run", group="solo", storage_options=server.storage_options) as store:
            assert [checkpoint.step for checkpoint in store][-1] == 9
            assert all(checkpoint.verify().ok for checkpoint in store)


TIMEOUT_SECONDS = 5.0


def saves_with_one_that_hangs(root: Path, copies: int) -> Any:
    """Rank 1 stops itself before the second save, and goes on when rank 0 has heard who it is."""
    rank, jobs = int(os.environ["RANK"]), Jobs(root, options={"rank_timeout_seconds": TIMEOUT_SECONDS})
    with jobs.open(rank, "ab", "start", copies=copies, **NO_DRAIN) as store:
        store._deadline.set(0.0)
        save(1)(store, rank)
        if rank == 1:
            (root / "hangs").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        began, told = time.monotonic(), None
        try:
            save(2)(store, rank)
        except CkptstoreError as error:
            told = type(error).__name__, str(error), time.monotonic() - began
        if rank == 0:
            os.kill(int((root / "hangs").read_text()), signal.SIGCONT)
        (root / f"heard-{rank}").touch()
        while not all((root / f"heard-{other}").exists() for other in (0, 1)):
            assert time.monotonic() - began < SECONDS
            time.sleep(0.02)
        return told, save(3)(store, rank).is_durable, resume(store, rank)


@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_node_hangs(tmp_path: Path, copies: int) -> None:
    """The others hear within twice the timeout of a rank who it is, and all go on when it does."""
    (told, *first), (_, *second) = forked_ranks.run_ranks(2, saves_with_one_that_hangs, tmp_path, copies)
    kind, text, seconds = told
    assert kind in ("RankTimeout", "StorageUnavailable"), text
    assert "rank 1" in text.lower() or "b broke off" in text, text
    assert "step 2" in text
    assert seconds < 2 * TIMEOUT_SECONDS + 5
    assert [first, second] == [[False, of(3, rank)[0]] for rank in range(2)]


def train(root: str, steps: int, ends: str) -> tuple[int | None, bool, list[float]]:
    """The step from which it went on, whether that was in the store, and the losses of so many steps more.

    Where it ends "preempted", there is not a second left to bring the last checkpoint into the store.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    progress, losses = {"step": 0}, []
    fast = FastTier(f"{root}/node{rank}", node=f"node{rank}", copies=2)
    with open_store(f"{root}/store", fast=fast) as store:
        state = {"model": model, "optimizer": optimizer, "progress": progress}
        resumed = store.resume(state)
        for _ in range(steps):
            progress["step"] += 1
            torch.manual_seed(progress["step"])
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            pending = store.save_async(progress["step"], state)
        pending.result()
        if ends == "preempted":
            store._deadline.set(0.0)
    dist.destroy_process_group()
    return (resumed.step if resumed else None), bool(resumed and resumed.number), losses


@pytest.mark.timeout(600)
def test_a_lost_node_costs_no_step(tmp_path: Path) -> None:
    whole = forked_ranks.run_ranks(2, train, str(tmp_path / "whole"), 6, "well")
    root = tmp_path / "lost"
    before = forked_ranks.run_ranks(2, train, str(root), 3, "preempted")
    shutil.rmtree(root / "node1")
    after = forked_ranks.run_ranks(2, train, str(root), 3, "well")
    for rank in range(2):
        assert before[rank][0] is None
        assert after[rank][:2] == (3, False), "from the copy on the partner, which the store does not have"
        assert before[rank][2] + after[rank][2] == whole[rank][2]
