"""The log on a real disk, written by real processes at the same time, one of which dies while it writes."""

from __future__ import annotations

import os
from pathlib import Path

from ckptstore.config import RetryConfig
from ckptstore.format.changes import Claim, Noop
from ckptstore.log import Log
from ckptstore.log.identity import read_identity, read_or_create_identity
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.faults import KillAt, wrap
from ckptstore.testing.ranks import run_ranks

RETRY = RetryConfig(retry_attempts=3)
APPENDS = 25


def append_as_rank(root: Path) -> tuple[str, list[str]]:
    storage = LocalStorage(root)
    log = Log(storage, retry=RETRY)
    store_id = read_or_create_identity(storage)
    records = [log.append(lambda _: Claim(f"rank-{os.environ['RANK']}", 1))]
    records += [log.append(lambda _: Noop()) for _ in range(APPENDS - 1)]
    return store_id, [record.write_id for record in records if record]


def die_in_the_middle(root: Path, when: str) -> None:
    log = Log(wrap(LocalStorage(root), KillAt("create log/*", when=when)), retry=RETRY)
    log.append(lambda _: Noop())


def test_processes_write_one_chain(tmp_path: Path) -> None:
    found = run_ranks(3, append_as_rank, tmp_path)
    storage = LocalStorage(tmp_path)
    log = Log(storage, retry=RETRY)
    assert log.verify_chain() == []
    newest = log.newest()
    assert newest
    assert (newest.number, newest.state.epoch) == (3 * APPENDS, 3)
    in_log = {record.write_id for record in log.records(range(1, newest.number + 1))}
    assert in_log == {write_id for _, write_ids in found for write_id in write_ids}
    assert {store_id for store_id, _ in found} == {read_identity(storage)}


def test_a_process_that_dies_while_it_creates_leaves_a_whole_log(tmp_path: Path) -> None:
    log = Log(LocalStorage(tmp_path), retry=RETRY)
    assert log.append(lambda _: Claim("first", 1))
    for when, landed in (("before", False), ("during", False), ("after", True)):
        before = log.newest()
        assert before
        run_ranks(1, die_in_the_middle, tmp_path, when, expect_killed=[0])
        newest = Log(LocalStorage(tmp_path), retry=RETRY).newest()
        assert newest
        assert newest.number == before.number + landed
        assert log.append(lambda _: Noop())
        assert log.verify_chain() == []
