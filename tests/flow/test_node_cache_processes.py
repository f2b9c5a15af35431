"""The node cache with real processes: one download, killed holders, readers against evictors."""

from __future__ import annotations

from pathlib import Path

import node_cache_ranks as ranks
import pytest

from ckptstore.testing.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def count(log: Path, word: str) -> int:
    return sum(line.startswith(word) for line in log.read_text().splitlines())


def assert_tidy(root: Path) -> None:
    assert not list(root.glob(".tmp-*"))
    assert not list((root / "leases").glob("tmp-*"))


def test_eight_processes_one_download(root: Path, log: Path) -> None:
    inodes = run_ranks(8, ranks.at_random_delays, root, log)
    assert len(set(inodes)) == 1
    assert log.read_text().splitlines()[1:] == [f"finished {log.read_text().split()[1]}"]
    assert_tidy(root)
    (late,) = run_ranks(1, ranks.at_random_delays, root, log)
    assert late == inodes[0]
    assert count(log, "started") == 1, "a process that comes later finds the copy"


def test_when_the_holder_is_killed_another_takes_over(root: Path, log: Path) -> None:
    _, *others = run_ranks(4, ranks.first_is_killed, root, log, expect_killed=[0])
    assert len({inode for inode, _ in others}) == 1
    assert all(len(holders) == 1 and holders[0].startswith("process ") for _, holders in others)
    assert (count(log, "started"), count(log, "finished")) == (2, 1)
    run_ranks(1, ranks.at_random_delays, root, log)
    assert_tidy(root)
    assert count(log, "started") == 2


def test_the_lease_of_a_killed_reader_ends_with_it(root: Path, log: Path) -> None:
    run_ranks(1, ranks.dies_reading, root, log, expect_killed=[0])
    assert (root / ranks.KEY).exists()
    run_ranks(2, ranks.reads_while_others_evict, root, log, timeout_seconds=100)
    assert not (root / ranks.KEY).exists()
    assert_tidy(root)


def test_readers_against_evictors(root: Path, log: Path) -> None:
    assert run_ranks(4, ranks.reads_while_others_evict, root, log, timeout_seconds=100) == [15] * 4
    assert_tidy(root)
    assert [path for path in root.iterdir() if len(path.name) == 64] == []


def test_a_forked_worker_keeps_the_copy(root: Path, log: Path) -> None:
    assert run_ranks(1, ranks.reads_in_a_forked_worker, root, log) == ["True 7 False"]
