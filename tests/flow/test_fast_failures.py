"""What a failure costs: the table of `docs/explain/how-the-fast-tier-works.md`, row by row, with real processes.

A node is a directory and a name. Each rank is a process. Two rows are kept elsewhere: processes that are killed at any
system call of a save or a resume (`tests/outside`), and at any moment of a drain (`test_drain_processes`).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import forked_ranks
import pytest
import torch
from small_disks import mounted
from trees import flip

from ckptstore import CheckpointStore, FastTier, KeepEvery, StorageGroup, open_store
from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError
from ckptstore.events import CheckpointSkipped, FastBypassed, listening
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

pytestmark = pytest.mark.slow

Row = Callable[[Path], object]
SECONDS = 60
DURABLE, NEWEST = 1, 3
"""Of the steps that are saved before a row, the one that is in the store, and the last one."""
copies_of_each = pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.long), 2])


def state_of(step: int, rank: int, size: int = 50_000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step)), "own": torch.full((100,), float(100 * step + rank)), "step": step}


def run(nodes: str, root: Path, script: str, *, copies: int, token: str = "", **more: Any) -> list[Any]:
    """What the lines of a script come to on each rank: see `play`. `nodes` has a letter for each."""
    given = {"uri": str(root / "store"), "options": None, "timeout_seconds": 60.0, **more}
    expected = given.pop("expect_killed", ())
    environment = given.pop("env", None)
    arguments = nodes, root, script, copies, token or uuid4().hex, given
    return forked_ranks.run_ranks(len(nodes), play, *arguments, expect_killed=expected, env=environment)


def play(nodes: str, root: Path, script: str, copies: int, token: str, given: dict[str, Any]) -> list[Any]:
    """One rank. "save N", "durable N" and "resume" say what came of it and how long it took; "touch NAME" and "wait
    NAME" tell processes of each other. Nothing is in the store but what "durable" brought there."""
    number = given.get("rank", int(os.environ["RANK"]))
    tier = FastTier(
        root / f"disk-{nodes[number]}",
        copies=copies,
        keep=3,
        node=nodes[number],
        drain=KeepEvery(steps=1_000_000),
        drain_bytes_per_second=None if "durable" in script else 1.0,
    )
    os.environ["CKPTSTORE_CACHE_DIR"] = str(root / "cache")  # which would have an index that is damaged
    told: list[Any] = []
    group = StorageGroup(number, len(nodes), token) if len(nodes) > 1 else None
    store = open_store(
        given["uri"],
        group=group,
        fast=tier,
        storage_options=given["options"],
        rank_timeout_seconds=given["timeout_seconds"],
    )
    with listening(lambda event: told.append(_shown(event)), CheckpointSkipped, FastBypassed), store:
        store._deadline.set(0.0)
        for line in script.split(", "):
            began = time.monotonic()
            try:
                found = act(store, root, number, line)
            except CkptstoreError as error:
                found = type(error).__name__, str(error), error.ranks
            if found is not None:
                told.append((line, found, time.monotonic() - began))
    return told


def _shown(event: Any) -> Any:
    return type(event).__name__, getattr(event, "reason", ""), 0.0


def act(store: CheckpointStore, root: Path, rank: int, line: str) -> Any:
    verb, _, what = line.partition(" ")
    if verb == "touch":
        (root / f"{what}-{rank}").touch()
    elif verb == "wait":
        wait_for(root / what)
    elif verb == "fill" and rank == 0:
        with open(root / "disk-a" / "somebody-elses", "wb", buffering=0) as file:
            while shutil.disk_usage(root / "disk-a").free:
                file.write(b"x" * 4096)
    elif verb == "hang" and rank == 1:
        (root / "hangs").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif verb == "deaf" and rank == 1:  # nobody reaches the node any more, though all its processes live
        store._job.tier.place.server.close()
    elif verb == "passed":
        report = store.resume(state_of(0, rank)).load_report
        return report.passed_over
    elif verb == "save":
        return store.save(int(what), state_of(int(what), rank)).is_durable
    elif verb in ("fill", "hang", "deaf"):
        return None
    elif verb == "durable":
        record = store.save_async(int(what), state_of(int(what), rank)).durable(SECONDS)
        return None if record is None else record.step
    else:
        state = state_of(-1, rank)
        found = store.resume(state, per_rank="first")
        if found is None:
            return 0
        assert state["step"] == found.step
        assert torch.equal(state["w"], torch.full_like(state["w"], found.step))
        assert len(state["own"].unique()) == 1
        assert int(state["own"][0]) // 100 == found.step
        return found.step
    return None


