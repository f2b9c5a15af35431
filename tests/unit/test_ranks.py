"""run_ranks: real processes, their environment, their ends; the same for those that are forked from one with torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import pytest

from ckptstore.errors import StoreFenced
from ckptstore.testing import ranks
from ckptstore.testing.ranks import RanksFailed

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]


@pytest.fixture(params=[ranks.run_ranks, forked_ranks.run_ranks], ids=["started", "forked"])
def run_ranks(request: pytest.FixtureRequest) -> Run:
    return request.param if request.param is ranks.run_ranks else partial(request.param, modules=())


@dataclass
class Pair:
    left: int
    right: str


def environment(pair: Pair) -> tuple[Pair, dict[str, str], int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EXTRA")
    return pair, {name: os.environ[name] for name in names}, os.getpid()


def fail_at(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        print("about to fail")
        raise StoreFenced("a newer job", step=3)
    return "fine"


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("it has two arguments")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def die(by: int, rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), by)
        time.sleep(60)
    return 1


def leave(status: int) -> None:
    os._exit(status)


def hang_with_child(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (directory / os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def leave_child(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (directory / os.environ["RANK"]).write_text(str(child.pid))


def runs(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def gone(process_ids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(runs(process_id) for process_id in process_ids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_each_rank_has_its_environment(run_ranks: Run) -> None:
    ends = run_ranks(3, environment, Pair(1, "é"), env={"EXTRA": "x"})
    assert [pair for pair, _, _ in ends] == [Pair(1, "é")] * 3
    assert [values["RANK"] for _, values, _ in ends] == ["0", "1", "2"] == [env["LOCAL_RANK"] for _, env, _ in ends]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["EXTRA"]) for _, env, _ in ends} == {("3", "3", "x")}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for _, env, _ in ends}) == 1
    assert len({process_id for *_, process_id in ends} | {os.getpid()}) == 4


def test_an_error_comes_back_as_itself_and_as_text(run_ranks: Run) -> None:
    with pytest.raises(RanksFailed, match="rank 1 raised") as caught:
        run_ranks(2, fail_at, 1)
    assert "about to fail" in str(caught.value)
    assert "in fail_at" in str(caught.value)
    assert set(caught.value.errors) == {1}
    error = caught.value.errors[1]
    assert isinstance(error, StoreFenced)
    assert error.step == 3


def test_an_error_that_cannot_be_pickled_comes_back_as_text(run_ranks: Run) -> None:
    with pytest.raises(RanksFailed, match="it has two arguments") as caught:
        run_ranks(1, raise_unpicklable)
    assert caught.value.errors == {}


def test_a_death_names_rank_and_signal(run_ranks: Run) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died by SIGSEGV") as caught:
        run_ranks(2, die, signal.SIGSEGV, 1)
    assert caught.value.signals == {1: signal.SIGSEGV}
    with pytest.raises(RanksFailed, match="rank 0 exited with status 7"):
        run_ranks(1, leave, 7)
    with pytest.raises(RanksFailed, match="rank 0 exited with status 0 and without a result"):
        run_ranks(1, leave, 0)


def test_an_expected_death(run_ranks: Run) -> None:
    assert run_ranks(2, die, signal.SIGKILL, 1, expect_killed=[1]) == [1, None]
    with pytest.raises(RanksFailed, match="rank 0 was to be killed, and returned"):
        run_ranks(1, fail_at, 1, expect_killed=[0])
    with pytest.raises(RanksFailed, match="rank 0 was to be killed, and died by SIGTERM"):
        run_ranks(1, die, signal.SIGTERM, 0, expect_killed=[0])
    with pytest.raises(RanksFailed, match="rank 0 died by SIGKILL"):
        run_ranks(1, die, signal.SIGKILL, 0)


def test_nothing_is_left_after_the_deadline(run_ranks: Run, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 hung until the deadline") as caught:
        run_ranks(2, hang_with_child, tmp_path, timeout_seconds=6)
    assert "in hang_with_child" in str(caught.value), "the stacks of hanging ranks are shown"
    assert gone([int(word) for rank in "01" for word in (tmp_path / rank).read_text().split()])


def test_a_child_that_a_rank_leaves_behind_is_ended(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(2, leave_child, tmp_path)
    assert gone([int((tmp_path / rank).read_text()) for rank in "01"])


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from ckptstore.testing.ranks import run_ranks\n"
        "def hang(directory):\n"
        "    (directory / os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(2, hang, Path(sys.argv[1]))\n"
    )
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    deadline = time.monotonic() + 60
    while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert gone([int((tmp_path / rank).read_text()) for rank in "01"])


def test_functions_that_no_process_can_find_are_refused(run_ranks: Run) -> None:
    def local() -> None: ...

    for function in (local, lambda: None):
        with pytest.raises(TypeError, match="top level"):
            run_ranks(1, function)
