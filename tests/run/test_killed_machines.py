"""Machines that die at any moment, with empty disks afterwards: a job under `ckptstore run` goes on as if none had."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import LOOKS, Job, control, empty, losses_of, server_environment, steps_of, trainer, under_run

from ckptstore import open_store
from ckptstore.testing.s3_server import Fault, s3_server

pytestmark = pytest.mark.slow

OPTIONS = {
    "marker": ("--pattern", "step_*", "--marker", "DONE"),
    "megatron": (),
}
BUSY = Fault(action="status", status=503, code="SlowDown", probability=0.2, times=None)
LOST = Fault(action="lose_answer", match="^PUT|^POST", probability=0.05, times=None)


def kill_somewhere(job: Job, moments: random.Random, reached: Callable[[], bool] | None) -> None:
    """In the restore or the start; or some time after what is to be reached, which may be in the write of a checkpoint,
    between its files, or in its upload."""
    if reached is None:
        time.sleep(moments.uniform(0.0, 1.5))
    else:
        job.wait_until(lambda: reached() or job.has_ended, "the moment to kill it")
        time.sleep(moments.uniform(0.0, 0.5))
    job.kill()


@pytest.mark.parametrize("shape", OPTIONS)
def test_a_job_survives_every_kill_at_any_moment(tmp_path: Path, shape: str) -> None:
    """Agent, trainer and all that they have started, on a busy bucket or on a disk, and then nothing is left there."""
    whole = control(tmp_path, "plain", "--mode", shape)
    folder, moments, last = tmp_path / "out", random.Random(shape), max(whole)
    with s3_server(buckets=["test"]) as server:
        server.faults.add(BUSY, LOST)
        store, options = ("s3://test/run", server.storage_options) if shape == "marker" else (f"{tmp_path}/store", {})
        resumed: list[int] = []
        for number in range(6):
            losses = tmp_path / f"{number}.losses"
            before = steps_of(store, options)
            stand_still = ("--pause-at", last) if number < 5 else ()  # on a slow machine too it is killed first
            command = trainer("plain", folder, losses, "--mode", shape, "--step-seconds", 0.1, *stand_still)
            command = under_run(store, folder, command, *OPTIONS[shape], *LOOKS)
            with Job(command, tmp_path / "log", server_environment(options)) as job:
                reached = {
                    "steps": lambda losses=losses: last in (told := losses_of(losses)) or len(told) > 4,
                    "commit": lambda losses=losses, before=before: (
                        last in losses_of(losses) or steps_of(store, options) != before
                    ),
                }
                if number < 5:
                    moment = (None, "commit", None, "steps", "commit")[number]
                    kill_somewhere(job, moments, reached[moment] if moment else None)
                else:
                    assert job.wait() == 0, job.text()
            told = losses_of(losses)
            assert told == {step: whole[step] for step in told}, "the same numbers, whatever happened before"
            if told and before:
                assert min(told) == max(before) + 1, "from the newest checkpoint of the store"
                resumed.append(max(before))
            empty(folder)
        assert resumed, "no run resumed from the store"
        with open_store(store, storage_options=options, group="solo") as opened:
            assert max(checkpoint.step for checkpoint in opened) == max(whole)
            assert all(checkpoint.verify().ok for checkpoint in opened)


def test_a_bucket_that_is_away_is_never_noticed(tmp_path: Path) -> None:
    """No network while checkpoints are written: the training keeps its pace, and all is in the bucket at the end."""
    folder, losses, log = tmp_path / "out", tmp_path / "losses", tmp_path / "log"
    whole = control(tmp_path, "plain", "--mode", "marker")
    with s3_server(buckets=["test"]) as server:
        command = trainer("plain", folder, losses, "--mode", "marker", "--step-seconds", 0.3)
        command = under_run("s3://test/run", folder, command, *OPTIONS["marker"], *LOOKS, "--require-commit")
        with Job(command, log, server_environment(server.storage_options)) as job:
            job.wait_until(lambda: 3 in steps_of("s3://test/run", server.storage_options), "commit of step 3")
            server.close()
            job.wait_until(lambda: max(losses_of(losses)) >= 11, "step 11, while nothing answers")
            server.start()
            assert job.wait() == 0, job.text()
        assert losses_of(losses) == whole
        assert steps_of("s3://test/run", server.storage_options)[-1] == max(whole)