def wait_for(*paths: Path) -> None:
    until = time.monotonic() + SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, paths
        time.sleep(0.02)


def said(ends: list[Any], line: str) -> list[Any]:
    """What a line came to on each rank."""
    return [found for told in ends if told is not None for what, found, _ in told if what == line]


def lose(*nodes: str) -> Row:
    return lambda root: [shutil.rmtree(root / f"disk-{node}") for node in nodes]


def attempt(root: Path, node: str, step: int = NEWEST) -> Path:
    (found,) = (root / f"disk-{node}").glob(f"*/checkpoints/step-{step:010d}-*")
    return found


def tear(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


def harm(how: Callable[[Path], None], name: str, *nodes: str) -> Row:
    return lambda root: [how(attempt(root, node) / name) for node in nodes if (attempt(root, node) / name).exists()]


SHARD, INDEX = "state-rank=00000-00.distcp", "tensors.index"
ROWS: dict[str, tuple[Row, str, int, int]] = {
    "a node is lost": (lose("a"), "ab", DURABLE, NEWEST),
    "a node is lost, another takes its place": (lose("b"), "ac", DURABLE, NEWEST),
    "a node and its partner are lost": (lose("a", "b"), "ab", DURABLE, DURABLE),
    "the job is moved": (lambda _: None, "cd", DURABLE, DURABLE),
    "a bit is flipped": (harm(flip, SHARD, "a"), "ab", 2, NEWEST),
    "a file is torn": (harm(tear, SHARD, "a"), "ab", 2, NEWEST),
    "a file is missing": (harm(Path.unlink, SHARD, "a"), "ab", 2, NEWEST),
    "a bit of the index is flipped": (harm(flip, INDEX, "a"), "ab", 2, NEWEST),
    "the index is torn": (harm(tear, INDEX, "a"), "ab", 2, NEWEST),
    "the index is missing": (harm(Path.unlink, INDEX, "a"), "ab", 2, NEWEST),
    "a bit of a certificate is flipped": (harm(flip, "fast.json", "a"), "ab", 2, NEWEST),
    "a certificate is missing": (harm(Path.unlink, "fast.json", "a"), "ab", NEWEST, NEWEST),
    "all certificates are missing": (harm(Path.unlink, "fast.json", "a", "b"), "ab", 2, 2),
    "a bit is flipped in both copies": (harm(flip, SHARD, "a", "b"), "ab", 2, 2),
    "a file is torn in both copies": (harm(tear, SHARD, "a", "b"), "ab", 2, 2),
    "a file is missing in both copies": (harm(Path.unlink, SHARD, "a", "b"), "ab", 2, 2),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[Any]]]:
    """What the ranks of a job hear that begins after each row. The rows have copies of one store, and processes for
    all of them, which open the store of each."""
    found: dict[int, dict[str, list[Any]]] = {}

    def outcomes(copies: int) -> dict[str, list[Any]]:
        if copies not in found:
            place = tmp_path_factory.mktemp(f"copies-{copies}")
            run("ab", place / "before", "durable 1, save 2, save 3", copies=copies)
            jobs = []
            for number, (happens, nodes, *_) in enumerate(ROWS.values()):
                root = Path(shutil.copytree(place / "before", place / str(number)))
                happens(root)
                jobs.append((nodes, root))
            ends = forked_ranks.run_ranks(2, play_rows, jobs, copies, timeout_seconds=300)
            found[copies] = {row: [told[number] for told in ends] for number, row in enumerate(ROWS)}
        return found[copies]

    return outcomes


