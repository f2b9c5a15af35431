"""Real trainers of five frameworks under `ckptstore run`: killed on one machine, they go on with the same losses on
another, or on the same with what the kill left. None of them knows of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import (
    BESIDE,
    LOOKS,
    ROOT,
    Job,
    control,
    empty,
    losses_of,
    server_environment,
    steps_of,
    trainer,
    under_run,
)

from ckptstore import open_store
from ckptstore.testing.s3_server import Fault, s3_server

PAUSE_AT = 8
"""In the middle: the checkpoints of steps 3 and 6 are there, that of 9 is not."""


def tear_trainer(folder: Path) -> None:
    """The disk is still there, with a checkpoint that the kill cut off, and that Trainer would take for the newest."""
    torn = shutil.copytree(folder / "checkpoint-6", folder / "checkpoint-9")
    (torn / "trainer_state.json").unlink()
    os.truncate(torn / "optimizer.pt", 1000)


def tear_deepspeed(folder: Path) -> None:
    """The same where rank 0 was faster than rank 1: it writes `latest` without waiting for the others."""
    torn = shutil.copytree(folder / "global_step6", folder / "global_step9")
    (torn / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (folder / "latest").write_text("global_step9")


@dataclass(frozen=True)
class Case:
    """A framework, and how it is started."""

    script: str
    options: tuple[str, ...] = ()
    num_processes: int = 1
    needs: str = ""
    """A folder of `.servers` with packages."""
    on_s3: bool = False
    disk: Callable[[Path], None] = empty
    """What the kill does to the folder."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{BESIDE / self.needs}:{ROOT}" if self.needs else str(ROOT)
        return {"PYTHONPATH": path, **self.variables}


CASES = {
    "transformers": Case("hf_trainer", disk=tear_trainer),
    "transformers-ddp": Case("hf_trainer", num_processes=2, on_s3=True),
    "trl": Case("hf_trainer", ("--mode", "sft"), needs="trl"),
    "lightning": Case("lightning_fit"),
    "deepspeed": Case(
        "deepspeed_zero", num_processes=2, needs="deepspeed", disk=tear_deepspeed, variables={"DS_ACCELERATOR": "cpu"}
    ),
    "torchtitan-layout": Case("fsdp_dcp", num_processes=2, on_s3=True),
}
IN_CI = ("transformers", "torchtitan-layout")
"""A disk that the kill left torn, and sharded files in a busy bucket. `make test-long` runs all."""


@contextmanager
def place(case: Case, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A directory, or a bucket that answers every fifth request with 503."""
    if not case.on_s3:
        yield str(directory / "store"), {}
        return
    with s3_server(buckets=["test"]) as server:
        server.faults.add(Fault(action="status", status=503, code="SlowDown", probability=0.2, times=None))
        yield "s3://test/run", server.storage_options


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.long) for name in CASES]
)
def test_a_killed_trainer_goes_on_with_the_same_losses(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if case.needs and not (BESIDE / case.needs / ".installed").exists():
        pytest.skip(f"{case.needs} is not there: make servers")
    folder, losses = tmp_path / "out", [tmp_path / "first", tmp_path / "second"]
    whole = control(
        tmp_path, case.script, *case.options, num_processes=case.num_processes, environment=case.environment
    )
    with place(case, tmp_path) as (store, options):
        environment = {**case.environment, **server_environment(options)}

        def job(number: int, *more: object) -> Job:
            script = trainer(
                case.script, folder, losses[number], *case.options, *more, num_processes=case.num_processes
            )
            return Job(under_run(store, folder, script, *LOOKS), tmp_path / f"log{number}", environment)

        with job(0, "--pause-at", PAUSE_AT) as first:
            first.wait_until(lambda: PAUSE_AT in losses_of(losses[0]), f"step {PAUSE_AT}")
            first.wait_until(lambda: 6 in steps_of(store, options), "commit of step 6")
            assert first.kill() >= case.num_processes + 1, "the agent and every process of the trainer"
        case.disk(folder)
        with job(1) as second:
            assert second.wait() == 0, second.text()
        before, after = losses_of(losses[0]), losses_of(losses[1])
        assert before == {step: whole[step] for step in range(1, PAUSE_AT + 1)}
        assert after == {step: whole[step] for step in range(7, max(whole) + 1)}, "from step 6 as if nothing had been"
        with open_store(store, storage_options=options or None, group="solo") as opened:
            assert opened.latest().step == max(whole)  # type: ignore[union-attr]
            assert all(checkpoint.verify().ok for checkpoint in opened)
