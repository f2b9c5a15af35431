"""`ckptstore fast` on real directories: nothing hides, and nothing is deleted that anybody may still need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckptstore import FastTier, KeepEvery, open_store
from ckptstore.catalogue import job_of
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate, held_by
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.upkeep.node_clear import clear
from ckptstore.extensions.tier.upkeep.node_inventory import take_inventory
from ckptstore.format.changes import Claim, Resumed
from ckptstore.format.layout import MANIFEST_NAME, Attempt
from ckptstore.format.manifest import Manifest
from ckptstore.format.order import SaveOrder
from ckptstore.log.identity import read_identity
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

LOSE = "--yes-lose-what-is-not-durable"


@dataclass
class Node:
    """The disk of a node that has fast checkpoints of the store of `conftest`, as a drain leaves them and without."""

    root: Path
    """Of the store. Step 10 is in its trash, 20 and 30 are live."""
    path: Path

    def disk(self) -> NodeDisk:
        with open_store(self.root) as store:
            return NodeDisk.open(self.path, read_identity(job_of(store).storage) or "", node="a")

    @property
    def store_id(self) -> str:
        return self.disk().storage.local_path("").name

    def drained(self, step: int) -> Attempt:
        """A fast checkpoint that is in the store too, live or in the trash."""
        return self.put(*self.stored(step))

    def only_here(self, step: int, save_number: int) -> Attempt:
        """A fast checkpoint of the same job that was not drained."""
        manifest, _ = self.stored(30)
        return self.put(replace(manifest, step=step, attempt=str(Attempt(step, 1, "0123abcd"))), save_number)

    def stored(self, step: int) -> tuple[Manifest, int]:
        """The manifest in the store, and the number of the save."""
        with open_store(self.root) as store:
            job = job_of(store)
            (entry,) = (record.entry for record in job.log.records([2, 3, 4]) if record.entry.step == step)
            return Manifest.decode(job.storage.read(f"{entry.prefix}{MANIFEST_NAME}")), entry.save_number

    def put(self, manifest: Manifest, save_number: int) -> Attempt:
        with open_store(self.root) as store:
            (claim,) = job_of(store).log.records([1])
        assert isinstance(claim.change, Claim)
        certificate = Certificate(manifest.encode(), save_number, 1, claim.sha256, held_by({"a": [0]}))
        disk, attempt = self.disk(), certificate.attempt
        for receipt in manifest.files:
            disk.storage.write(attempt.key(receipt.name), [memoryview(bytes(receipt.size_bytes))])
        disk.certify(certificate.encode(), ranks=[0])
        return attempt

    def left_there(self) -> list[str]:
        return [str(attempt) for attempt in self.disk().attempts()]


@pytest.fixture
def node(store: Path, tmp_path: Path) -> Node:
    return Node(store, tmp_path / "nvme" / "fast")


def standings(found: Any) -> dict[int, str]:
    return {each["step"]: each["standing"] for each in found["stores"][0]["checkpoints"]}


def test_ls_shows_each_with_what_it_is_to_its_store(run: Any, run_json: Any, node: Node) -> None:
    for step in (10, 20, 30):
        node.drained(step)
    newest = node.only_here(40, 4)
    unfinished = Attempt(50, 1, "0123abcd")
    node.disk().storage.write(unfinished.key("model.pt"), [memoryview(b"torn")])

    (alone,) = run_json("fast", "ls", node.path)["stores"]
    assert {each["standing"] for each in alone["checkpoints"]} == {"unknown"}
    assert (alone["uri"], alone["store_id"]) == (None, node.store_id)
    first, told = alone["checkpoints"][0], {"step": 10, "epoch": 1, "save_number": 1, "ranks": [0], "missing": []}
    assert first.items() >= {**told, "is_certified": True}.items()
    assert first["size_bytes"] > 3002
    assert 0 <= first["age_seconds"] < 600

    found = run_json("fast", "ls", node.path, "--store", node.root)
    assert standings(found) == {10: "void", 20: "durable", 30: "durable", 40: "only-here", 50: "unfinished"}
    swept = {each["step"]: each["swept_because"] for each in found["stores"][0]["checkpoints"]}
    assert (swept[20], swept[30], swept[40], swept[50]) == ("it is in the store", None, None, None)
    assert "removed by record" in swept[10]
    (kept,) = run_json("fast", "ls", node.path, "--store", node.root, "--keep", 9)["stores"]
    assert kept["checkpoints"][1]["swept_because"] is None

    with open_store(node.root) as store:  # a job has gone on from step 30, and what it left behind is void
        log = job_of(store).log
        log.append(lambda _: Claim("token", 1))
        log.append(lambda _: Resumed(2, SaveOrder(1, 3)))
    found = run_json("fast", "ls", node.path, "--store", node.root)
    assert standings(found) == {10: "void", 20: "durable", 30: "durable", 40: "void", 50: "unfinished"}
    text = run("fast", "ls", node.path, "--store", node.root).stdout
    assert f"store {node.store_id} of {node.root}: 5 directories" in text
    assert "certified, durable" in text
    assert "step 40: it is save 4 of epoch 1, and what came of save 3 of epoch 1 takes its place" in text
    assert "step 50: the job would delete it: a save that did not end has left it" in text
    assert str(newest) in node.left_there()


def test_ls_tells_what_is_wrong(run: Any, run_json: Any, node: Node) -> None:
    damaged, short, gone = node.drained(20), node.drained(30), node.only_here(40, 4)
    disk = node.disk()
    for attempt, name in ((damaged, CERTIFICATE_NAME), (short, "model.pt")):
        path = disk.storage.local_path(attempt.key(name))
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-9])
    disk.storage.delete([gone.key("config.json")])
    (listed,) = run_json("fast", "ls", node.path, "--store", node.root)["stores"]
    found = {each["step"]: each for each in listed["checkpoints"]}
    assert "is not valid JSON" in found[20]["fault"]
    assert (found[20]["is_certified"], found[20]["standing"], found[20]["ranks"]) == (False, "durable", [])
    assert (found[30]["ranks"], found[30]["missing"]) == ([], ["model.pt"])
    assert (found[40]["ranks"], found[40]["missing"]) == ([], ["config.json"])
    text = run("fast", "ls", node.path).stdout
    assert "certificate damaged" in text
    assert "certified, 1 files missing" in text
    assert "step 30: not here with its size: model.pt" in text


def test_another_node_of_the_save_lacks_nothing(run_json: Any, node: Node) -> None:
    """The certificate names all nodes; what others hold is not missing here."""
    manifest, _ = node.stored(30)
    first, *others = manifest.files
    split = replace(manifest, world_size=2, files=(first, *(each._replace(rank=1) for each in others)))
    with open_store(node.root) as store:
        (claim,) = job_of(store).log.records([1])
    data = Certificate(split.encode(), 3, 1, claim.sha256, held_by({"a": [0], "b": [1]})).encode()
    disk, attempt = node.disk(), Certificate.decode(data).attempt
    disk.storage.write(attempt.key(first.name), [memoryview(bytes(first.size_bytes))])
    disk.certify(data, ranks=[0])
    (found,) = run_json("fast", "ls", node.path)["stores"][0]["checkpoints"]
    assert (found["ranks"], found["missing"], found["world_size"]) == ([0], [], 2)


def odd_things(node: Node) -> dict[str, Path]:
    """Everything that is no fast checkpoint, below a directory of some."""
    precious = node.path.parent / "precious"
    shutil.copytree(node.root, precious)
    shutil.copytree(node.root, node.path / "run1")  # a store: its checkpoints have the names of attempts
    part = node.path / node.store_id / "checkpoints"
    (node.path / "notes.txt").write_text("mine")
    (node.path / "lost+found").mkdir()
    (node.path / "empty").mkdir()
    (node.path / "link").symlink_to(precious)
    (node.path / "odd\x1b[2J\n").mkdir()
    (part / str(Attempt(7, 1, "0123abcd"))).symlink_to(precious / "checkpoints")
    shutil.copytree(precious / "checkpoints", part / "mine")
    of_a_store = next((precious / "checkpoints").iterdir())
    shutil.copytree(of_a_store, part / str(Attempt(8, 1, "0123abcd")))
    (part / "step-1").write_text("x")
    return {path.as_posix(): path for path in (precious, node.path)}


def everything(path: Path) -> list[tuple[str, bytes | None]]:
    return sorted(
        (str(each), each.read_bytes() if each.is_file() else None) for each in path.rglob("*") if each.name != "lock"
    )


def test_what_is_no_fast_checkpoint_is_told_and_never_touched(run: Any, run_json: Any, node: Node) -> None:
    node.disk()
    odd = odd_things(node)
    before = {name: everything(path) for name, path in odd.items()}
    attempt = node.only_here(40, 4)
    (node.disk().storage.local_path(attempt.prefix.rstrip("/")) / "link").symlink_to(node.path.parent / "precious")
    found = run_json("fast", "ls", node.path)
    whats = {each["name"]: each["what"] for each in found["others"]}
    part = f"{node.store_id}/checkpoints"
    assert whats == {
        "notes.txt": "a file",
        "lost+found": "a directory whose name is the id of no store",
        "odd\x1b[2J\n": "a directory whose name is the id of no store",
        "empty": "a directory without checkpoints/",
        "link": "a symbolic link",
        "run1": "a store, not the fast checkpoints of one",
        f"{part}/{Attempt(7, 1, '0123abcd')}": "a symbolic link",
        f"{part}/{Attempt(8, 1, '0123abcd')}": "a checkpoint of a store: it has ckptstore.json",
        f"{part}/mine": "a directory whose name is that of no attempt",
        f"{part}/step-1": "a file",
    }
    assert "\x1b" not in run("fast", "ls", node.path).stdout
    (left,) = run_json("fast", "clear", node.path, LOSE, code=2)["left"]
    assert (left["attempt"], "is not empty" in left["reason"]) == (str(attempt), True)
    (node.disk().storage.local_path(attempt.prefix.rstrip("/")) / "link").unlink()
    assert run_json("fast", "clear", node.path, LOSE)["left"] == []
    assert {name: everything(path) for name, path in odd.items()} == before


def test_clear_needs_a_store_to_know_what_is_durable(run: Any, run_json: Any, node: Node) -> None:
    every = [str(node.drained(10)), str(node.drained(20)), str(node.drained(30)), str(node.only_here(40, 4))]
    assert run("fast", "clear", node.path, code=2).stderr == "Give --store, to know what is durable\n"
    left = run_json("fast", "clear", node.path, code=2)["left"]
    assert [each["reason"] for each in left] == ["its store was not asked"] * 4
    assert node.left_there() == every
    would = run_json("fast", "clear", node.path, "--store", node.root, "--dry-run", code=2)
    assert [each["attempt"] for each in would["deleted"]] == every[:3]
    assert node.left_there() == every
    done = run_json("fast", "clear", node.path, "--store", node.root, code=2)
    assert done["deleted"] == would["deleted"]
    assert [each["reason"] for each in done["left"]] == ["the store does not have it"]
    assert node.left_there() == every[3:]
    assert LOSE in run("fast", "clear", node.path, "--store", node.root, code=2).stderr
    assert run("fast", "clear", node.path, LOSE).stdout.startswith(f"deleted: {node.store_id}/{every[3]}, ")
    assert node.left_there() == []
    assert run("fast", "clear", node.path, LOSE).stdout == "nothing to delete\n"


def test_clear_takes_one_store_alone(run: Any, run_json: Any, node: Node) -> None:
    node.only_here(40, 4)
    shutil.copytree(node.path / node.store_id, node.path / "other")
    assert "'nosuch'" in run("fast", "clear", node.path, "--store-id", "nosuch", LOSE, code=2).stderr
    found = run_json("fast", "clear", node.path, "--store-id", "other", LOSE)
    assert [each["store_id"] for each in found["deleted"]] == ["other"]
    assert len(node.left_there()) == 1
    shutil.copytree(node.path / node.store_id, node.path / "other", dirs_exist_ok=True)
    found = run_json("fast", "clear", node.path, "--store", node.root, LOSE)
    assert [each["store_id"] for each in found["deleted"]] == [node.store_id]
    assert len([*(node.path / "other").glob("*/step-*")]) == 1


def test_clear_believes_no_record_whose_files_are_gone(run_json: Any, node: Node) -> None:
    older, whole, torn = node.only_here(15, 1), node.drained(20), node.drained(30)
    (node.root / torn.prefix / "model.pt").unlink()
    done = run_json("fast", "clear", node.path, "--store", node.root, code=2)
    assert [each["attempt"] for each in done["deleted"]] == [str(whole)]
    assert [(each["standing"], each["reason"]) for each in done["left"]] == [
        ("superseded", "record 4 has step 30, which is newer, but the store lacks its file model.pt"),
        ("durable", "record 4 has it, but the store lacks its file model.pt"),
    ]
    assert node.left_there() == [str(older), str(torn)]
    (node.root / torn.prefix / "ckptstore.json").unlink()
    left = run_json("fast", "clear", node.path, "--store", node.root, code=2)["left"]
    assert "could not be looked at" in left[1]["reason"]


def test_clear_after_a_job_that_has_ended(run_json: Any, tmp_path: Path) -> None:
    """The last one came into the store when the job ended; the others are of use to nobody."""
    root, path = tmp_path / "run", tmp_path / "fast"
    with open_store(root, fast=FastTier(path, keep=3, drain=KeepEvery(steps=100))) as store:
        for step in (1, 2, 3):
            store.save(step, {"w": torch.ones(1000)})
    found = standings(run_json("fast", "ls", path, "--store", root))
    assert found[3] == "durable"
    assert {found[1], found[2]} <= {"durable", "superseded"}  # the first one was due, and may have given way
    found = run_json("fast", "clear", path, "--store", root)
    assert (len(found["deleted"]), found["left"]) == (3, [])


def test_clear_believes_no_hint_that_is_ahead_of_the_log(run_json: Any, node: Node) -> None:
    node.drained(30)
    log = sorted((node.root / "log").iterdir())
    log[-1].unlink()
    (left,) = run_json("fast", "clear", node.path, "--store", node.root, code=2)["left"]
    assert (left["standing"], left["reason"]) == ("only-here", "the store does not have it")


def test_a_copy_of_the_store_with_another_history_has_no_say(
    run: Any, run_json: Any, node: Node, tmp_path: Path
) -> None:
    node.drained(20)
    other = tmp_path / "other"
    with open_store(other) as store:
        store.save(20, {"x": 1})
    shutil.copy(node.root / "store.json", other / "store.json.new")
    os.replace(other / "store.json.new", other / "store.json")
    found = run_json("fast", "clear", node.path, "--store", other, code=2)
    assert [each["standing"] for each in found["left"]] == ["foreign"]
    told = run("fast", "ls", node.path, "--store", node.root, "--store", other, code=2).stderr
    assert "are one store, or copies" in told


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_clear_refuses_what_others_can_reach(run: Any, run_json: Any, node: Node, depth: int) -> None:
    node.only_here(40, 4)
    part = node.path / node.store_id
    path = [node.path, part, part / "checkpoints"][depth]

    def told(*words: object, code: int) -> str:
        result = run("fast", *words, code=code)
        return str(result.stderr if depth == 0 else result.stdout)

    path.chmod(0o755)
    assert "has mode 755 and lets other users in" in told("clear", node.path, LOSE, code=2)
    listed = run_json("fast", "ls", node.path)
    assert "has mode 755" in (listed if depth == 0 else listed["stores"][0])["privacy_fault"]
    assert len(listed["stores"][0]["checkpoints"]) == 1
    path.chmod(0o700)
    moved = path.rename(node.path.parent / "moved")
    path.symlink_to(moved)
    run("fast", "clear", node.path, LOSE, code=2 if depth != 1 else 0)
    path.unlink()
    moved.rename(path)
    if os.geteuid() == 0:  # who else can give a directory away
        os.chown(path, 12345, -1)
        assert "belongs to user 12345" in told("clear", node.path, LOSE, code=2)
        assert "belongs to user 12345" in told("ls", node.path, code=0)
        os.chown(path, 0, -1)
    assert len(node.left_there()) == 1


def test_a_place_without_a_directory_stays_one(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for command in (("ls",), ("clear", LOSE)):
        assert "There is no directory" in run("fast", *command, tmp_path / "nothing", code=2).stderr
        assert "is no directory" in run("fast", *command, tmp_path / "file", code=2).stderr
    assert not (tmp_path / "nothing").exists()


def test_clear_stops_where_a_later_job_has_come(node: Node) -> None:
    node.only_here(40, 4)
    node.disk().mark_epoch(1)
    inventory = take_inventory(node.path)
    node.disk().mark_epoch(2)
    (left,) = clear(inventory, inventory.stores, {}, lose=True)
    assert "A later job has come" in left.left
    assert len(node.left_there()) == 1


SAVER = """
import sys
import torch
from ckptstore import CkptstoreError, FastTier, open_store

