"""Which processes of a job are its ranks: what each launcher gives to whom."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckptstore.tools.run.folders import Folder, JobSeen, StartedJob
from ckptstore.tools.run.trainer import TrainerProcess
from tests.folders.test_finished_property import zipped

pytestmark = pytest.mark.slow

WAIT = "sleep 60 & wait"
TORCHRUN = "for r in {0} {1}; do RANK=$r LOCAL_RANK=$((r % 2)) WORLD_SIZE=9 sh -c '{wait}' & done; wait"
SET = f"export RANK=$SLURM_PROCID; sh -c '{WAIT}' & wait"
"""A program that sets a rank for itself, and starts a worker of its data loader."""


@contextmanager
def job(script: str, outside: dict[str, str], count: int) -> Iterator[StartedJob]:
    """A job that ends in that many sleeping processes, below an agent with these variables."""
    env = {"PATH": os.environ["PATH"]}
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(env):
            patch.delenv(name)
        for name, text in outside.items():
            patch.setenv(name, text)
        process = subprocess.Popen(["sh", "-c", script], env={**env, **outside}, start_new_session=True)
        try:
            until = time.monotonic() + 30
            while len(sleepers(process.pid)) < count:
                assert time.monotonic() < until
                time.sleep(0.01)
            yield StartedJob(process.pid)
        finally:
            os.killpg(process.pid, 9)
            process.wait()


def sleepers(session: int, variable: bytes = b"") -> list[int]:
    """The processes of a session that only wait: then all above them are what they were started for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, fields = path.read_text().partition("(")[2].rpartition(")")
            if (
                name == "sleep"
                and int(fields.split()[3]) == session
                and variable in (path.parent / "environ").read_bytes()
            ):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("outside", "script", "count", "ranks"),
    [
        ({}, WAIT, 1, set()),
        ({"SLURM_PROCID": "1"}, WAIT, 1, {1}),  # srun python train.py, one task a node
        ({"SLURM_PROCID": "3"}, SET, 1, {3}),
        ({}, TORCHRUN.format(0, 1, wait=WAIT), 2, {0, 1}),
        ({"SLURM_PROCID": "1", "PMI_RANK": "1"}, TORCHRUN.format(8, 9, wait=WAIT), 2, {8, 9}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, TORCHRUN.format(8, 9, wait=WAIT), 2, {8, 9}),  # Kubeflow
        ({"RANK": "0", "WORLD_SIZE": "2"}, TORCHRUN.format(0, 1, wait=WAIT), 2, {0, 1}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, TORCHRUN.format(0, 1, wait=WAIT), 2, {0, 1}),  # its nodes take any order
        ({"RANK": "1", "WORLD_SIZE": "2"}, f"sleep 60 & {TORCHRUN.format(8, 9, wait=WAIT)}", 3, {8, 9}),
        ({"SLURM_PROCID": "0"}, f"OMPI_COMM_WORLD_RANK=7 sh -c '{WAIT}' & {WAIT}", 2, {7}),
        ({"SLURM_PROCID": "1"}, "OMPI_COMM_WORLD_RANK=7 sh -c 'RANK=7 sleep 60 & env -u RANK sleep 60'", 2, {7}),
        ({"SLURM_PROCID": "1"}, f"RANK=8 LOCAL_RANK=0 sh -c 'env -u RANK sleep 60 & wait' & {WAIT}", 2, {8}),
        ({}, f"RANK=8 LOCAL_RANK=0 sh -c 'RANK=0 LOCAL_RANK=0 sleep 60 & wait' & {WAIT}", 2, {8}),  # a job of its own
    ],
)
def test_a_launcher_is_no_rank(outside: dict[str, str], script: str, count: int, ranks: set[int]) -> None:
    with job(script, outside, count) as started:
        assert started.seen().ranks == frozenset(ranks)


@pytest.mark.parametrize(("code", "is_alive"), [(0, True), (7, False)])
def test_what_outlives_a_trainer_is_part_of_the_job_unless_that_has_failed(code: int, is_alive: bool) -> None:
    """It may still write; after a failure nothing that looks finished can be trusted."""
    ended = threading.Event()
    trainer = TrainerProcess(["sh", "-c", f"sleep 60 & exit {code}"], ended=lambda _: ended.set())
    try:
        assert ended.wait(30)
        seen = trainer.seen()
        assert (seen.is_alive, seen.ended_well) == (is_alive, False)
    finally:
        os.killpg(trainer.pid, 9)
        while trainer.seen().is_alive:
            time.sleep(0.01)
        seen = trainer.seen()
        trainer.release()
    assert (seen.is_alive, seen.ended_well) == (False, code == 0)


def test_a_rank_that_has_ended_counts_as_long_as_another_one_runs(tmp_path: Path) -> None:
    """It was killed while it wrote: the others' files alone are half of a checkpoint."""
    place = tmp_path / "checkpoint-5"
    place.mkdir()
    (place / "optimizer.pt").write_bytes(zipped(5, ""))
    (place / "rng_state_8.pth").write_bytes(zipped(5, ""))
    with job(TORCHRUN.format(8, 9, wait="exec sleep 60"), {"SLURM_PROCID": "1"}, 2) as started:
        assert started.seen().ranks == frozenset({8, 9})
        (dies,) = sleepers(started.root, b"RANK=9\0")
        os.kill(dies, 9)
        while Path(f"/proc/{dies}").exists():
            time.sleep(0.01)
        folder = Folder(tmp_path)
        folder.look(JobSeen(frozenset(), is_started=True))
        folder.look(started.seen())
        assert folder.look(started.seen()).unfinished == {"checkpoint-5": "rng_state_9.pth is not there yet"}
