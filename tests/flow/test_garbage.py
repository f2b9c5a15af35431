"""What garbage collection takes, and what it leaves: what is live, what is linked in, and what it cannot tell."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from trees import everything, make_tree, moved_away, save_tree, steps

from ckptstore import StoreMissing, open_store
from ckptstore.format.changes import Claim
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.upkeep.garbage import collect_garbage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one checkpoint, of its first job."""
    with open_store(tmp_path / "store") as store:
        save_tree(store, tmp_path, 1)
    return tmp_path / "store"


def leave_an_attempt(root: Path, name: str) -> Path:
    return make_tree(root / "checkpoints" / name, {"f": b"torn", "sub/g": b"torn"})


def test_garbage_is_what_a_superseded_job_left(root: Path) -> None:
    older = leave_an_attempt(root, "step-0000000005-e0000-0123abcd")
    own = leave_an_attempt(root, "step-0000000005-e0001-0123abcd")
    foreign = leave_an_attempt(root, "what-is-this")
    with open_store(root) as store:
        planned = store.collect_garbage(dry_run=True)
        assert list(planned.attempts) == [older.name]
        assert older.exists()
        found = store.collect_garbage()
        assert (found.attempts, found.left) == (planned.attempts, planned.left)
        assert set(found.left) == {f"checkpoints/{own.name}", f"checkpoints/{foreign.name}"}
        assert [path.exists() for path in (older, own, foreign)] == [False, True, True]
    with open_store(root) as other:
        assert list(other.collect_garbage(claim=True).attempts) == [own.name]
        assert foreign.exists()
        assert steps(other) == [1]
        assert other[1].verify().ok


class BareDisk(LocalStorage):
    """A disk that cannot create-if-absent."""

    create = None


@pytest.mark.parametrize(
    ("data", "is_bare", "why"),
    [
        ('"store_id":"another"', False, "it belongs to the store another"),
        ("{", False, "its manifest cannot be read"),
        ("", True, "the log may have lost its record"),
    ],
)
def test_it_leaves_what_it_cannot_tell(root: Path, data: str, is_bare: bool, why: str) -> None:
    (saved,) = (root / "checkpoints").iterdir()
    unnamed = saved.with_name("step-0000000009-e0001-0123abcd")
    shutil.copytree(saved, unnamed)
    manifest = unnamed / "ckptstore.json"
    manifest.chmod(0o600)
    if data:
        manifest.write_text(re.sub('"store_id":"[^"]*"', data, manifest.read_text()) if data != "{" else data)
    with open_store(root) as store:
        store.resume()
        storage = BareDisk(root) if is_bare else store._job.storage
        left = collect_garbage(store._job.log, storage).left
    assert why in left[f"checkpoints/{unnamed.name}"]
    assert unnamed.exists()


@pytest.mark.parametrize("linked", ["attempt", "inside", "checkpoints"])
def test_it_leaves_what_is_linked_in(root: Path, tmp_path: Path, linked: str) -> None:
    old = leave_an_attempt(root, "step-0000000005-e0000-0123abcd")
    path = {"attempt": old, "inside": old / "sub", "checkpoints": root / "checkpoints"}[linked]
    elsewhere = moved_away(path, tmp_path / "elsewhere")
    before = everything(elsewhere)
    with open_store(root) as store:
        planned, found = store.collect_garbage(dry_run=True), store.collect_garbage()
    assert everything(elsewhere) == before
    assert path.is_symlink()
    assert "symbolic link" in found.left[f"checkpoints/{old.name}"]
    assert found.attempts == {}
    assert linked == "inside" or planned == found


def test_it_believes_the_log_and_no_hint(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "ahead")
    for _ in range(3):
        with open_store(tmp_path / "ahead") as other:
            other.resume()
    with open_store(root) as store:
        save_tree(store, tmp_path, 2)
    (root / "latest.json").unlink()
    shutil.copyfile(tmp_path / "ahead/latest.json", root / "latest.json")
    with open_store(root) as other:
        assert other.collect_garbage().attempts == {}
        assert steps(other) == [1, 2]
        assert other[2].verify().ok


def marks(root: Path, token: str) -> Path:
    """What ranks left more than an hour ago."""
    path = make_tree(root / "group" / token, {"member.00000": b"1", "life.00001": b"."})
    for file in path.iterdir():
        os.utime(file, (0, time.time() - 7200))
    return path


def test_messages_go_when_their_job_was_superseded_and_not_by_a_clock(root: Path) -> None:
    with open_store(root) as store:
        for token in ("job-1", "job-10", "job-2", "job-3"):
            store._job.log.append(lambda _newest, token=token: Claim(token, 2))
        old, live, reader = marks(root, "job-1~2"), marks(root, "job-3~2"), marks(root, "eval-1")
        young = make_tree(root / "group/job-10", {"member.00000": b"1"})
        (root / "group/gone").mkdir()
        os.utime(root / "group/gone", (0, 0))
        found = store.collect_garbage()
        assert found.exchanges == ["group/job-1~2/"]
        assert list(found.left) == ["group/eval-1/", "group/gone/"]  # perhaps of readers
        assert (old.exists(), live.exists(), reader.exists(), young.exists()) == (False, True, True, True)
        found = store.collect_garbage(claim=True)
        assert found.exchanges == ["group/eval-1/", "group/gone/", "group/job-3~2/"]
        assert not (root / "group/gone").exists()


@pytest.mark.parametrize("directory", ["", "log", "leases", "cursors", "group/gone"])
def test_it_removes_what_a_killed_writer_left_and_nothing_of_a_living_one(root: Path, directory: str) -> None:
    names = {age: root / directory / f".ckptstore-tmp-{age}-0123456789abcdef" for age in (60, 7200)}
    (root / directory).mkdir(parents=True, exist_ok=True)
    for age, path in names.items():
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    with open_store(root) as store:
        key = str(names[7200].relative_to(root))
        assert store.collect_garbage(dry_run=True).unfinished == [key]
        assert names[7200].exists()
        assert store.collect_garbage().unfinished == [key]
        assert [path.exists() for path in names.values()] == [True, False]
        assert store[1].verify().ok


def test_it_removes_the_lease_of_a_reader_that_was_killed(root: Path) -> None:
    make_tree(root / "leases", {"0000000002-here-1-00000000.json": b"{}", "0000000002-here-2-00000000.json": b"{}"})
    os.utime(root / "leases/0000000002-here-1-00000000.json", (0, 0))
    with open_store(root) as store:
        store.collect_garbage()
    assert everything(root / "leases") == ["0000000002-here-2-00000000.json"]


def test_actions_on_no_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "absent") as store:
        for act in (store.collect_garbage, lambda: store.pin(1), lambda: store.restore(1)):
            with pytest.raises(StoreMissing):
                act()
        assert store.prune() == []
    assert not (tmp_path / "absent").exists()
