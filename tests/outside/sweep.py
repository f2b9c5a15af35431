"""SIGKILL at every system call that changes the disk, in each flow of `killed_flows.py`; what is left is then checked.

    python tests/outside/sweep.py                       every call of every flow, with a table
    python tests/outside/sweep.py --flow save --every 5 each fifth call of one flow

A kill point is the number of a call in one process and what it starts, as a run without a kill counted it. Threads make
that number mean slightly different calls from run to run; every number is tried, and a run that ends before its number
counts as a run without a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from killed_flows import LARGE, STEP, on_node, state_of
from system_calls import NOT_ALLOWED

from ckptstore import CheckpointStore, KeepLatest, StorageGroup, open_store
from ckptstore.checkpoint import Checkpoint

HERE = Path(__file__).parent
BEFORE = 1
"""The step of the checkpoint that is there before the flow, where it saves."""
AFTER = 3
QUICK_SECONDS, PATIENT_SECONDS = 3.0, 60.0
END_SECONDS = 600.0
OLD_SECONDS = 7 * 86400.0
SAVES = ("save_directory", "save", "save_async")
FAST = ("fast_save", "fast_node", "fast_resume")
"""In `fast_node` the node of the victim is lost, with its disk."""
TWO_RANKS = frozenset({*SAVES, *FAST})
STATES = frozenset({*SAVES[1:], *FAST, "import"})
OF_STATES = ("numpy", "torch", "ckptstore.saving.save_state", "ckptstore.extensions.exchange.importing")
AT_START = {
    "CKPTSTORE_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts threads when it is imported
    "PYTHONDONTWRITEBYTECODE": "1",
}
FLOWS = (*SAVES, *FAST, "prune", "gc", "cp", "node_cache", "import", "run")


class NotTraced(Exception):
    """This machine lets nobody trace."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    statuses: list[int]
    printed: list[str]
    calls: list[list[str]]
    """Of the victim: number, name, path, how it ended."""

    @property
    def killed(self) -> bool:
        return any(call[-1] == "killed" for call in self.calls)


class Host:
    """A process that has imported what a flow needs, and forks its ranks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "killed_flows.py"), *modules],
            env={**os.environ, **AT_START},
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def start(self, **asked: Any) -> None:
        assert self._process.stdin is not None
        with self._lock:
            print(json.dumps(asked), file=self._process.stdin, flush=True)

    def status(self, path: Path) -> int:
        """What is in the file for the status, when it is there."""
        ends_at = time.monotonic() + END_SECONDS
        while not path.exists():
            assert self._process.poll() is None, "the process to fork from has ended"
            assert time.monotonic() < ends_at, f"a rank has not ended within {END_SECONDS:g} s"
            time.sleep(0.005)
        return int(path.read_text())

    def end(self) -> None:
        """End it, and all that its ranks have left."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@dataclass
