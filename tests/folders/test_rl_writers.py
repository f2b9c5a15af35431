"""Trainers for reinforcement learning write in orders of their own: half of something is never committed."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.tools.run.folders import Folder, JobSeen, Rules, newest_first, restore_folder
from tests.folders.rl_writers import RL_KINDS, SKYRL_TRACKER, VERL_TRACKER
from tests.folders.test_finished_property import zipped
from tests.folders.writers import World, play

BESIDE = {
    kind: {SKYRL_TRACKER if "skyrl" in kind else VERL_TRACKER: "{step}"}
    for kind in RL_KINDS
    if kind.startswith(("verl", "skyrl", "slime"))
}
"""The other files that a restore leaves, by kind."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # The writers open files of this process and map none: what it and others have mapped would take most of the time.
    monkeypatch.setattr(import_module("ckptstore.tools.run.folders.open_files"), "pids", lambda: [os.getpid()])
    monkeypatch.setattr(import_module("ckptstore.tools.run.folders.open_files"), "_mappings", lambda *_: ())


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 14), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("kind", RL_KINDS)
def test_what_is_committed_was_whole_and_comes_back_with_its_tracker(tmp_path: Path, kind: str, seeds: range) -> None:
    commits = 0
    for seed in seeds:
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            world = play(place, seed, kind)
            world.check()
            commits += len(world.commits)
            if world.commits:
                check_restored(world, place / "new")
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert commits or len(seeds) == 2


def check_restored(world: World, new: Path) -> None:
    """Restore the newest one into an empty folder: its files, the tracker that names it, and what lay beside it."""
    with open_store(world.store, durable=False, group="solo") as store:
        report = restore_folder(Folder(new, world.rules), newest_first(store))
    assert report is not None
    found = {str(path.relative_to(new)): path.read_bytes() for path in new.rglob("*") if path.is_file()}
    own = {name: found.pop(name) for name in sorted(found) if name.startswith(f"{report.name}/")}
    assert own in world.wholes[report.name]
    (step,) = (step for step in range(99) if world.kind.name(step) == report.name)
    beside = {file: text.replace("{step}", str(step)) for file, text in BESIDE.get(world.kind_name, {}).items()}
    assert {file: data.decode() for file, data in found.items() if not file.startswith("rollout/")} == beside
    assert [file for file in found if file.startswith("rollout/")] == [
        glob.replace("{step}", str(step)) for glob in world.rules.beside
    ]


def test_parts_that_are_gone_replace_nothing(tmp_path: Path) -> None:
    """With one kept, verl deletes the actor of the last checkpoint while the tracker names it, and then writes the
    critic of the next one for minutes."""
    world = World(tmp_path, 0, kind_name="verl")
    out = world.folder
    write_all(out, fsdp_files("global_step_1/actor/"), fsdp_files("global_step_1/critic/"))
    (out / "global_step_1/data.pt").write_bytes(zipped(1, "data"))
    (out / VERL_TRACKER).write_text("1")
    world.round()
    world.round()
    assert world.commits == [1]
    for path in (out / "global_step_1/actor").iterdir():
        path.unlink()
        world.round()
        world.round()
    for is_alive in (True, False):
        world.is_alive = is_alive
        world.start_agent()  # it has forgotten what it stored
        world.round()
        world.round()
    assert world.commits == [1]
    (out / "global_step_1/critic/optim_world_size_1_rank_0.pt").write_bytes(zipped(1, "another"))
    world.round()
    world.round()
    assert world.commits == [1], "a part of it alone was written again"
    world.stop_agent()


def test_sft_on_torchtitan_leaves_its_model_elsewhere_and_is_never_taken_without_it(tmp_path: Path) -> None:
    write_all(tmp_path, {"global_step_3/data_0.pt": zipped(3, "data"), VERL_TRACKER: b"3"})
    folder = Folder(tmp_path)
    job = JobSeen(frozenset(), is_started=True, is_alive=False, ended_well=True)
    folder.look(job)
    assert list(folder.look(job).unfinished) == ["global_step_3"]


def test_a_prime_rl_step_needs_what_both_programs_write(tmp_path: Path) -> None:
    """The trainer's `.metadata` is there, and its last file: only the orchestrator's progress is missing."""
    trainer = {"trainer/__0_0.distcp": b"shard", "trainer/.metadata": b"m"}
    write_all(tmp_path, {f"step_3/{name}": data for name, data in trainer.items()})
    write_all(tmp_path, {"step_3/orchestrator/buffer.json": b"{}"})
    folder = Folder(tmp_path, Rules(quiet_seconds=1e-9))
    job = JobSeen(frozenset(), is_started=True, is_alive=False, ended_well=True)
    folder.look(job)
    (why,) = folder.look(job).unfinished.values()
    assert why == "orchestrator/progress.pt is not there yet"
    write_all(tmp_path, {"step_3/orchestrator/progress.pt": zipped(3, "progress")})
    folder.look(job)
    assert [found.name for found in folder.look(job).finished] == ["step_3"]


def write_all(folder: Path, *trees: dict[str, bytes]) -> None:
    for name, data in [item for tree in trees for item in tree.items()]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def fsdp_files(part: str) -> dict[str, bytes]:
    files = {f"{part}{what}_world_size_1_rank_0.pt": zipped(1, what) for what in ("model", "optim", "extra_state")}
    return {**files, f"{part}fsdp_config.json": b"{}"}
