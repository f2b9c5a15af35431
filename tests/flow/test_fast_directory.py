"""Files saved to the disks of the nodes, and whose disks those are."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
from fast_jobs import Jobs
from trees import heard

from ckptstore import CheckpointStore, FastTier, InvalidInput, open_store
from ckptstore.errors import CkptstoreError
from ckptstore.events import FastBypassed
from ckptstore.extensions.tier.nodes import node_disk
from ckptstore.extensions.tier.nodes.arrival import join_arrivals
from ckptstore.extensions.tier.nodes.members import Members


def written(root: Path, step: int, rank: int) -> Path:
    """A directory of a rank; one file has the same name on all of them, one is in a directory."""
    path = root / f"written-{step}-{rank}"
    (path / "parts").mkdir(parents=True)
    (path / "nothing").mkdir()
    (path / "same.bin").write_bytes(os.urandom(1000))
    (path / f"parts/{rank}.bin").write_bytes(b"%d %d" % (step, rank) * 100_000)
    return path


def tree(path: Path) -> dict[str, bytes | None]:
    """Every file and empty directory of a checkpoint, but what ckptstore adds."""
    added = ("fast.json", "ckptstore.json", "parts")
    files = {str(item.relative_to(path)): item.read_bytes() if item.is_file() else None for item in path.rglob("*")}
    return {name: data for name, data in files.items() if name not in added}


def resumed(store: CheckpointStore, _rank: int) -> Any:
    found = store.resume()
    with found.as_directory() as path:
        files = tree(path)
    with store._job.group.meeting("read"):  # one may have read from the other
        return found.step, found.is_durable, files


@pytest.mark.parametrize("copies", [1, 2])
def test_files_are_on_the_nodes_and_come_into_the_store(jobs: Jobs, copies: int) -> None:
    def saved(store: CheckpointStore, rank: int) -> Any:
        for step in (1, 2):
            path = written(jobs.root, step, rank)
            found = store.save_directory(step, path)
            shutil.rmtree(path)
        return found.step, found.kind, found.is_durable

    assert jobs.run("ab", saved, copies=copies) == [(2, "directory", False)] * 2
    with open_store(jobs.root / "store") as store:
        assert store.latest() is None
    if copies == 2:
        shutil.rmtree(jobs.disk("b"))
    first, second = jobs.run("ab", resumed, copies=copies)
    assert first == second
    assert first[:2] == (2, False)
    names = {"same-rank=00000.bin", "same-rank=00001.bin", "parts/0.bin", "parts/1.bin", "nothing"}
    assert first[2].keys() == names
    assert first[2]["parts/1.bin"] == b"2 1" * 100_000

    def drained(store: CheckpointStore, rank: int) -> Any:
        path = written(jobs.root, 3, rank)
        assert not store.save_directory(3, path).is_durable
        shutil.rmtree(path)
        return store.drain(60).is_durable

    assert jobs.run("ab", drained, copies=copies, drain_bytes_per_second=None) == [True] * 2
    shutil.rmtree(jobs.disk("a"))
    for step, is_durable, files in jobs.run("ab", resumed, copies=copies):
        assert (step, is_durable, files.keys()) == (3, True, names)
        assert files["parts/1.bin"] == b"3 1" * 100_000


def test_a_damaged_file_of_a_node_is_told_and_the_one_before_is_taken(jobs: Jobs, skipped: list[str]) -> None:
    def saved(store: CheckpointStore, rank: int) -> None:
        for step in (1, 2):
            store.save_directory(step, written(jobs.root, step, rank))

    jobs.run("ab", saved)
    (jobs.attempts("b")[-1] / "parts/1.bin").unlink()
    assert [found[:2] for found in jobs.run("ab", resumed)] == [(1, False)] * 2
    assert "the files of rank 1" in skipped[0]


def test_links_have_no_digests_and_are_refused(jobs: Jobs) -> None:
    path = written(jobs.root, 1, 0)
    (refused,) = jobs.run("a", lambda store, _: store.save_directory(1, path, link=True))
    assert isinstance(refused, InvalidInput)
    assert "without link" in str(refused)
    assert jobs.attempts("a") == []


@pytest.mark.usefixtures("small_disk")
def test_where_a_disk_is_full_the_files_go_to_the_store(jobs: Jobs) -> None:
    def saved(store: CheckpointStore, rank: int) -> Any:
        large = written(jobs.root, 2, rank)
        (large / "large").write_bytes(bytes(3 << 20))
        steps = [store.save_directory(step, path) for step, path in ((1, written(jobs.root, 1, rank)), (2, large))]
        return [step.is_durable for step in steps]

    with heard(FastBypassed) as told:
        assert jobs.run("ab", saved) == [[False, True]] * 2
    assert {(event.step, event.rank) for event in told} == {(2, 0), (2, 1)}
    assert [found[:2] for found in jobs.run("ab", resumed)] == [(2, True)] * 2


NOBODY = 65534


def save_as_nobody(root: Path, disks: list[str]) -> list[Any]:
    """What a save says with each of these directories, as a user with no rights."""
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    os.environ["CKPTSTORE_CACHE_DIR"] = str(root / "cache")
    found: list[Any] = []
    for number, name in enumerate(disks):
        try:
            with open_store(root / "store", group="solo", fast=FastTier(root / name, node="a")) as store:
                store._deadline.set(0.0)
                found.append(store.save(number, {"w": torch.ones(1000)}).is_durable)
        except CkptstoreError as error:
            found.append((type(error).__name__, str(error)))
    os.seteuid(0)  # to tell it
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users may pass, with one that belongs to nobody."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    root = Path(tempfile.mkdtemp(prefix="ckptstore-users-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


def test_a_directory_of_somebody_else_is_refused(shared: Path) -> None:
    for name, mode, owner in [
        ("store", 0o700, NOBODY),
        ("own", 0o700, NOBODY),
        ("of-root", 0o700, 0),
        ("open-of-root", 0o777, 0),
        ("of-a-group", 0o770, NOBODY),
        ("linked-to", 0o700, NOBODY),
        ("closed", 0o700, 0),
    ]:
        (shared / name).mkdir()
        os.chown(shared / name, owner, owner)
        (shared / name).chmod(mode)
    (shared / "link").symlink_to(shared / "linked-to")
    disks = ["own", "of-root", "open-of-root", "of-a-group", "link", "closed/inner"]
    ((saved, *errors),) = forked_ranks.run_ranks(1, save_as_nobody, shared, disks)
    assert saved is False
    words = ["belongs to user 0", "belongs to user 0", "lets other users in", "symbolic link", "ermission denied"]
    for (kind, text), word in zip(errors, words, strict=True):
        assert word in text
        assert kind in ("InvalidInput", "StorageError", "AccessDenied")
    assert [*(shared / "linked-to").iterdir()] == [*(shared / "open-of-root").iterdir()] == []
    for path in (shared / "own").glob("*"):  # whoever cannot pass this reaches no file below
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_machines_that_were_set_up_alike_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One name, one path, and equal numbers of device and inode: only the boot of the machine differs."""
    found = []
    for boot in ("one", "other"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(node_disk, "_BOOT_ID", tmp_path / boot)
        tier = FastTier(tmp_path / "disk", node="node")
        disk = node_disk.NodeDisk.open(tier.path, "a" * 32, node="node")
        found.append({"identity": disk.identity(), "addresses": []})
    with pytest.raises(InvalidInput, match="Ranks 0 and 1 are on node and were given different directories"):
        join_arrivals(found, Members(("node", "node"), 0), copies=1)