class Flow:
    """One flow in a directory of its own."""

    name: str
    base: Path
    """As it is before; each run gets a copy."""

    @cached_property
    def host(self) -> Host:
        return Host(OF_STATES if self.name in STATES else ())

    @property
    def num_ranks(self) -> int:
        return 2 if self.name in TWO_RANKS else 1

    def run(self, place: Path, victim: int, at: int | None, *, rank_timeout_seconds: float) -> Outcome:
        """Run it in `place`, a copy of the base, with the victim traced, and killed at its `at`-th change."""
        token, log = uuid4().hex, place / f"calls-{uuid4().hex}"
        outputs = [place / f"output-{uuid4().hex}" for _ in range(self.num_ranks)]
        environment = {
            "RANK_TIMEOUT_SECONDS": str(rank_timeout_seconds),
            "CKPTSTORE_CACHE_DIR": str(place / "cache"),
            "MEETING": tempfile.mkdtemp(dir=place, prefix="meeting-"),
            "WORLD_SIZE": str(self.num_ranks),
        }
        traced = {"under": [str(root) for root in self.changed(place)], "at": at, "log": str(log)}
        for rank, output in enumerate(outputs):
            is_victim = rank == victim
            self.host.start(
                arguments=[self.name, rank, self.num_ranks, token, str(place / "store"), str(self.given(place))],
                environment=environment | {"RANK": str(rank), "TRACED": "yes" if is_victim else "no"},
                output=str(output),
                status=str(output.with_suffix(".status")),
                traced=traced if is_victim else None,
            )
        statuses = [self.host.status(output.with_suffix(".status")) for output in outputs]
        printed = [output.read_text() for output in outputs]
        if statuses[victim] == NOT_ALLOWED:
            raise NotTraced(printed[victim])
        calls = [line.rsplit(" ", 1) for line in log.read_text().splitlines()]
        return Outcome(statuses, printed, [[*head.split(" ", 2), how] for head, how in calls])

    def given(self, place: Path) -> Path:
        """The last argument of the flow."""
        known = {"cp": place / "target", "node_cache": place / "directory", "run": place / "folder"}
        known |= dict.fromkeys(FAST, place / "disks")
        return Path(self.name.rpartition("_")[2]) if "async" in self.name else known.get(self.name, self.base / "given")

    def changed(self, place: Path) -> list[Path]:
        """The directories in which a change counts."""
        known = {"cp": [place / "target"], "node_cache": [place / "cache"]}
        known |= {name: [place / "disks", place / "store"] for name in FAST}
        known["run"] = [place / "store", place / "folder"]
        return known.get(self.name, [place / "store"])

    def points(self) -> list[tuple[int, int]]:
        """All kill points: the victim, and the number of a change that has an effect."""
        found = []
        for victim in range(self.num_ranks):
            with self.copied() as place:
                outcome = self.run(place, victim, None, rank_timeout_seconds=PATIENT_SECONDS)
                if any(outcome.statuses) or not all(text.strip().endswith("done") for text in outcome.printed):
                    raise AssertionError(f"{self.name} fails without a kill: {outcome}")
                self.check(place, outcome, killed=False)
            found += [(victim, int(number)) for number, _, _, how in outcome.calls if how == "done"]
        return found

    @contextmanager
    def copied(self) -> Iterator[Path]:
        place = Path(tempfile.mkdtemp(dir=self.base.parent, prefix=f"{self.name}-"))
        try:
            for part in ("store", "directory", "disks"):
                if (self.base / part).exists():
                    shutil.copytree(self.base / part, place / part)
            yield place
        finally:
            subprocess.run(["chmod", "-R", "u+w", str(place)], check=False)
            shutil.rmtree(place)

    def kill(self, point: tuple[int, int], *, rank_timeout_seconds: float = QUICK_SECONDS) -> str:
        """One run with a kill; what the other rank said of it. Raises AssertionError with what is wrong."""
        victim, number = point
        with self.copied() as place:
            outcome = self.run(place, victim, number, rank_timeout_seconds=rank_timeout_seconds)
            if not outcome.killed and rank_timeout_seconds < PATIENT_SECONDS:
                # On a busy machine the other rank gave this one up before it came so far; or it made fewer calls.
                return self.kill(point, rank_timeout_seconds=PATIENT_SECONDS)
            last = next((call for call in outcome.calls if call[-1] == "killed"), None)
            try:
                self.check(place, outcome, killed=last is not None, victim=victim)
            except Exception as error:
                where = f"{last[1]} {Path(last[2]).relative_to(place)}" if last else "nothing"
                raise AssertionError(
                    f"{self.name}, rank {victim} killed at change {number} ({where}): {type(error).__name__}: {error}\n"
                    + "\n".join(outcome.printed)
                ) from error
        return outcome.printed[1 - victim].strip() if self.num_ranks == 2 else ""

    def check(self, place: Path, outcome: Outcome, *, killed: bool, victim: int | None = None) -> None:
        """What must hold after any kill."""
        for rank, text in enumerate(outcome.printed):
            assert rank == victim or "Traceback" not in text, text
        if killed and self.name == "fast_node":
            shutil.rmtree(place / "disks" / f"node{victim}")
        _CHECKS[self.name](self, place, outcome, killed)


def check_save(flow: Flow, place: Path, outcome: Outcome, killed: bool) -> None:
    """The checkpoint before or the new one is whole; the survivor's word about it is true; life goes on."""
    root = place / "store"
    with open_store(root, grace_seconds=0) as reader:
        latest = reader.latest()
        assert latest is not None
        assert latest.step in ((BEFORE, STEP) if killed else (STEP,))
        for checkpoint in reader:
            assert checkpoint.verify().ok
            check_contents(flow, checkpoint)
    for text in outcome.printed:
        last = (text.strip().splitlines() or [""])[-1]
        assert "committed=False" not in last or latest.step == BEFORE, last
        assert last != "done" or latest.step == STEP, last
    go_on(root, latest.step, place)


