"""Training jobs that are started, killed with all their processes, and started again on an emptied folder.

A job is a real command, mostly `ckptstore run … -- python trainers/….py`. It carries a mark in its environment, which
all of its processes inherit: so they are found whoever their parent is, and `kill` leaves none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ckptstore import open_store

TRAINERS = Path(__file__).parent / "trainers"
CKPTSTORE = (sys.executable, "-m", "ckptstore.tools.cli")
ROOT = Path(__file__).parents[2]
LOOKS = ("--interval", "0.2")
"""For the agent: tests have no time to wait for its usual looks."""
_MARK = "TEST_JOB_MARK"
BESIDE = ROOT / ".servers"
"""Frameworks that are not in the environment (tests/servers/install.py)."""
_PATIENCE_SECONDS = 120.0


def trainer(
    name: str, folder: Path, losses: Path, *options: object, num_processes: int = 1, torchrun: Sequence[str] = ()
) -> list[str]:
    """The command that trains; with several processes, or options for it, under torchrun."""
    start = [sys.executable]
    if num_processes > 1:
        torchrun = ("--standalone", "--nproc-per-node", str(num_processes))
    if torchrun:
        start += ["-m", "torch.distributed.run", *torchrun]
    return [*start, str(TRAINERS / f"{name}.py"), str(folder), str(losses), *map(str, options)]


def under_run(store: str, folder: Path, command: Sequence[str], *options: object) -> list[str]:
    """The same command as a user has it under the agent."""
    return [*CKPTSTORE, "run", "--store", store, "--folder", str(folder), *map(str, options), "--", *command]


class Job:
    """One start of a command, and all processes that come of it. Use it as a context: nothing of it is left."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        variables |= {_MARK: self._mark, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The first process: the agent, where there is one."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the first process has."""
        return self._process.poll() is not None

    def text(self) -> str:
        """What all of its processes have printed."""
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Those that run now."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            return False

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> int:
        """Its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"It has not ended in {seconds:.0f} s:\n{self.text()}") from None

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = _PATIENCE_SECONDS) -> None:
        """Until something is so while it runs."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert not self.has_ended, f"It ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"No {what} in {seconds:.0f} s:\n{self.text()}"
            time.sleep(0.05)

    def kill(self) -> int:
        """SIGKILL for every process, as when a machine loses its power. How many there were.

        They are stopped first, so that none sees the end of another or starts a new one.
        """
        found: dict[int, psutil.Process] = {}
        while new := [process for process in self.processes() if process.pid not in found]:
            for process in new:
                found[process.pid] = process
                _send(process, signal.SIGSTOP)
        for process in found.values():
            _send(process, signal.SIGKILL)
        psutil.wait_procs(found.values(), timeout=_PATIENCE_SECONDS)
        self._process.wait(_PATIENCE_SECONDS)
        return len(found)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        """It ended in between."""


def control(
    directory: Path,
    name: str,
    *options: object,
    num_processes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """The losses of a run that nobody touches, and nothing runs beside it."""
    losses = directory / "control.losses"
    command = trainer(name, directory / "control", losses, *options, num_processes=num_processes)
    with Job(command, directory / "control.log", environment) as job:
        assert job.wait() == 0, job.text()
    return losses_of(losses)


def empty(folder: Path) -> None:
    """As on a new machine: the folder is not even there."""
    shutil.rmtree(folder, ignore_errors=True)


def losses_of(path: Path) -> dict[int, str]:
    """The exact loss of each step; where a step was done twice, of the last time."""
    if not path.exists():
        return {}
    return {int(step): loss for step, loss in map(json.loads, path.read_text().splitlines())}


def steps_of(store: str, storage_options: dict[str, Any] | None = None) -> list[int]:
    """The steps that are committed, read by a store of our own."""
    if "://" not in store and not Path(store).exists():
        return []
    with open_store(store, storage_options=storage_options or None, group="solo") as opened:
        return [checkpoint.step for checkpoint in opened]


def server_environment(storage_options: dict[str, Any]) -> dict[str, str]:
    """What a user has in the environment to reach a bucket."""
    if not storage_options:
        return {}
    return {
        "AWS_ENDPOINT_URL": storage_options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": storage_options["key"],
        "AWS_SECRET_ACCESS_KEY": storage_options["secret"],
        "AWS_REGION": "us-east-1",
    }
