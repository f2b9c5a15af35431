"""`ckptstore run` without --folder: what it finds, what it says, and what never ends the training."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Start, small

from ckptstore.errors import InvalidInput
from ckptstore.events import Event, listening
from ckptstore.testing.s3_server import Fault
from ckptstore.tools.run import guess
from ckptstore.tools.run.folders import Rules
from ckptstore.tools.run.lock import locked
from ckptstore.tools.run.notices import FolderNotice, TrainerStarted
from ckptstore.tools.run.story import NOTHING_FOUND, AgentPlan, run

pytestmark = pytest.mark.slow


def test_where_there_is_too_much_to_look_at_it_asks_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work/made").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(guess, "_MAX_ENTRIES", 0)
    plan = AgentPlan(store=str(tmp_path / "store"), folder=None, rules=Rules(), interval_seconds=0.1)
    told: list[Event] = []
    with listening(told.append, FolderNotice, TrainerStarted):
        assert run(plan, [*map(str, small("made", 2))]) == 0
        assert run(replace(plan, require_commit=True), ["true"]) == NOTHING_FOUND
    first = told[: len(told) // 2]
    assert [type(event) for event in first] == [TrainerStarted, FolderNotice, FolderNotice], "at the start, and the end"
    assert all("0 files" in str(event) and "--folder" in str(event) for event in first[1:])


def waits_for(agent: Agent, text: str) -> None:
    """Wait until the trainer has said that."""
    until = time.monotonic() + 60
    while text not in agent.output:
        assert agent.process.poll() is None, agent.output
        assert time.monotonic() < until, agent.output
        time.sleep(0.05)


def held(steps: int, begin: Path, end: Path) -> list[object]:
    """A trainer that begins when one file is there, and ends when another one is."""
    words = " ".join(map(str, small("made", steps)))
    wait = "while [ ! -e '{}' ]; do sleep 0.05; done"
    return ["sh", "-c", f"{wait.format(begin)}; {words}; {wait.format(end)}"]


@pytest.mark.parametrize("is_back", [True, False])
def test_a_storage_that_is_away_when_the_folder_is_found(
    start: Start, tmp_path: Path, s3_env: Any, is_back: bool
) -> None:
    server, env = s3_env
    (tmp_path / "work/made").mkdir(parents=True)
    trainer = held(2, tmp_path / "begin", tmp_path / "end")
    grace = [] if is_back else ["--grace", "0.3"]
    agent = start("s3://test/run", None, *grace, trainer=trainer, cwd=tmp_path / "work", env=env)
    agent.saw("TrainerStarted")
    server.faults.add(Fault(action="status", match=".", times=10**6))
    (tmp_path / "begin").touch()
    agent.saw("CommitsDelayed")
    waits_for(agent, "is through")
    if is_back:
        server.faults.replace([])
        (tmp_path / "end").touch()
        assert agent.code() == 0, agent.output
        assert agent.committed == [1, 2]
        return
    agent.process.send_signal(signal.SIGTERM)
    assert agent.code() == 128 + signal.SIGTERM, "the trainer has got it, whatever the storage does"
    assert agent.events("CheckpointsLeft")[0]["names"] == ["checkpoint-1", "checkpoint-2"]
    assert agent.events("RunSummary")[0]["left"] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("required", [False, True])
def test_a_folder_that_another_agent_has_ends_no_training(start: Start, tmp_path: Path, required: bool) -> None:
    (tmp_path / "work/made").mkdir(parents=True)
    flags = ["--require-commit"] if required else []
    with locked(tmp_path / "work/made", node_rank=0):
        agent = start(tmp_path / "store", None, *flags, trainer=small("made", 2), cwd=tmp_path / "work")
        assert agent.code() == (InvalidInput.exit_code if required else 0), agent.output
    assert "is through" in agent.output
    assert "Another agent works on" in agent.events("CommitsDelayed")[0]["error"]
    assert agent.events("CheckpointsLeft")[0]["names"] == ["checkpoint-1", "checkpoint-2"]