def play_rows(jobs: list[tuple[str, Path]], copies: int) -> list[list[Any]]:
    """A job for each row, one after the other."""
    given = {"options": None, "timeout_seconds": 60.0}
    return [
        play(nodes, root, "resume, save 4", copies, root.name, {**given, "uri": str(root / "store")})
        for nodes, root in jobs
    ]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_what_a_lost_or_damaged_disk_costs(
    outcomes: Callable[[int], dict[str, list[Any]]], row: str, copies: int
) -> None:
    ends, wanted = outcomes(copies)[row], ROWS[row][1 + copies]
    assert said(ends, "resume") == [wanted] * 2
    assert said(ends, "save 4") == [False] * 2
    if wanted == 2 and row != "all certificates are missing":  # a save that was never complete needs no word
        assert said(ends, "CheckpointSkipped"), "what is not used is told"


@copies_of_each
def test_a_zombie_goes_on_saving(tmp_path: Path, copies: int) -> None:
    """On nodes that the new job has not come to, so that it does not hear of it: what it saves there is void."""
    before = run_together(
        [
            ("ab", "save 1, save 2, touch first, wait second-0, wait second-1, save 7, save 8, touch third"),
            ("cd", "wait first-0, wait first-1, resume, save 3, touch second, wait third-0, wait third-1"),
        ],
        tmp_path,
        copies,
    )
    assert said(before[:2], "save 8") == [False] * 2
    assert said(before[2:], "resume") == [0] * 2
    ends = run("abcd", tmp_path, "resume", copies=copies)
    assert said(ends, "resume") == [3] * 4
    assert said(ends, "CheckpointSkipped") == []
    assert not [*(tmp_path / "disk-a").glob("*/checkpoints/*")]


def run_together(jobs: list[tuple[str, str]], root: Path, copies: int) -> list[Any]:
    """Jobs side by side; what the ranks of all of them hear."""
    return forked_ranks.run_ranks(sum(len(nodes) for nodes, _ in jobs), play_one_of, jobs, root, copies)


def play_one_of(jobs: list[tuple[str, str]], root: Path, copies: int) -> list[Any]:
    number, given = int(os.environ["RANK"]), {"uri": str(root / "store"), "options": None, "timeout_seconds": 60.0}
    for job, (nodes, script) in enumerate(jobs):
        if number < len(nodes):
            return play(nodes, root, script, copies, f"job{job}", {**given, "rank": number})
        number -= len(nodes)
    raise AssertionError("there are as many processes as ranks")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk-a", "3m") as place:
        yield place


@copies_of_each
def test_a_disk_is_full(tmp_path: Path, small_disk: Path, copies: int) -> None:
    """That of one node alone: the save of all ranks goes to the store."""
    ends = run("ab", tmp_path, "save 1, fill, save 2, resume", copies=copies)
    assert said(ends, "save 1") == [False] * 2
    assert said(ends, "save 2") == [True] * 2
    assert "FastBypassed" in [what for what, _, _ in ends[0]]
    assert said(ends, "resume") == [2] * 2
    assert said(run("ab", tmp_path, "resume", copies=copies), "resume") == [2] * 2


def test_a_node_that_cannot_be_reached_costs_no_checkpoint(tmp_path: Path) -> None:
    ends = run("ab", tmp_path, "save 1, deaf, save 2, save 3, resume", copies=2)
    assert said(ends, "save 1") == [False] * 2
    assert said(ends, "save 2") == said(ends, "save 3") == [True] * 2
    assert [what for what, _, _ in ends[0]].count("FastBypassed") == 2
    assert said(ends, "resume") == [3] * 2
    ends = run("ab", tmp_path, "save 4, resume", copies=2)
    assert said(ends, "save 4") == [False] * 2, "a new start serves again"


def test_what_two_lost_nodes_had_is_told_on_all_ranks(tmp_path: Path) -> None:
    run("abc", tmp_path, "durable 1, save 2", copies=2)
    for node in "ab":
        shutil.rmtree(tmp_path / f"disk-{node}")
    ends = run("abc", tmp_path, "passed", copies=2)
    (told,) = {tuple(one) for one in said(ends, "passed")}
    assert len(told) == 1
    assert told[0].startswith("step 2: on c: no node that is here has the files of rank 0")


