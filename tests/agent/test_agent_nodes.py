"""Agents of several nodes: one checkpoint with the files of all, and one step that all go on from."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from agents import Start, small

from ckptstore import open_store
from ckptstore.errors import InvalidInput, StoreFenced
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.tools.run.nodes import Nodes, find_nodes
from ckptstore.tools.run.rounds import LONELY_SECONDS, NodeOffer, NodeView, choose
from ckptstore.tools.run.story import AgentPlan, watch

pytestmark = pytest.mark.slow


def nodes(
    start: Start, run_id: str, store: Path, folders: list[Path], *trainers: list[object], interval: str = "0.1"
) -> list[str]:
    """Run an agent on each node; what each trainer and agent said."""
    common = ["--nodes", len(folders), "--run-id", run_id, "--interval", interval]
    agents = [
        start(store, folder, *common, "--node-rank", rank, trainer=trainer)
        for rank, (folder, trainer) in enumerate(zip(folders, trainers, strict=True))
    ]
    assert [agent.code() for agent in agents] == [0] * len(agents), [agent.output for agent in agents]
    return [agent.output for agent in agents]


def test_disks_of_their_own(start: Start, tmp_path: Path) -> None:
    store, first, second = tmp_path / "store", tmp_path / "node0", tmp_path / "node1"
    own = [small(folder, 3, "--name", name) for folder, name in ((first, "a.bin"), (second, "b.bin"))]
    nodes(start, "one", store, [first, second], *own)
    with open_store(store) as opened:
        for step in (1, 2, 3):
            checkpoint = opened[step]
            assert checkpoint.verify().ok
            assert {file.name for file in checkpoint.files} >= {"a.bin", "b.bin", "model.bin", "trainer_state.json"}
            assert checkpoint.world_size == 2
    shutil.rmtree(second)
    shutil.copytree(first / "checkpoint-3", first / "checkpoint-4")  # that node alone, and not whole
    (first / "checkpoint-4/trainer_state.json").write_text('{"global_step": 4, "log_history": []}')
    said = nodes(start, "two", store, [first, second], *own)
    assert all("begins at 3" in output for output in said), said
    assert (second / "checkpoint-3/a.bin").exists()
    with open_store(store) as opened:
        assert [checkpoint.step for checkpoint in opened] == [1, 2, 3, 4, 5, 6]
    for folder, step in ((first, 7), (second, 7), (second, 8)):  # the store has neither, and one node not the last
        shutil.copytree(folder / "checkpoint-6", folder / f"checkpoint-{step}")
        (folder / f"checkpoint-{step}/trainer_state.json").write_text(f'{{"global_step": {step}, "log_history": []}}')
    for folder in (first, second):  # the agents have seen them before they were killed
        seen = Folder(folder, Rules())
        for _ in range(2):
            seen.look(JobSeen(None, is_started=True, is_alive=False, ended_well=True))
    said = nodes(start, "three", store, [first, second], *own)
    assert all("begins at 7" in output for output in said), said
    assert list((tmp_path / ".ckptstore-node1/aside").glob("*/checkpoint-8")) or "checkpoint-8 →" in said[1]
    with open_store(store) as opened:
        assert [checkpoint.step for checkpoint in opened] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_folder_that_all_share(start: Start, tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "shared"
    nodes(start, "one", store, [folder, folder], small(folder, 3), ["sleep", "1"])
    with open_store(store) as opened:
        assert [checkpoint.step for checkpoint in opened] == [1, 2, 3]
        assert {file.rank for checkpoint in opened for file in checkpoint.files} == {0, 1}
    late = f"cd {folder}; cp -r checkpoint-3 .4; rm .4/trainer_state.json; mv .4 checkpoint-4; sleep 3; "
    late += "echo '{\"global_step\": 4}' >checkpoint-4/trainer_state.json"  # after the first node's last look at it
    nodes(start, "two", store, [folder, folder], ["sleep", "1"], ["sh", "-c", late], interval="60")
    with open_store(store) as opened:
        assert [checkpoint.step for checkpoint in opened] == [1, 2, 3, 4]


def test_a_node_that_writes_nothing(start: Start, tmp_path: Path) -> None:
    """It is waited for once, since its first checkpoint might be late."""
    store, first, second = tmp_path / "store", tmp_path / "node0", tmp_path / "node1"
    seconds = LONELY_SECONDS + 5
    nodes(start, "one", store, [first, second], small(first, 3, "--pause", seconds / 3), ["sleep", f"{seconds}"])
    with open_store(store) as opened:
        assert [checkpoint.step for checkpoint in opened] == [1, 2, 3]


def test_a_watched_folder(start: Start, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    assert start(tmp_path / "other", out, trainer=small(out, 3)).code() == 0
    once = start(store, out, "--once", "--quiet", "0.5", "--pattern", "step_*")
    assert once.code() == 0
    assert once.committed == [1, 2, 3]
    watching = start(store, out, "--quiet", "0.5")
    watching.saw("FolderWatched")
    time.sleep(0.5)
    (out / "checkpoint-3").rename(out / "checkpoint-3-away")
    shutil.copytree(out / "checkpoint-3-away", out / "checkpoint-5")
    (out / "checkpoint-5/trainer_state.json").write_text('{"global_step": 5, "log_history": []}')
    assert watching.saw("CheckpointCommitted")["step"] == 5
    watching.process.send_signal(signal.SIGTERM)
    assert watching.code() == 128 + signal.SIGTERM
    assert watching.committed == [5]
    assert start(store, out, "--once").code() == 0


def test_a_watch_that_can_commit_nothing_more_ends_with_that_error(start: Start, tmp_path: Path) -> None:
    """A supervisor would take 0 for a watch that has done its work."""
    store, out = tmp_path / "store", tmp_path / "out"
    assert start(tmp_path / "other", out, trainer=small(out, 2)).code() == 0
    (out / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    watching = start(store, out)
    watching.saw("CheckpointCommitted", step=1)
    with open_store(store, group="solo") as newer:
        newer.resume()
    (tmp_path / "checkpoint-2").rename(out / "checkpoint-2")
    assert watching.code() == StoreFenced.exit_code, watching.output
    assert watching.events("CheckpointsLeft")[0]["names"] == ["checkpoint-2"]


def test_a_watch_whose_thread_has_failed_ends_with_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no error of ours")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Committer, "_round", fails)
    plan = AgentPlan(store=str(tmp_path / "store"), folder=tmp_path / "out", rules=Rules(), interval_seconds=0.1)
    assert watch(plan, once=False) == 1


def test_the_oldest_comes_first_and_all_nodes_must_have_it() -> None:
    one, two, three = (NodeOffer(name=f"step-{step}", step=step) for step in (1, 2, 3))
    assert choose([NodeView(offers=(two, one)), NodeView(offers=(one, two))]) == one
    assert choose([NodeView(offers=(one, two)), NodeView(offers=(two,), unfinished=("step-1",))]) == two
    assert choose([NodeView(offers=(one,)), NodeView(unfinished=("step-1",))]) is None
    assert choose([NodeView(offers=(one,)), NodeView(committed=("step-0",))]) is None
    assert choose([NodeView(offers=(one,)), NodeView(committed=("step-1",))]) == one
    assert choose([NodeView(offers=(one, two, three)), NodeView(offers=(one, two), is_hurried=True)]) == two
    assert choose([]) is None
    assert choose([NodeView(offers=(one,)), NodeView()]) is None
    assert choose([NodeView(offers=(one,)), NodeView(has_ended=True)]) == one
    told, behind = (
        NodeOffer(name="step-1", step=1, tells_all=True),
        {"unfinished": ("step-1",), "uncertain": ("step-1",)},
    )
    assert choose([NodeView(offers=(told,)), NodeView(**behind)]) == told
    assert choose([NodeView(offers=(one,)), NodeView(**behind)]) is None
    waited = NodeOffer(name="step-1", step=1, waits_seconds=LONELY_SECONDS)
    assert choose([NodeView(offers=(waited,)), NodeView()]) == waited
    view = NodeView(offers=(waited, two), unfinished=("x",))
    assert NodeView.from_json(asdict(view)) == view


def test_a_node_knows_where_it_is() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "3"}
    assert find_nodes(None, None, None, {}) == Nodes()
    assert find_nodes(None, None, None, slurm) == Nodes(4, 3, "slurm-7-0")
    assert find_nodes(None, None, None, {**slurm, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}).count == 4
    assert find_nodes(1, None, None, slurm) == Nodes()
    assert find_nodes(None, None, None, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4"}) == Nodes()
    launcher = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ID": "x"}
    assert find_nodes(None, None, None, launcher) == Nodes(2, 1, "x")
    assert find_nodes(None, None, "y", launcher) == Nodes(2, 1, "y")
    assert find_nodes(3, 2, "z", {}) == Nodes(3, 2, "z")
    for given, environ in [
        ((2, None, "x"), {}),
        ((2, 0, None), {}),
        ((2, 2, "x"), {}),
        ((0, 0, "x"), {}),
        ((None, 1, None), {}),
        ((None, None, None), {**slurm, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}),
        ((None, None, None), {"LOCAL_WORLD_SIZE": "8"}),
    ]:
        with pytest.raises(InvalidInput):
            find_nodes(*given, environ)
