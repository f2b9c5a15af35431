"""The drain with real processes, a real S3 server, and what ends a process at any moment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draining import board_at, opened

from ckptstore import open_store
from ckptstore.errors import CkptstoreError, RankFailed
from ckptstore.fast.drain import drain_rounds
from ckptstore.testing import KillAt, run_ranks
from ckptstore.testing.s3_server import Fault, s3_server

SECONDS = 60
TIMEOUT_SECONDS = 3.0


def drain_and_die(path: Path, where: str) -> Any:
    """Rank 1 is killed at that call; what rank 0 hears of it, and after how many seconds."""
    rank = int(os.environ["RANK"])
    hook = KillAt(where, when="during") if rank == 1 else None
    more: dict[str, Any] = {"board": board_at(path), "timeout_seconds": TIMEOUT_SECONDS, "close_seconds": 0.1}
    with opened(path / "store", path / "disks", rank=rank, size=2, hook=hook, **more) as job:
        drain, began = job.offer(1, 1), time.monotonic()
        try:
            drain.result(SECONDS)
        except RankFailed as error:
            return error.ranks, str(error), time.monotonic() - began
    return None


def test_a_killed_rank_ends_the_drain_with_its_name_and_nothing_visible(tmp_path: Path) -> None:
    (ranks, text, seconds), _ = run_ranks(2, drain_and_die, tmp_path, "write*", expect_killed=[1])
    assert ranks == (1,)
    assert "Rank 1 gave no sign of life" in text
    assert seconds < 10 * TIMEOUT_SECONDS
    with open_store(tmp_path / "store", group="solo") as store:
        assert store.latest() is None
        assert [*store] == []


def drain_through_an_outage(path: Path, uri: str, options: dict[str, Any]) -> Any:
    """The bucket goes away after the first checkpoint, and comes back when the ranks have seen that."""
    drain_rounds._FIRST_WAIT_SECONDS = drain_rounds._LONGEST_WAIT_SECONDS = 0.2
    rank = int(os.environ["RANK"])
    with opened(
        uri, path / "disks", rank=rank, size=2, board=board_at(path), close_seconds=SECONDS, storage_options=options
    ) as job:
        first = job.offer(1, 1).result(SECONDS).number
        (path / f"first-{rank}").touch()
        _wait_for(path / "away")
        second = job.offer(2, 2)
        until = time.monotonic() + SECONDS
        while job.drainer.health().away_since is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        third = job.offer(3, 3, size_bytes=10_000_000)
        error = job.drainer.health().error
        (path / f"seen-{rank}").touch()
        return first, second.result(SECONDS).entry.step, third.result(SECONDS).entry.step, error


def test_a_bucket_that_is_away_for_a_while_costs_nothing(tmp_path: Path) -> None:
    with s3_server(buckets=["test"]) as server:

        def outage() -> None:
            for rank in range(2):
                _wait_for(tmp_path / f"first-{rank}")
            server.faults.add(Fault(action="status", match="", times=None, status=503))
            (tmp_path / "away").touch()
            for rank in range(2):
                _wait_for(tmp_path / f"seen-{rank}")
            enough = len(server.log) + 8  # a round of two may have begun before both had offered the third
            _wait_until(lambda: len(server.log) >= enough, "the eighth request")
            server.faults.clear()

        director = threading.Thread(target=outage)
        director.start()
        environment = {"CKPTSTORE_RETRY_ATTEMPTS": "2", "CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS": "0.01"}
        arguments = tmp_path, "s3://test/run", server.storage_options
        ends = run_ranks(2, drain_through_an_outage, *arguments, env=environment)
        director.join()
        assert [end[:3] for end in ends] == [(2, 3, 3)] * 2  # nothing was sent of the second, so the third goes first
        assert "503" in ends[0][3] or "SlowDown" in ends[0][3]
        with open_store("s3://test/run", group="solo", storage_options=server.storage_options) as store:
            assert [checkpoint.step for checkpoint in store] == [1, 3]
            assert all(checkpoint.verify().ok for checkpoint in store)


def drain_until_killed(path: Path, where: str, when: Any) -> None:
    with opened(
        path / "store", path / "disks", hook=KillAt(where, when=when, skip=where.startswith("create log"))
    ) as job:
        job.offer(1, 1).result(SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize(
    "where", ["write checkpoints/*", "persist checkpoints/*", "create checkpoints/*", "create log/*"]
)
def test_a_job_that_is_killed_leaves_all_or_nothing_and_the_next_goes_on(tmp_path: Path, where: str, when: str) -> None:
    run_ranks(1, drain_until_killed, tmp_path, where, when, expect_killed=[0])
    with open_store(tmp_path / "store", group="solo") as store:
        found = [*store]
        assert len(found) == (1 if (where, when) == ("create log/*", "after") else 0)
        assert all(checkpoint.verify().ok for checkpoint in found)
    with opened(tmp_path / "store", tmp_path / "disks") as job:
        assert job.offer(2, 1).result(SECONDS).entry.step == 2
    with open_store(tmp_path / "store", group="solo") as store:
        store.collect_garbage(claim=True)
        assert all(checkpoint.verify().ok for checkpoint in store)
        assert len([*(tmp_path / "store/checkpoints").iterdir()]) == len(store)


def _wait_for(path: Path) -> None:
    _wait_until(path.exists, str(path))


def _wait_until(is_there: Callable[[], bool], name: str) -> None:
    until = time.monotonic() + SECONDS
    while not is_there():
        if time.monotonic() > until:
            raise CkptstoreError(f"{name} did not come")
        time.sleep(0.02)
