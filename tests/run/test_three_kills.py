"""Real trainers of many frameworks under `ckptstore run`, each killed in three ways: they go on at the right step, and
their losses are those of a run that nobody killed. None of them knows of the agent."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness import (
    BESIDE,
    CKPTSTORE,
    LOOKS,
    ROOT,
    TRAINERS,
    Job,
    control,
    empty,
    losses_of,
    steps_of,
    trainer,
    under_run,
)
from trainers.progress import LAST_STEP

from ckptstore import open_store


@dataclass(frozen=True)
class Case:
    """A framework: its train script, the packages that it needs, and what the agent has to be told."""

    script: str
    needs: str = ""
    """A folder of `.servers` with packages."""
    agent: tuple[str, ...] = ()
    """Options of `ckptstore run`."""
    mode: str = ""
    num_processes: int = 1
    savers: int = 1
    """Those that write a checkpoint each at the same step."""
    variables: dict[str, str] = field(default_factory=dict)
    newest: str = ""
    """A file that each save writes, where there are more saves than one before a pause."""

    @property
    def environment(self) -> dict[str, str]:
        path = f"{ROOT}:{BESIDE / self.needs}" if self.needs else str(ROOT)
        return {"PYTHONPATH": path, **self.variables}


KERAS = {"KERAS_BACKEND": "torch", "KERAS_HOME": str(BESIDE / "keras")}
CASES = {
    "accelerate": Case("accelerate_loop"),
    "transformers": Case("hf_trainer"),
    "trl": Case("hf_trainer", needs="trl", mode="sft"),
    "lightning": Case("lightning_fit"),
    "nanogpt-like": Case("one_file"),
    "xgboost": Case("xgboost_rounds", needs="xgboost", agent=("--quiet", "1s")),
    "lightgbm": Case("lightgbm_rounds", needs="lightgbm", agent=("--quiet", "1s")),
    "spacy": Case("spacy_train", needs="spacy", newest="model-last/vocab/lookups.bin"),
    "timm": Case("timm_epochs", needs="timm"),
    "keras": Case("keras_fit", "keras", savers=2, variables=KERAS),
    "keras-backup": Case("keras_fit", "keras", mode="backup", variables=KERAS),
    "ignite": Case("ignite_engine", "ignite"),
    "ignite-best": Case("ignite_engine", "ignite", mode="best"),
    "stable-baselines3": Case("sb3_ppo", "stable-baselines3"),
    "imagenet-ddp": Case("ddp_imagenet", num_processes=2),
    "composer": Case("composer_autoresume", needs="composer"),
    "coqui": Case("coqui_trainer", needs="coqui"),
    "fvcore": Case("fvcore_periodic", needs="fvcore"),
    "mmengine": Case("mmengine_runner", needs="mmengine", variables={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}),
    "ultralytics": Case("yolo_resume", needs="ultralytics", variables={"YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0"}),
}


class Life:
    """One job after another over one store, with the losses of each."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.directory = case, directory
        self.folder, self.store = directory / "out", str(directory / "store")
        self.starts = 0
        self.whole = control(
            directory,
            case.script,
            "--mode",
            case.mode,
            num_processes=case.num_processes,
            environment=case.environment,
        )

    def start(self, *options: object) -> Job:
        self.starts += 1
        losses = self.directory / f"{self.starts}.losses"
        case, arguments = self.case, ("--mode", self.case.mode, *options)
        script = trainer(case.script, self.folder, losses, *arguments, num_processes=case.num_processes)
        command = under_run(self.store, self.folder, script, *case.agent, *LOOKS)
        return Job(command, self.directory / f"{self.starts}.log", self.case.environment)

    def reach(self, job: Job, step: int, *, commits: int) -> None:
        """Wait until the trainer stands still after a step, and each of its savers has that many checkpoints in the
        store."""
        losses = self.directory / f"{self.starts}.losses"
        job.wait_until(lambda: step in losses_of(losses), f"step {step}")
        wanted = commits * self.case.savers
        job.wait_until(lambda: len(steps_of(self.store)) >= wanted, f"{wanted} commits")
        if self.case.newest:
            written_at = (self.folder / self.case.newest).stat().st_mtime
            job.wait_until(lambda: self.newest_written_at() >= written_at, "commit of the last save")

    def newest_written_at(self) -> float:
        with open_store(self.store, group="solo") as store:
            return max(float(checkpoint.metadata["folder"]["written_at"]) for checkpoint in store)

    def check(self, first: int, last: int) -> None:
        """The newest job did these steps, with the losses of the run that nobody killed."""
        found = losses_of(self.directory / f"{self.starts}.losses")
        assert found == {step: self.whole[step] for step in range(first, last + 1)}


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def kill_trainer(job: Job) -> None:
    """SIGKILL for all processes of the train script and torchrun, which comes first, and for nothing else."""
    mine = [process for process in job.processes() if runs_trainer(process.cmdline())]
    assert mine
    for process in mine:
        process.send_signal(signal.SIGKILL)


def runs_trainer(command: list[str]) -> bool:
    return any(Path(part).parent == TRAINERS for part in command) and CKPTSTORE[-1] not in command


IN_CI = ("xgboost",)
"""`make test-long` runs all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.long) for name in CASES]
)
def test_a_trainer_that_is_killed_in_three_ways_ends_as_if_nobody_had(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if case.needs and not (BESIDE / case.needs / ".installed").exists():
        pytest.skip(f"{case.needs} is not there: make servers")
    life = Life(case, tmp_path)
    assert max(life.whole) == LAST_STEP

    with life.start("--pause-at", 5) as job:  # the trainer alone, and then its machine is gone
        life.reach(job, 5, commits=1)
        kill_trainer(job)
        assert job.wait() == 128 + signal.SIGKILL, job.text()
    life.check(1, 5)
    empty(life.folder)

    with life.start("--pause-at", 8) as job:  # the agent alone: what watches it ends the trainer
        life.reach(job, 8, commits=2)
        agent = next(process for process in job.processes() if process.pid == job.pid)
        agent.send_signal(signal.SIGKILL)
        agent.wait(60)
        wait_until(lambda: not job.processes(), "the end of the trainer")
    life.check(4, 8)

    with life.start("--pause-at", 11) as job:  # both, and then the machine is gone
        life.reach(job, 11, commits=3)
        job.kill()
    life.check(7, 11)
    empty(life.folder)

    with life.start() as job:
        assert job.wait() == 0, job.text()
    life.check(10, LAST_STEP)
    assert not [*life.folder.rglob("*ckptstore*")]
    with open_store(life.store, group="solo") as store:
        assert all(checkpoint.verify().ok for checkpoint in store)
