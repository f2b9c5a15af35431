"""A checkpoint of a folder goes into a store, and back: the same tree, all of it or nothing, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import CheckpointStore, InvalidInput, NoUsableCheckpoint, SourceChanged, open_store
from ckptstore.tools.run.folders import (
    Folder,
    JobSeen,
    Look,
    Rules,
    newest_first,
    restore_folder,
    same,
    save_found,
    set_aside_unfinished,
)
from tests.folders.test_finished_property import tensors, zipped

ALONE = JobSeen(frozenset(), is_started=True)
"""A job of one process: this one."""
BOTH = JobSeen(frozenset([0, 1]), is_started=True)
RULES = Rules(patterns=("mine_*.npz",), marker=".ok")
Tree = Mapping[str, bytes | Path]


def write(folder: Path, tree: Tree) -> None:
    """Files, and links where a path is given; in this order."""
    for name, data in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, Path):
            path.symlink_to(data)
        else:
            path.write_bytes(data)


def tree_of(folder: Path) -> dict[str, bytes | Path]:
    """What is in a folder, but for our own directory."""
    found: dict[str, bytes | Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir():
            found[name] = path.readlink() if path.is_symlink() else path.read_bytes()
    return found


def looked(folder: Folder, job: JobSeen = ALONE) -> Look:
    """What is finished, after two looks."""
    folder.look(job)
    return folder.look(job)


def save_all(store: CheckpointStore, folder: Folder, job: JobSeen = ALONE) -> list[int]:
    """Save all that is finished, the oldest first; the steps."""
    found = looked(folder, job).finished
    for item in found:
        with folder.hold(item) as held:
            save_found(store, item, held)
    return [item.step for item in found]


def restored(store: CheckpointStore, path: Path, *, step: int | None = None, rules: Rules = RULES) -> Any:
    return restore_folder(Folder(path, rules), newest_first(store, step), keeps_newer=step is None)


def trainer(step: int, text: str = "a") -> dict[str, bytes | Path]:
    """With the folders of DeepSpeed, and of FSDP, inside."""
    top = f"checkpoint-{step}"
    log = [{"step": step - 1, "eval_loss": 9}, {"step": step, "loss": 2.5}, {"step": step, "eval_loss": step / 10}]
    return {
        f"{top}/model.safetensors": tensors(text * 50),
        f"{top}/pytorch_model_fsdp_0/__0_0.distcp": text.encode() * 9,
        f"{top}/pytorch_model_fsdp_0/.metadata": b"m",
        f"{top}/global_step{step}/mp_rank_00_model_states.pt": zipped(step, text),
        f"{top}/latest": f"global_step{step}".encode(),
        f"{top}/rng_state.pth": zipped(step, "rng"),
        f"{top}/trainer_state.json": json.dumps({"global_step": step, "log_history": log}).encode(),
    }


def deepspeed(step: int, text: str = "a") -> dict[str, bytes | Path]:
    return {
        f"global_step{step}/mp_rank_00_model_states.pt": zipped(step, text),
        f"global_step{step}/zero_pp_rank_0_mp_rank_00_optim_states.pt": zipped(step, text * 999),
        "latest": f"global_step{step}".encode(),
    }


FINAL = zipped(6, "w", key="iteration")
LOGS = "lightning_logs/version_0/checkpoints"
TREES: dict[str, tuple[int, Tree]] = {
    "transformers": (7, trainer(7)),
    "deepspeed": (8, deepspeed(8)),
    "megatron": (9, {"iter_0000009/mp_rank_00/model.pt": zipped(9, "m"), "latest_checkpointed_iteration.txt": b"9"}),
    "verl": (9, {"global_step_9/actor/model_0.pt": zipped(9, "v"), "latest_checkpointed_iteration.txt": b"9"}),
    "skyrl": (9, {"global_step_9/policy/model_0.pt": zipped(9, "s"), "latest_ckpt_global_step.txt": b"9"}),
    "titan": (5, {"step-5/__0_0.distcp": b"d", "step-5/.metadata": b"m"}),
    "lightning, last a link": (
        6,
        {f"{LOGS}/epoch=1-step=6.ckpt": zipped(6, "w"), f"{LOGS}/last.ckpt": Path("epoch=1-step=6.ckpt")},
    ),
    "lightning, last a copy": (6, {"epoch=1-step=6.ckpt": zipped(6, "w"), "last.ckpt": zipped(6, "w")}),
    "detectron2, the end alone": (6, {"model_final.pth": FINAL, "last_checkpoint": b"model_final.pth"}),
    "detectron2, the end twice": (
        6,
        {"model_0000006.pth": FINAL, "model_final.pth": FINAL, "last_checkpoint": b"model_0000006.pth"},
    ),
    "fairseq, last a copy": (6, {"checkpoint_2_6.pt": zipped(6, "w"), "checkpoint_last.pt": zipped(6, "w")}),
    "pattern, a file": (4, {"mine_4.npz": b"n", "mine_4.npz.ok": b"yes"}),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with open_store(tmp_path / "store", durable=False) as opened:
        yield opened


@pytest.mark.parametrize("shape", TREES)
def test_a_restore_puts_back_the_same_tree(store: CheckpointStore, tmp_path: Path, shape: str) -> None:
    step, tree = TREES[shape]
    write(tmp_path / "out", tree)
    folder = Folder(tmp_path / "out", RULES)
    assert save_all(store, folder) == [step]

    report = restored(store, tmp_path / "new")
    assert report.is_restored
    assert tree_of(tmp_path / "new") == tree
    assert report.fetched_bytes == store[step].size_bytes

    there = Folder(tmp_path / "new", RULES)
    (found,) = looked(there).finished
    assert same(there, found, store[step])
    damaged = next(tmp_path / "new" / name for name, data in tree.items() if isinstance(data, bytes))
    damaged.write_bytes(bytes(byte ^ 1 for byte in damaged.read_bytes()))
    again = restored(store, tmp_path / "new", step=step)
    assert tree_of(tmp_path / "new") == tree
    assert again.fetched_bytes == damaged.stat().st_size
    assert again.kept_bytes == report.fetched_bytes - again.fetched_bytes


def test_metrics_come_from_the_log_of_the_step(store: CheckpointStore, tmp_path: Path) -> None:
    write(tmp_path, trainer(7))
    assert looked(Folder(tmp_path)).finished[0].metrics == {"loss": 2.5, "eval_loss": 0.7}
    given = Folder(tmp_path, Rules(metrics_file="m.json"))
    (tmp_path / "checkpoint-7" / "m.json").write_text('{"acc": 0.5, "name": "x"}')
    assert looked(given).finished[0].metrics == {"acc": 0.5}


def test_the_best_of_a_trainer_comes_too(store: CheckpointStore, tmp_path: Path) -> None:
    """`load_best_model_at_end` looks for it in the folder, and goes on with the last weights where it is not there."""
    newest = trainer(9)
    state = json.loads(bytes(newest["checkpoint-9/trainer_state.json"]))  # type: ignore[arg-type]
    state["best_model_checkpoint"] = "/data/of/another/machine/checkpoint-7"
    newest["checkpoint-9/trainer_state.json"] = json.dumps(state).encode()
    write(tmp_path / "out", {**trainer(7), **trainer(8), **newest})
    assert save_all(store, Folder(tmp_path / "out")) == [7, 8, 9]
    report = restored(store, tmp_path / "new")
    assert report.best == "checkpoint-7"
    assert tree_of(tmp_path / "new") == {**trainer(7), **newest}
    assert report.fetched_bytes == store[7].size_bytes + store[9].size_bytes
    path = store[7].uri + "/model.safetensors"
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    again = restored(store, tmp_path / "third")
    assert (again.best, again.is_restored) == (None, True)
    assert "the best one, step 7" in again.skipped[0]
    assert tree_of(tmp_path / "third") == newest


@pytest.mark.parametrize("has_path", [True, False])
def test_a_tracker_leads_to_what_was_restored(store: CheckpointStore, tmp_path: Path, has_path: bool) -> None:
    """When a checkpoint is looked at, its tracker may lead to the next one. Some write the whole path into it."""
    out, new = tmp_path / "out", tmp_path / "new"
    write(out, {f"epoch_{step}.pth": zipped(step, "a") for step in (1, 2)})
    write(out, {"last_checkpoint": os.fsencode(out / "epoch_2.pth" if has_path else "epoch_2.pth")})
    assert save_all(store, Folder(out)) == [1, 2]
    restored(store, new, step=1)
    assert tree_of(new) == {
        "epoch_1.pth": zipped(1, "a"),
        "last_checkpoint": os.fsencode(new / "epoch_1.pth" if has_path else "epoch_1.pth"),
    }


def test_a_copy_that_was_restored_can_be_written_into(store: CheckpointStore, tmp_path: Path) -> None:
    """fairseq and Coqui write the next state into it."""
    _, tree = TREES["fairseq, last a copy"]
    write(tmp_path / "out", {**tree, "checkpoint_best.pt": zipped(6, "W")})
    save_all(store, Folder(tmp_path / "out"))
    restored(store, tmp_path / "new")
    write(tmp_path / "new", {"checkpoint_last.pt": zipped(7, "w")})
    assert tree_of(tmp_path / "new") == {**tree, "checkpoint_last.pt": zipped(7, "w")}


def test_what_is_finished_and_newer_stays(store: CheckpointStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, deepspeed(8))
    save_all(store, Folder(out))
    write(out, deepspeed(9))
    before = tree_of(out)
    report = restored(store, out)
    assert not report.is_restored
    assert "global_step9" in report.why_not
    assert tree_of(out) == before

    forced = restored(store, out, step=8)
    assert tree_of(out) == deepspeed(8)
    (moved,) = forced.moved_aside
    aside = out / moved.partition(" → ")[2]
    assert (aside / "global_step9/mp_rank_00_model_states.pt").read_bytes() == zipped(9, "a")


def test_what_is_unfinished_goes_aside_when_a_newer_one_stays(store: CheckpointStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, deepspeed(8))
    save_all(store, Folder(out))
    write(out, deepspeed(9))
    assert looked(Folder(out)).finished[-1].step == 9
    write(out, {"global_step10/mp_rank_00_model_states.pt": b"PK", "latest": b"global_step10"})
    report = restored(store, out)
    assert (report.is_restored, len(report.moved_aside)) == (False, 1)
    assert tree_of(out) == {**deepspeed(8), **deepspeed(9)}


def test_what_an_agent_found_finished_is_so_for_fewer_ranks_too(store: CheckpointStore, tmp_path: Path) -> None:
    """The job went on with one process in place of two, and its newest checkpoint was not committed."""
    out = tmp_path / "out"
    of_two = {"checkpoint-7/rng_state_1.pth": zipped(7, "x"), "checkpoint-7/rng_state_0.pth": zipped(7, "x")}
    write(out, {**of_two, **trainer(7)})
    assert save_all(store, Folder(out), BOTH) == [7]
    write(out, trainer(9))
    assert looked(Folder(out)).finished[-1].step == 9
    before = tree_of(out)
    report = restored(store, out)
    assert (report.is_restored, report.moved_aside) == (False, ())
    assert tree_of(out) == before


def test_a_tag_that_is_named_before_all_ranks_have_written_goes_aside(store: CheckpointStore, tmp_path: Path) -> None:
    """DeepSpeed's rank 0 writes `latest` and waits for the others only then: a kill in between leaves a tag that its
    own loader would take, and fail on."""
    out = tmp_path / "out"
    whole = {**deepspeed(8), "global_step8/zero_pp_rank_1_mp_rank_00_optim_states.pt": zipped(8, "b")}
    write(out, whole)
    assert save_all(store, Folder(out), BOTH) == [8]
    write(out, deepspeed(9))
    report = restored(store, out)
    assert report.is_restored, report.why_not
    assert tree_of(out) == whole


def test_what_is_unfinished_goes_aside(store: CheckpointStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, trainer(7))
    save_all(store, Folder(out))
    torn = {name: data for name, data in trainer(9).items() if not name.endswith("trainer_state.json")}
    write(out, torn)
    report = restored(store, out)
    assert report.is_restored
    assert tree_of(out) == trainer(7)
    assert "/aside/" in report.moved_aside[0]


@pytest.mark.parametrize("begun", [(), ("config.json",), ("config.json", "generation_config.json")])
def test_what_has_hardly_begun_goes_aside(store: CheckpointStore, tmp_path: Path, begun: tuple[str, ...]) -> None:
    """A Trainer takes a directory by its name alone."""
    out = tmp_path / "out"
    write(out, trainer(7))
    save_all(store, Folder(out))
    (out / "checkpoint-9").mkdir()
    write(out, {f"checkpoint-9/{name}": b"{" for name in begun})
    report = restored(store, out)
    assert "/aside/" in report.moved_aside[0]
    assert not (out / "checkpoint-9").exists()


def test_without_a_checkpoint_in_the_store_what_was_begun_since_goes_aside(tmp_path: Path) -> None:
    out = tmp_path / "out"
    torn = {name: data for name, data in trainer(3).items() if not name.endswith("trainer_state.json")}
    write(out, torn)
    os.utime(out / "checkpoint-3", (1.7e9, 1.7e9))
    assert Folder(out).first_worked_ns() is None, "nobody has worked here before"
    since_ns = Folder(out).first_worked_ns()
    assert since_ns is not None
    assert set_aside_unfinished(Folder(out), since_ns=since_ns) == (), "a user has laid it there"
    (out / "checkpoint-5").mkdir()
    write(out, {**trainer(4), "custom/checkpoint-6/state.json": b"of another framework"})
    (moved,) = set_aside_unfinished(Folder(out), since_ns=since_ns)
    assert moved.startswith("checkpoint-5 → ")
    assert tree_of(out) == {**torn, **trainer(4), "custom/checkpoint-6/state.json": b"of another framework"}


def test_a_checkpoint_that_was_written_anew_stays(store: CheckpointStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, trainer(7))
    save_all(store, Folder(out))
    write(out, trainer(7, text="b"))
    report = restored(store, out)
    assert "written anew" in report.why_not
    assert tree_of(out) == trainer(7, text="b")


def test_a_damaged_checkpoint_is_passed_over(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (7, 8):
        write(tmp_path / f"out{step}", trainer(step))
        save_all(store, Folder(tmp_path / f"out{step}"))
    path = Path(store[8].uri.removeprefix("file://")) / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(bytes(len(path.read_bytes())))
    report = restored(store, tmp_path / "new")
    assert report.step == 7
    assert "step 8" in report.skipped[0]
    assert tree_of(tmp_path / "new") == trainer(7)
    with pytest.raises(NoUsableCheckpoint, match="step 8"):
        restored(store, tmp_path / "other", step=8)
    assert tree_of(tmp_path / "other") == {}


def test_what_was_restored_is_whole_where_the_folder_alone_was_lost(store: CheckpointStore, tmp_path: Path) -> None:
    rules = Rules(patterns=("mine_*",), quiet_seconds=1e-6)
    write(tmp_path / "out", {"mine_1/weights": b"in a form that does not show its end"})
    assert save_all(store, Folder(tmp_path / "out", rules)) == [1]
    shutil.rmtree(tmp_path / "out")
    folder = Folder(tmp_path / "out", rules)  # what was found finished is known beside it, with other times
    assert restore_folder(folder, newest_first(store, None)).step == 1
    look = looked(folder)
    assert [found.name for found in look.finished] == ["mine_1"]
    assert not look.unfinished


def test_an_empty_store_restores_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    assert restored(store, tmp_path / "new") is None


def test_hostile_metadata_are_refused(store: CheckpointStore, tmp_path: Path) -> None:
    lie = {"beside": {"last.ckpt": {"link": "../../outside"}}}
    write(tmp_path / "out", trainer(7))
    folder = Folder(tmp_path / "out")
    (found,) = looked(folder).finished
    told = {"folder": {**found.metadata(tmp_path)["folder"], **lie}}
    with folder.hold(found) as held:
        save_found(store, found, held, metadata=told)
    before = tree_of(tmp_path)
    with pytest.raises(NoUsableCheckpoint, match="where it lay"):
        restored(store, tmp_path / "new")
    assert {name for name in tree_of(tmp_path) if not name.startswith("new/")} == set(before)
    assert tree_of(tmp_path / "new") == {}


def test_nothing_is_written_behind_a_link(store: CheckpointStore, tmp_path: Path) -> None:
    tree = TREES["lightning, last a link"][1]
    write(tmp_path / "out", tree)
    save_all(store, Folder(tmp_path / "out"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "lightning_logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="is a link"):
        restored(store, tmp_path / "new")
    assert list((tmp_path / "elsewhere").iterdir()) == []


KILLED = """
import os, signal, sys
from ckptstore import open_store
from ckptstore.tools.run.folders import Folder, newest_first, restore_folder, set_aside_unfinished
folder, left = Folder(sys.argv[2]), int(sys.argv[3])
store = open_store(sys.argv[1], durable=False)
def hook(event, arguments):
    global left
    if event in ("os.rename", "os.link") and sys.argv[2] in str(arguments[0]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
restore_folder(folder, newest_first(store))
"""


def test_a_restore_that_is_killed_leaves_no_half(store: CheckpointStore, tmp_path: Path) -> None:
    """At every rename and link, over a damaged checkpoint and an unfinished newer one."""
    whole, out = deepspeed(8), tmp_path / "new"
    write(tmp_path / "out", whole)
    save_all(store, Folder(tmp_path / "out"))
    codes = []
    for count in range(20):
        write(out, {name: data for name, data in whole.items() if "model" in name})
        write(out, {"global_step9/mp_rank_00_model_states.pt": b"PK\x03\x04"})
        words = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(out), str(count)]
        codes.append(subprocess.run(words, check=False).returncode)
        there = tree_of(out)
        if "latest" in there:  # then a framework reads what it names
            assert {name: there[name] for name in whole} == whole
        if codes[-1] == 0:
            break
    assert set(codes) == {0, -signal.SIGKILL}
    assert len(codes) > 3
    assert tree_of(out) == whole
    assert not list((out.parent / f".ckptstore-{out.name}").glob("restoring/*"))


def test_a_hold_outlives_the_trainers_deletion_and_sees_a_rewrite(store: CheckpointStore, tmp_path: Path) -> None:
    write(tmp_path / "out", trainer(7))
    folder = Folder(tmp_path / "out")
    (found,) = looked(folder).finished
    with folder.hold(found) as held:
        (tmp_path / "out/checkpoint-7").rename(tmp_path / "gone")
        held.check({})
        with (tmp_path / "gone/model.safetensors").open("r+b") as file:
            file.write(b"x")
        with pytest.raises(SourceChanged):
            save_found(store, found, held)
    assert len(store) == 0
    with pytest.raises(SourceChanged):
        folder.hold(found)
    assert not list((folder.own / "held").iterdir())


def test_what_is_in_use_or_has_changed_is_not_deleted(tmp_path: Path) -> None:
    write(tmp_path, trainer(7))
    folder = Folder(tmp_path)
    (found,) = looked(folder).finished
    with (tmp_path / "checkpoint-7/model.safetensors").open("rb"):
        assert not folder.delete(found)
    assert tree_of(tmp_path) == trainer(7)
    (tmp_path / "checkpoint-7/more").write_bytes(b"")
    assert not folder.delete(found)
    with pytest.raises(SourceChanged):  # what is saved is what was looked at, or nothing
        folder.hold(found)
    (tmp_path / "checkpoint-7/more").unlink()
    assert folder.delete(found)
    assert tree_of(tmp_path) == {}


def test_second_names_of_a_file_come_back_with_it(store: CheckpointStore, tmp_path: Path) -> None:
    """timm has the newest epoch in `last.pth.tar`, and a number for it only if it is among the best."""
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    torch.save({"epoch": 3}, out / "checkpoint-3.pth.tar")
    for name in ("last.pth.tar", "model_best.pth.tar"):
        os.link(out / "checkpoint-3.pth.tar", out / name)
    assert save_all(store, Folder(out, RULES)) == [3]
    assert looked(Folder(out, RULES)).unknown == ()
    assert restored(store, new).fetched_bytes == (out / "checkpoint-3.pth.tar").stat().st_size
    assert tree_of(new) == tree_of(out)

    (out / "checkpoint-3.pth.tar").unlink()
    (out / "last.pth.tar").unlink()
    torch.save({"epoch": 6}, out / "last.pth.tar")
    assert save_all(store, Folder(out, RULES)) == [6]
    assert restored(store, new).name == "last.pth.tar"
    assert torch.load(new / "last.pth.tar") == {"epoch": 6}
    assert torch.load(new / "model_best.pth.tar") == {"epoch": 3}
