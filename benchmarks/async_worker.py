"""What the process of the benchmarks of asynchronous saves does: stalls of calls, and steps of a training meanwhile."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from peers import save_with_dcp_in_background
from raw import Memory, copy, settle
from save_ranks import process_group
from states import STATES, State, empty_like, size_of
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from versus import FULL

from ckptstore import CheckpointStore, open_store

STEP_SIZE = 512
BASE_SECONDS = 1.0 if FULL else 0.1


class Saver(Protocol):
    """Saves in the background."""

    def begin(self) -> Callable[[], bool]:
        """Returns when the state may be changed, with a function that tells whether all is done."""


class Ours:
    """`save_async` of one store."""

    def __init__(self, root: Path, state: State, uploader: str) -> None:
        self.state, self.uploader, self.step = state, uploader, 1
        self.store: CheckpointStore = open_store(root / f"store-{uploader}")
        self.store.save(0, {"epoch": 0})

    def begin(self) -> Callable[[], bool]:
        pending = self.store.save_async(self.step, self.state, uploader=self.uploader)
        self.step += 1
        return pending.done

    def clear(self) -> None:
        for checkpoint in list(self.store):
            shutil.rmtree(checkpoint.uri, ignore_errors=True)

    def close(self) -> None:
        self.store.close()


class Dcp:
    """`dcp.async_save`, with staging memory that is kept from save to save when `cached`. That cannot be pinned where
    there is no accelerator, so DCP gets ordinary memory."""

    def __init__(self, root: Path, state: State, *, cached: bool, by_process: bool = False) -> None:
        self.root, self.state, self.by_process, self.step = root / f"dcp-{cached}-{by_process}", state, by_process, 0
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True) if cached else None
        if self.stager:
            self.stager.state_dict_cache = dict(empty_like(state))

    def begin(self) -> Callable[[], bool]:
        self.step += 1
        future = save_with_dcp_in_background(
            self.state, self.root / str(self.step), stager=self.stager, by_process=self.by_process
        )
        return future.done  # type: ignore[no-any-return]

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _until(done: Callable[[], bool], most_seconds: float = 300.0) -> None:
    deadline = time.monotonic() + most_seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("a save has not ended")
        time.sleep(0.005)


def stalls(directory: str, shape: str, rounds: int) -> dict[str, Any]:
    """Seconds of the call, for first calls and for later ones, and of one memcpy."""
    root = Path(directory)
    with process_group():
        torch.set_num_threads(os.cpu_count() or 1)
        state = STATES[shape]()
        source, target = Memory(size_of(state)), Memory(size_of(state))
        first = {f"ckptstore, {kind}": _first_stalls(root, state, kind, rounds) for kind in ("thread", "process")}
        ours = {f"ckptstore, {kind}": Ours(root, state, kind) for kind in ("thread", "process")}
        theirs = {
            "dcp.async_save, cached stager": Dcp(root, state, cached=True),
            "dcp.async_save": Dcp(root, state, cached=False),
        }
        savers: dict[str, Any] = {**ours, **theirs}
        later: dict[str, list[float]] = {name: [] for name in savers}
        for number in range(rounds + 1):
            for name, saver in savers.items():
                settle(root)
                started = time.perf_counter()
                done = saver.begin()
                seconds = time.perf_counter() - started
                if number:
                    later[name].append(seconds)
                elif name not in ours:
                    first[name] = [seconds]
                _until(done)
                saver.clear()
            for num_threads in (1, 2):
                started = time.perf_counter()
                copy(target, source, num_threads=num_threads)
                seconds = time.perf_counter() - started
                name = f"memcpy, {num_threads} threads"
                (later.setdefault(name, []) if number else first.setdefault(name, [])).append(seconds)
        for saver in ours.values():
            saver.close()
        for memory in (source, target):
            memory.close()
        return {"first": first, "later": later, "size_bytes": size_of(state)}


def _first_stalls(root: Path, state: State, kind: str, rounds: int) -> list[float]:
    """Seconds of the first call after `warm_up`, of as many stores one after another."""
    found = []
    for number in range(rounds):
        saver = Ours(root / f"first-{number}", state, kind)
        saver.store.warm_up(state, uploader=kind)
        settle(root)
        started = time.perf_counter()
        done = saver.begin()
        found.append(time.perf_counter() - started)
        _until(done)
        saver.clear()
        saver.close()
    return found


def slowdowns(directory: str, shape: str, rounds: int) -> dict[str, Any]:
    """Seconds that one background save costs a training, beside its stall: the time of the steps during it, less what
    as many steps take alone. Steps are products of matrices by one thread."""
    root = Path(directory)
    with process_group():
        torch.set_num_threads(1)
        state = STATES[shape]()
        left, right = torch.randn(STEP_SIZE, STEP_SIZE), torch.randn(STEP_SIZE, STEP_SIZE)

        def step() -> None:
            for _ in range(4):
                torch.mm(left, right)
            sum(range(2000))  # a training runs Python too

        savers: dict[str, Any] = {f"ckptstore, {kind}": Ours(root, state, kind) for kind in ("thread", "process")}
        for name, saver in list(savers.items()):
            saver.store.warm_up(state, uploader=name.rpartition(" ")[2])
        savers["dcp.async_save, thread"] = Dcp(root, state, cached=True)
        savers["dcp.async_save, process"] = Dcp(root, state, cached=True, by_process=True)
        cost: dict[str, list[float]] = {name: [] for name in savers}
        steps: dict[str, list[float]] = {name: [] for name in savers}
        for number in range(rounds + 1):
            for name, saver in savers.items():
                settle(root)
                alone = _step_seconds(step)
                done = saver.begin()
                started, count = time.perf_counter(), 0
                while not done():
                    step()
                    count += 1
                seconds = time.perf_counter() - started
                if number:
                    cost[name].append(max(0.0, seconds - count * alone))
                    steps[name].append(seconds / max(1, count) / alone)
                saver.clear()
        for name in ("ckptstore, thread", "ckptstore, process"):
            savers[name].close()
        slower = {name: round(statistics.median(ratios), 3) for name, ratios in steps.items()}
        return {"cost": cost, "step_over_step_alone": slower, "size_bytes": size_of(state)}


def _step_seconds(step: Callable[[], None], seconds: float = BASE_SECONDS) -> float:
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        count += 1
    return (time.perf_counter() - started) / count