RETRIES = {"CKPTSTORE_RETRY_ATTEMPTS": "2", "CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS": "0.01"}


def stop_and_start(server: S3Server, seconds: float) -> None:
    server.close()
    time.sleep(seconds)
    server.start()


def throttle(server: S3Server, seconds: float) -> None:
    server.faults.add(
        Fault(action="status", times=None, probability=0.3),
        Fault(action="bandwidth", times=None, bytes_per_second=1e6),
    )
    time.sleep(seconds)
    server.faults.clear()


@copies_of_each
@pytest.mark.parametrize(
    ("trouble", "seconds"),
    [(throttle, 1.0), (stop_and_start, 2.0), pytest.param(stop_and_start, 60.0, marks=pytest.mark.long)],
)
def test_the_bucket_is_slow_or_away(tmp_path: Path, copies: int, trouble: Any, seconds: float) -> None:
    """Saves do not hear of it. What waits for the store is there when the store is."""
    if seconds > 2 and copies == 1:
        pytest.skip("a minute is waited for once")
    with s3_server(buckets=["test"]) as server:

        def strikes() -> None:
            wait_for(tmp_path / "begun-0", tmp_path / "begun-1")
            (tmp_path / "away").touch()
            trouble(server, seconds)
            (tmp_path / "back").touch()

        director = threading.Thread(target=strikes)
        director.start()
        ends = forked_ranks.run_ranks(2, play_an_outage, tmp_path, copies, server.storage_options, env=RETRIES)
        director.join()
        with open_store("s3://test/run", group="solo", storage_options=server.storage_options) as store:
            assert [checkpoint.step for checkpoint in store][-1] == 9
            assert all(checkpoint.verify().ok for checkpoint in store)
    for saves, seconds_of_saves, durable_seconds, last, away in ends:
        assert saves == [False] * 3
        assert seconds_of_saves < 30, "a save has waited for the store"
        assert durable_seconds is not None
        assert last == 9
        assert away is None


def play_an_outage(root: Path, copies: int, options: dict[str, Any]) -> Any:
    rank = int(os.environ["RANK"])
    seat = StorageGroup(rank, 2, "start", f"node{rank}")  # in a directory, as those of torch meet without the store
    group = seat.open(LocalStorage(root / "board"), rank_timeout_seconds=SECONDS, retry=RetryConfig())
    tier = FastTier(root / f"disk-{rank}", copies=copies, node=f"node{rank}")
    with open_store("s3://test/run", group=group, fast=tier, storage_options=options) as store:
        store.save_async(1, state_of(1, rank)).durable(SECONDS)
        (root / f"begun-{rank}").touch()
        wait_for(root / "away")
        began = time.monotonic()
        saves = [store.save(step, state_of(step, rank)).is_durable for step in (2, 3, 4)]
        seconds = time.monotonic() - began
        behind = store.health().not_durable_seconds
        wait_for(root / "back")
        last = store.save_async(9, state_of(9, rank)).durable(SECONDS)
        return saves, seconds, behind, last and last.step, store.health().away_seconds


@copies_of_each
def test_a_node_hangs(tmp_path: Path, copies: int) -> None:
    """The others hear within twice the timeout of a rank who it is, and all go on when it does."""
    timeout_seconds = 5.0

    def continues() -> None:
        wait_for(tmp_path / "hangs")
        wait_for(tmp_path / "heard-0")
        os.kill(int((tmp_path / "hangs").read_text()), signal.SIGCONT)

    director = threading.Thread(target=continues)
    director.start()
    script = "save 1, hang, save 2, touch heard, wait heard-1, wait heard-0, save 3, resume"
    ends = run("ab", tmp_path, script, copies=copies, timeout_seconds=timeout_seconds)
    director.join()
    (text, seconds), *_ = [(found, seconds) for what, found, seconds in ends[0] if what == "save 2"]
    assert text[0] in ("RankTimeout", "StorageUnavailable"), text
    assert "rank 1" in text[1].lower() or "b broke off" in text[1], text
    assert "step 2" in text[1]
    assert seconds < 2 * timeout_seconds + 5
    assert said(ends, "save 3") == [False] * 2
    assert said(ends, "resume") == [3] * 2
