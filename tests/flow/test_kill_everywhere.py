"""SIGKILL at calls of the storage that change something: in a save of two ranks, in a prune, in a download.

A kill at a call that only reads leaves what a kill right after the last change leaves, so those are not run apart. Of a
save this is a sample; tests/outside kills it at every system call.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from kill_worker import count_changes, download, prune_once, save_step
from threaded_ranks import make_tree, read_tree, run_ranks_in_threads

from ckptstore import Checkpoint, CheckpointStore, KeepLatest, open_store
from ckptstore.testing import RanksFailed, run_ranks

PARALLEL = 3
PATIENT_SECONDS = 30.0
SAMPLED = {0: 5, 1: 3}
"""By victim: each call with this distance; the leader makes more than twice as many."""


def sources(tmp_path: Path) -> Path:
    for rank in (0, 1):
        make_tree(tmp_path / "source" / f"rank{rank}", {"model.pt": b"%d" % rank * 2_500_000, f"small{rank}": b"s"})
    return tmp_path / "source"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A store with one checkpoint of two ranks."""

    def flow(store: CheckpointStore, rank: int) -> None:
        store.save_directory(1, make_tree(tmp_path / f"first{rank}", {"model.pt": b"first"}))

    root = tmp_path / "base"
    assert run_ranks_in_threads(2, root, flow, retention=KeepLatest(1)) == [None, None]
    return root


def check(root: Path, *, allowed: set[int]) -> int:
    """What must hold after any kill; returns the step of the latest checkpoint."""
    with open_store(root, grace_seconds=0) as reader:
        latest = reader.latest()
        assert latest is not None
        assert latest.step in allowed
        live = list(reader)
        assert all(checkpoint.verify().ok for checkpoint in live)
    with open_store(root, grace_seconds=0, retention=KeepLatest(1)) as job:
        resumed = job.resume()
        assert resumed == latest
        job.prune()
        job.collect_garbage()
        referenced = {Path(checkpoint.uri).name for checkpoint in job}
        referenced |= {item.attempt for item in job.trash()}
        assert {path.name for path in (root / "checkpoints").iterdir()} == referenced
        assert job._job.log.verify_chain() == []
    leftovers = [path for path in root.rglob("*") if path.is_file() and ".ckptstore-tmp-" in path.name]
    assert all(path.parent.name != "checkpoints" for path in leftovers)
    return latest.step


def kill_in_save(
    base: Path,
    source: Path,
    victim: int,
    index: int,
    when: str,
    *,
    is_committed: bool = False,
    rank_timeout_seconds: float = 0.5,
) -> int:
    """The step of the latest checkpoint after that kill; `is_committed` says that the save commits before it."""
    root = base.parent / f"run-{victim}-{index}-{when}-{rank_timeout_seconds}"
    shutil.copytree(base, root)

    def kill_patiently() -> int:
        """On a busy machine the other rank takes this one for dead before it comes to the change."""
        patience = {"is_committed": is_committed, "rank_timeout_seconds": PATIENT_SECONDS}
        return kill_in_save(base, source, victim, index, when, **patience)

    what = str(root), uuid4().hex, str(source), 2, victim, index, when, rank_timeout_seconds
    try:
        try:
            results = run_ranks(2, save_step, *what, expect_killed=[victim])
        except RanksFailed as error:
            if "was to be killed, and returned" in str(error) and rank_timeout_seconds < PATIENT_SECONDS:
                return kill_patiently()
            raise AssertionError(f"rank {victim}, change {index}, {when}: {error}") from error
        survivor = results[1 - victim]
        step = check(root, allowed={1, 2})
        if "committed=False" in survivor:
            assert step == 1, survivor
        if survivor == "saved":
            assert step == 2
        if is_committed and step == 1 and rank_timeout_seconds < PATIENT_SECONDS:
            return kill_patiently()
        return step
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("victim", SAMPLED)
@pytest.mark.timeout(600)
def test_a_save_killed_at_changes_spread_over_it(base: Path, tmp_path: Path, victim: int) -> None:
    source = sources(tmp_path)
    counting = tmp_path / "counting"
    shutil.copytree(base, counting)
    changes = run_ranks(2, count_changes, str(counting), uuid4().hex, str(source), 2)[victim]
    assert check(counting, allowed={2}) == 2
    assert len(changes) > 10
    commits = [index for index, key in enumerate(changes) if key.startswith("log/")]
    assert bool(commits) == (victim == 0)
    committed_at = max(commits, default=len(changes))
    points = sorted({*range(0, len(changes) - 2, SAMPLED[victim]), *(index + 1 for index in commits)})

    def kill(index: int) -> int:
        when = ("before", "during", "after")[index % 3]
        return kill_in_save(base, source, victim, index, when, is_committed=index > committed_at)

    with ThreadPoolExecutor(PARALLEL) as pool:
        steps = list(pool.map(kill, points))
    assert 1 in steps
    assert all(step == 2 for index, step in zip(points, steps, strict=True) if index > committed_at)


def test_a_prune_killed_at_every_change(tmp_path: Path) -> None:
    root = tmp_path / "base"
    with open_store(root, retention=KeepLatest(1)) as store:
        for step in (1, 2, 3):
            store.save_directory(step, make_tree(tmp_path / f"s{step}", {"a": b"1", "b/c": b"2"}))

    def kill(index: int) -> None:
        copy = tmp_path / f"run{index}"
        shutil.copytree(root, copy)
        when = ("before", "during", "after")[index % 3]
        assert run_ranks(1, prune_once, str(copy), index, when, expect_killed=[0]) == [None]
        assert check(copy, allowed={3}) == 3

    counting = tmp_path / "counting"
    shutil.copytree(root, counting)
    (num_changes,) = run_ranks(1, prune_once, str(counting), 10**6, "before")
    assert check(counting, allowed={3}) == 3
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(kill, range(num_changes)))


def test_a_download_killed_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"f{index}": b"%d" % index * 300_000 for index in range(6)}
    with open_store(tmp_path / "store") as store:
        directory = store.save_directory(1, make_tree(tmp_path / "source", files)).uri

    def kill(index: int) -> None:
        cache = tmp_path / f"cache{index}"
        env = {"CKPTSTORE_CACHE_DIR": str(cache)}
        when = ("before", "during", "after")[index % 3]
        assert run_ranks(1, download, directory, index, when, env=env, expect_killed=[0]) == [None]
        ((_, found),) = run_ranks(1, download, directory, 10**6, when, env=env)
        assert found == {**{name: len(data) for name, data in files.items()}, "ckptstore.json": found["ckptstore.json"]}
        partial = [path for path in cache.iterdir() if path.name.startswith(".tmp-")]
        assert partial == []

    ((num_calls, _),) = run_ranks(
        1, download, directory, 10**6, "before", env={"CKPTSTORE_CACHE_DIR": str(tmp_path / "counting")}
    )
    assert num_calls >= 7
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(kill, range(num_calls)))
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "cache0"))
    assert read_tree(Checkpoint.from_directory(directory).to_directory(tmp_path / "out")) == files
