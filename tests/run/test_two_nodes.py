"""An agent on each of two machines with disks of their own: one checkpoint of both nodes' files, and both go on."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import LOOKS, Job, control, empty, losses_of, steps_of, trainer, under_run

from ckptstore import open_store

pytestmark = pytest.mark.slow


class Machines:
    """Two of them: a folder, a log and a file of losses each."""

    def __init__(self, directory: Path, store: str) -> None:
        self.directory, self.store = directory, store
        self.folders = [directory / "node-0", directory / "node-1"]

    def losses(self, run_id: str, node: int) -> Path:
        return self.directory / f"{run_id}-{node}.losses"

    def start(self, stack: ExitStack, run_id: str, trainers: list[list[str]]) -> list[Job]:
        """Both agents; their end is that of the stack."""
        jobs = []
        for node, command in enumerate(trainers):
            nodes = ("--nodes", 2, "--node-rank", node, "--run-id", run_id)
            agent = under_run(self.store, self.folders[node], command, *nodes, *LOOKS)
            jobs.append(stack.enter_context(Job(agent, self.directory / f"{run_id}-{node}.log")))
        return jobs

    def die(self, jobs: list[Job]) -> None:
        """At once, with their disks."""
        for job in jobs:
            job.kill()
        for folder in self.folders:
            empty(folder)


def files_of(store: str, step: int) -> dict[str, Any]:
    """The files of a checkpoint, and which node has stored them."""
    with open_store(store, group="solo") as opened:
        assert all(checkpoint.verify().ok for checkpoint in opened)
        (found,) = [checkpoint for checkpoint in opened if checkpoint.step == step]
        return {receipt.name: receipt.rank for receipt in found.files}


@pytest.mark.long
def test_two_machines_of_one_sharded_model(tmp_path: Path) -> None:
    """A rank on each; `.metadata` is written on the first alone, and names files of both."""
    machines = Machines(tmp_path, str(tmp_path / "store"))
    whole = control(tmp_path, "fsdp_dcp", num_processes=2)

    def trainers(run_id: str, *options: object) -> list[list[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            master = ("--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1]))
        commands = []
        for node in (0, 1):
            torchrun = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", *master)
            losses = machines.losses(run_id, node)
            commands.append(trainer("fsdp_dcp", machines.folders[node], losses, *options, torchrun=torchrun))
        return commands

    with ExitStack() as stack:
        jobs = machines.start(stack, "first", trainers("first", "--pause-at", 8))
        jobs[0].wait_until(lambda: 6 in steps_of(machines.store), "commit of step 6")
        machines.die(jobs)
        assert files_of(machines.store, 6) == {".metadata": 0, "__0_0.distcp": 0, "__1_0.distcp": 1}
        jobs = machines.start(stack, "second", trainers("second"))
        for job in jobs:
            assert job.wait() == 0, job.text()
        assert losses_of(machines.losses("first", 0)) == {step: whole[step] for step in range(1, 9)}
        assert losses_of(machines.losses("second", 0)) == {step: whole[step] for step in range(7, 13)}
        assert steps_of(machines.store)[-1] == 12