with open_store(sys.argv[1], fast=FastTier(sys.argv[2], keep=1)) as store:
    print("begun", flush=True)
    for step in range(1, 100):
        try:
            store.save(step, {"w": torch.full((1000,), float(step))})
        except CkptstoreError as error:
            print("failed", error.code, error.committed, flush=True)
        else:
            print("saved", step, flush=True)
        if sys.stdin.readline().strip() == "end":
            break
"""


def test_clear_beside_a_job_that_saves(run_json: Any, tmp_path: Path) -> None:
    """The job goes on: a save fails on all its ranks, or is complete; what is certified afterwards is whole."""
    path = tmp_path / "fast"
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process: Any
    with subprocess.Popen([sys.executable, "-c", SAVER, tmp_path / "run", path], text=True, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        told = []
        for _ in range(12):
            process.stdin.write("\n")
            process.stdin.flush()
            if path.exists():
                told_by_clear = CliRunner().invoke(main, ["fast", "clear", str(path), LOSE])
                assert told_by_clear.exit_code in (0, 2), told_by_clear.output
            told.append(process.stdout.readline())
        process.stdin.write("\nend\n")
        process.stdin.close()
        told += process.stdout.readlines()
        assert process.wait(60) == 0, process.stderr.read()
    assert told[-1].startswith("saved")
    assert all(line.startswith("saved") or " False" in line or " None" in line for line in told)
    (store,) = run_json("fast", "ls", path)["stores"]
    (last,) = [each for each in store["checkpoints"] if each["step"] == int(told[-1].split()[1])]
    assert (last["is_certified"], last["missing"], last["fault"], last["ranks"]) == (True, [], "", [0])


def test_ls_and_show_look_at_the_node_too(run: Any, run_json: Any, node: Node) -> None:
    """Step 20 is in the store, 30 on the node too, 40 on the node alone; of 50 a file is missing."""
    node.drained(30)
    node.only_here(40, 40)
    damaged = node.only_here(50, 50)
    next(path for path in node.path.glob(f"*/{damaged.prefix}*") if path.name != CERTIFICATE_NAME).unlink()
    told = run("ls", node.root, "--fast", node.path)
    lines = [line.split() for line in told.stdout.splitlines()]
    assert [line[1] for line in lines[1:3]] == ["20", "30"]
    assert lines[0][4:6] == ["size", "where"]
    assert "store, node" in told.stdout
    assert lines[3][0] == "40"  # no record has a number for it
    assert "node" in lines[3]
    assert "left out: step 50: " in told.stderr
    found = run_json("ls", node.root, "--fast", node.path, "--sort", "-step")["checkpoints"]
    where = [(one["step"], one["is_durable"], one["is_fast"]) for one in found]
    assert where == [(40, False, True), (30, True, True), (20, True, False)]
    assert not any(one["is_fast"] for one in run_json("ls", node.root)["checkpoints"])

    shown = run_json("show", node.root, "--fast", node.path)
    assert (shown["checkpoint"]["step"], shown["checkpoint"]["number"], shown["is_durable"]) == (40, None, False)
    assert all(file["is_here"] for file in shown["files"])
    assert "none, it is on nodes alone" in run("show", f"{node.root}@40", "--fast", node.path).stdout
    assert run_json("show", f"{node.root}@20", "--fast", node.path)["is_durable"]
    run("show", f"{node.root}@60", "--fast", node.path, code=4)
    for arguments in (["ls", node.root], ["show", node.root]):
        assert "no directory" in run(*arguments, "--fast", node.path / "typo", code=2).stderr
    assert "Leave --fast out" in run("show", f"{node.root}@best:loss", "--fast", node.path, code=2).stderr


def test_watch_looks_at_the_node_too(run: Any, run_json: Any, node: Node) -> None:
    node.drained(30)
    level = run_json("watch", node.root, "--once", "--fast", node.path)["on_node"]
    assert (level["step"], level["is_durable"], level["not_durable_seconds"]) == (30, True, None)
    node.only_here(40, 40)
    behind = run_json("watch", node.root, "--once", "--fast", node.path)["on_node"]
    assert (behind["step"], behind["is_durable"]) == (40, False)
    assert behind["not_durable_seconds"] >= behind["age_seconds"] > 0
    assert "the store has been behind for" in run("watch", node.root, "--once", "--fast", node.path).stdout
    assert run_json("watch", node.root, "--once")["on_node"] is None
    node.path.chmod(0o750)
    (note,) = run_json("watch", node.root, "--once", "--fast", node.path)["notes"]
    assert "lets other users in" in note
    run("watch", node.root, "--once", "--fast", node.path / "typo", code=2)


def test_doctor_looks_at_a_directory_for_fast_checkpoints(
    run_json: Any, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "cache" / "mine"))

    def fast(path: Path, *, code: int = 0) -> dict[str, Any]:
        found = run_json("doctor", node.root, "--fast", path, code=code)["findings"]
        return {one["name"].removeprefix("fast "): one for one in found if one["name"].startswith("fast ")}

    node.drained(30)
    node.only_here(40, 40)
    before = sorted(path.name for path in node.path.rglob("*"))
    found = fast(node.path)
    assert set(found) == {"directory", "disk", "locks", "throughput", "checkpoints"}
    assert found["locks"]["status"] == found["checkpoints"]["status"] == "ok"
    assert "the newest of this store is step 40; the store has been behind for" in found["checkpoints"]["detail"]
    assert sorted(path.name for path in node.path.rglob("*")) == before
    next(path for path in node.path.glob("*/checkpoints/step-0000000040*/*") if path.name != CERTIFICATE_NAME).unlink()
    assert fast(node.path)["checkpoints"]["status"] == "warning"
    new = fast(tmp_path / "not" / "there")
    assert list(new) == ["directory"]
    assert "creates it" in new["directory"]["detail"]
    assert not (tmp_path / "not").exists()
    node.path.chmod(0o755)
    assert fast(node.path, code=2)["directory"]["status"] == "failed"