def check_fast(flow: Flow, place: Path, outcome: Outcome, killed: bool) -> None:
    """The next job goes on from the one before or the new one, whole; saves; and nothing is left on any disk."""
    saves = flow.name != "fast_resume"
    first, *others = on_two_nodes(place, lambda store, state: store.resume(state) and dict(state))
    assert all(other["values"]["step"] == first["values"]["step"] for other in others)
    step = first["values"]["step"]
    assert step in ((BEFORE, STEP) if killed and saves else (STEP if saves else BEFORE,))
    for text in outcome.printed:
        assert not saves or (text.strip().splitlines() or [""])[-1] != "done" or step == STEP, text
    for rank, state in enumerate([first, *others]):
        assert (state["own"] == step * 10 + rank).all()
    on_two_nodes(place, lambda store, state: (store.resume(state), store.save(AFTER, state)))
    certified = {path.parent.name for path in (place / "disks").glob("*/*/checkpoints/*/fast.json")}
    for node in sorted((place / "disks").iterdir()):
        attempts = [path.name for path in sorted(node.glob("*/checkpoints/*"))]
        assert 1 <= len(attempts) <= 2, f"{node.name} has {attempts}"
        assert certified.issuperset(attempts), f"{node.name} has {attempts}, certified are {certified}"
        unfinished = list(node.rglob("*tmp*"))
        assert not unfinished, unfinished
    age(place / "store")
    with open_store(place / "store", grace_seconds=0) as job:
        latest = job.latest()
        assert latest is not None
        assert latest.step == AFTER
        assert all(checkpoint.verify().ok for checkpoint in job)
        assert job._job.log.verify_chain() == []


def on_two_nodes(place: Path, flow: Callable[[CheckpointStore, dict[str, Any]], Any]) -> list[Any]:
    """A job of two ranks, each a node with the disk that it has in the flow."""
    token = uuid4().hex

    def rank(number: int) -> Any:
        group = StorageGroup(number, 2, token)
        fast = on_node(str(place / "disks"), number)
        with open_store(place / "store", group=group, fast=fast, grace_seconds=3600) as store:
            return flow(store, state_of(0, number))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def check_prune(flow: Flow, place: Path, outcome: Outcome, killed: bool) -> None:
    with open_store(place / "store", grace_seconds=0) as reader:
        latest = reader.latest()
        assert latest is not None
        assert latest.step == AFTER - 1
        assert all(checkpoint.verify().ok for checkpoint in reader)
    go_on(place / "store", latest.step, place)


def check_copy(flow: Flow, place: Path, outcome: Outcome, killed: bool) -> None:
    """What the target's log names is whole; the same copy goes on and ends; nothing else is left."""
    from ckptstore.extensions.exchange.copying import copy_store
    from ckptstore.transfer.opened import open_place

    target = place / "target"
    with open_store(target) as reader:
        for checkpoint in reader:
            assert checkpoint.verify().ok
    with open_store(place / "store") as source:
        end = open_place(str(target))
        copy_store(source, end)
        end.close()
        with open_store(target) as copied:
            assert [checkpoint.step for checkpoint in copied] == [checkpoint.step for checkpoint in source]
            for mine, theirs in zip(copied, source, strict=True):
                assert contents_of(mine) == contents_of(theirs)
    go_on(target, AFTER - 1, place)


def check_cache(flow: Flow, place: Path, outcome: Outcome, killed: bool) -> None:
    """Another process gets a whole copy, and the cache holds that one alone."""
    checkpoint = Checkpoint.from_directory(place / "directory")
    again = flow.run(place, 0, None, rank_timeout_seconds=QUICK_SECONDS)
    assert again.printed[0].strip().endswith("done"), again.printed
    cache = place / "cache"
    copies = [path for path in cache.rglob("ckptstore.json") if path.is_file()]
    assert len(copies) == 1, copies
    found = {str(file.relative_to(copies[0].parent)): file.read_bytes() for file in files_below(copies[0].parent)}
    found.pop("ckptstore.json")
    assert found == contents_of(checkpoint)
    left = [
        file for file in files_below(cache) if copies[0].parent not in file.parents and file.stat().st_size > 100_000
    ]
    assert not left, left


