"""Replica groups of torchft on one store: one saves, all may resume, one is killed and comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.integrations.loaders import MapLoader

WORKER = Path(__file__).parent / "torchft_group.py"


def started(tmp_path: Path, group: int, life: int, lighthouse: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A replica group, and the file to which it prints."""
    output = tmp_path / f"group{group}-{life}"
    command = [sys.executable, str(WORKER), str(group), str(tmp_path / "store"), lighthouse]
    with output.open("wb") as file, output.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, stdout=file, stderr=errors), output


def lines(output: Path) -> list[list[str]]:
    return [line.split() for line in output.read_text().splitlines()]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


@pytest.mark.long
def test_a_group_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Not part of the environment that is installed for the tests: run where torchft 0.2 can be imported."""
    coordination = pytest.importorskip("torchft.coordination")
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    running = [started(tmp_path, group, 1, server.address()) for group in (0, 1)]
    try:
        (first, first_output), (_, second_output) = running
        wait_for(lambda: ["saved", "6"] in lines(first_output) + lines(second_output))
        wait_for(lambda: any(line[:1] == ["step"] and line[2] == "2" for line in lines(second_output)))
        first.kill()
        first.wait()
        at_kill = len(lines(second_output))
        wait_for(lambda: any(line[0] == "saved" for line in lines(second_output)[at_kill:]))
        running.append(started(tmp_path, 0, 2, server.address()))
        wait_for(lambda: any(line[:1] == ["step"] and line[2] == "2" for line in lines(running[2][1])))
        last = tmp_path / "store-part"
        last.write_text(str(int(lines(running[2][1])[-1][1]) + 20))
        last.rename(tmp_path / "store-last")
        for process, output in running[1:]:
            assert process.wait(90) == 0, output.with_suffix(".err").read_text()[-2000:]
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
        server.shutdown()
    again = lines(running[2][1])
    with ckptstore.open_store(tmp_path / "store") as store:
        steps = [checkpoint.step for checkpoint in store]
        assert all(checkpoint.verify().ok for checkpoint in store)
    assert again[0][0] == "begins"
    assert int(again[0][1]) in steps, "from the store, not from nothing"
    sums = {line[1]: line[4] for line in lines(second_output) if line[0] == "step"}
    mine = {line[1]: line[4] for line in again if line[0] == "step"}
    assert mine.keys() & sums.keys()
    assert all(sums[step] == value for step, value in mine.items() if step in sums), "the groups have one model"
    of_steps: dict[tuple[str, str], list[int]] = {}
    for _, output in running:
        for line in lines(output):
            if line[0] == "step" and line[5] != "nothing":
                of_steps[line[1], line[3]] = list(map(int, line[5].split(",")))
    samples = [sample for batch in of_steps.values() for sample in batch]
    assert len(set(samples)) == len(samples), "none comes twice"
    order = MapLoader(range(100_000), 4, rank=0, world_size=1)
    due = [sample for batch, _ in zip(order, range(len(of_steps) + 2), strict=False) for sample in batch.tolist()]
    left_out = set(due[: len(samples)]) - set(samples)
    assert len(left_out) <= 4, "but for a batch of which the killed group could not tell"
    saved = [int(line[1]) for _, output in running for line in lines(output) if line[0] == "saved"]
    assert sorted(saved) == sorted(set(saved)) == sorted(steps)