def check_run(flow: Flow, place: Path, outcome: Outcome, killed: bool) -> None:
    """What is committed is whole; the next start ends well, on another machine too, with both checkpoints stored."""
    if killed:
        look_at_folders(place, complete=False)
        if len(outcome.calls) % 2:
            shutil.rmtree(place / "folder", ignore_errors=True)
        again = flow.run(place, 0, None, rank_timeout_seconds=PATIENT_SECONDS)
        assert again.printed[0].strip().endswith("done"), again.printed
    look_at_folders(place, complete=True)
    go_on(place / "store", STEP, place)


def look_at_folders(place: Path, *, complete: bool) -> None:
    if not complete and not (place / "store" / "store.json").exists():
        return
    with open_store(place / "store") as reader:
        found = list(reader)
        assert not complete or [checkpoint.step for checkpoint in found] == [BEFORE, STEP]
        for checkpoint in found:
            assert checkpoint.verify().ok
            step, files = checkpoint.step, contents_of(checkpoint)
            wanted = {"model": b"weights of %d\n" % step, "DONE": b""}
            assert {Path(name).name: data for name, data in files.items()} == wanted, files


def check_contents(flow: Flow, checkpoint: Checkpoint) -> None:
    if checkpoint.kind == "directory":
        step = checkpoint.step
        wanted = {
            stored: data
            for rank in (0, 1)
            for name, data in directory_of(step, rank).items()
            for stored in [name.replace(".", f"-rank={rank:05d}.") if name == "model.pt" else name]
        }
        assert contents_of(checkpoint) == wanted
        return
    import torch

    state = {"own": torch.zeros(LARGE), "values": {"step": -1}}
    checkpoint.load(state, include=["own", "values.step"], per_rank="first", strict=False)
    assert state["values"]["step"] == checkpoint.step
    assert (state["own"] == checkpoint.step * 10).all()


_CHECKS: dict[str, Callable[[Flow, Path, Outcome, bool], None]] = {
    **dict.fromkeys(SAVES, check_save),
    **dict.fromkeys(FAST, check_fast),
    "prune": check_prune,
    "gc": check_prune,
    "cp": check_copy,
    "node_cache": check_cache,
    "import": check_save,
    "run": check_run,
}


def go_on(root: Path, step: int, place: Path) -> None:
    """A new job resumes, saves and collects; then nothing is there that the log does not name."""
    source = place / "source"
    write_tree(source, {"model.pt": b"after", "small": b"s"})
    with open_store(root, grace_seconds=0) as job:
        resumed = job.resume()
        assert resumed is not None
        assert resumed.step == step
        job.save_directory(AFTER, source)
        latest = job.latest()
        assert latest is not None
        assert latest.step == AFTER
    age(root)
    with open_store(root, grace_seconds=0) as job:
        job.prune()
        job.collect_garbage(claim=True)
        assert all(checkpoint.verify().ok for checkpoint in job)
        assert job._job.log.verify_chain() == []
        names = named_files(job)
    there = {str(file.relative_to(root)) for file in files_below(root)}
    logs = {name for name in there if name.startswith("log/") and name.endswith(".json")}
    left = there - names - logs - {"store.json", "latest.json"}
    assert not left, f"gc left {sorted(left)}"
    assert not names - there, f"{sorted(names - there)} are missing"
    empty = [path for path in root.glob("*/**/*") if path.is_dir() and not any(path.iterdir())]
    assert not empty, f"gc left {empty}"


def named_files(store: CheckpointStore) -> set[str]:
    """Every key that belongs to a checkpoint which the log names."""
    newest = store._job.log.newest()
    assert newest is not None
    found = set()
    for record in store._job.log.records([*newest.state.live, *newest.state.trash]):
        prefix = f"checkpoints/{record.entry.attempt}/"
        manifest = json.loads((Path(store.uri.removeprefix("file://")) / prefix / "ckptstore.json").read_bytes())
        found |= {prefix + entry["name"] for entry in manifest["files"]} | {prefix + "ckptstore.json"}
    return found


def age(root: Path) -> None:
    """As if a week had passed: what is only transient is old now."""
    then = time.time() - OLD_SECONDS
    for path in [*root.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir()]


def contents_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    with checkpoint.as_directory() as path:
        return {item.name: (path / item.name).read_bytes() for item in checkpoint.files}


def directory_of(step: int, rank: int) -> dict[str, bytes]:
    """What a rank saves as a directory."""
    return {"model.pt": bytes([step, rank]) * 700_000, f"small{rank}": b"s%d" % step, f"d{rank}/deep": b"x"}


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def make_flow(name: str, where: Path) -> Flow:
    """A flow with what must be there before it."""
    base = where / f"base-{name}"
    store, given = base / "store", base / "given"
    if name in FAST:
        on_two_nodes(base, lambda job, _: job.save(BEFORE, state_of(BEFORE, job._job.group.rank)))
        return Flow(name, base)
    if name == "run":
        base.mkdir()
        return Flow(name, base)
    steps = (BEFORE,) if name in (*SAVES, "import") else (0, 1, AFTER - 1)
    for step in steps:
        sources = [write_tree(base / f"source{step}-{rank}", directory_of(step, rank)) for rank in (0, 1)]
        save_both(store, step, sources, keep=1 if name == "prune" else 5)
    if name == "save_directory":
        for rank in (0, 1):
            write_tree(given / f"rank{rank}", directory_of(STEP, rank))
    if name == "gc":
        orphan = "checkpoints/step-0000000009-e0001-0123abcd"
        write_tree(store, {f"{orphan}/a": b"1" * 1000, f"{orphan}/b/c": b"2", f"{orphan}/.ckptstore-tmp-1-0a": b"3"})
    if name == "node_cache":
        with open_store(store) as found:
            shutil.copytree(found[AFTER - 1].uri.removeprefix("file://"), base / "directory")
    if name == "import":
        import torch

        given.mkdir(parents=True)
        state = state_of(STEP, 0)
        torch.save(state, given / "state.pt")
    return Flow(name, base)


def save_both(root: Path, step: int, sources: Sequence[Path], *, keep: int) -> None:
    token = uuid4().hex

    def rank(number: int) -> None:
        group = StorageGroup(number, 2, token)
        with open_store(root, group=group, retention=KeepLatest(keep), grace_seconds=3600) as store:
            store.save_directory(step, sources[number])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))


@dataclass(frozen=True)
class Swept:
    """What a sweep of one flow found."""

    flow: str
    num_points: int
    num_tried: int
    seconds: float
    problems: list[str]


def sweep(name: str, where: Path, *, most: int | None = None, every: int = 1, parallel: int = 2) -> Swept:
    """Kill a flow at its points, at each `every`-th of them, or at `most` of them evenly spread."""
    started = time.monotonic()
    flow = make_flow(name, where)

    def attempt(point: tuple[int, int]) -> str | None:
        try:
            flow.kill(point)
        except AssertionError as error:
            return str(error)
        return None

    try:
        points = flow.points()
        if most is not None:
            every = max(1, -(-len(points) // most))
        # The middle of each stretch: with the first of each, all victims would die at their first call.
        chosen = points[every // 2 :: every]
        with ThreadPoolExecutor(parallel) as pool:
            problems = [problem for problem in pool.map(attempt, chosen) if problem]
    finally:
        flow.host.end()
    shutil.rmtree(flow.base)
    return Swept(name, len(points), len(chosen), time.monotonic() - started, problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow", action="append", choices=FLOWS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=max(2, (os.cpu_count() or 2) - 1))
    given = parser.parse_args()
    failed = 0
    print(f"{'flow':20} {'calls':>6} {'killed at':>10} {'wrong':>6} {'seconds':>8}")
    with tempfile.TemporaryDirectory(prefix="ckptstore-sweep-") as where:
        for name in given.flow or FLOWS:
            found = sweep(name, Path(where), every=given.every, parallel=given.parallel)
            failed += len(found.problems)
            print(
                f"{name:20} {found.num_points:6} {found.num_tried:10} {len(found.problems):6} {found.seconds:8.0f}",
                flush=True,
            )
            for problem in found.problems:
                print("  " + problem.replace("\n", "\n  "), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
