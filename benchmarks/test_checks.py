"""What a save costs that checks itself: a sample of its own copies, and comparing what ranks are to have alike.

Times are those of the processor, of several saves in turns: the machine may do what it likes meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sizes import FULL, ROUNDS, count, group

from ckptstore import KeepLatest, open_store
from ckptstore.saving.staging import Staging
from ckptstore.state import replicated
from ckptstore.state.write.shard_files import CopyCheck

SIZE_BYTES = (1024 if FULL else 64) << 20
ALIKE_BYTES = (256 if FULL else 32) << 20
SAVES = 2 + 5 * ROUNDS


@pytest.mark.parametrize("tensor_bytes", [64 << 20, 2 << 20], ids=["64 MiB", "2 MiB"])
@group("Checking a sample of the copies of a save")
def test_sample_of_copies(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_bytes: int) -> None:
    checks: list[float] = []
    copies: list[float] = []

    def clocked(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            before = time.process_time()
            try:
                return call(*given, **named)
            finally:
                times.append(time.process_time() - before)

        return run

    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", "sample")
    monkeypatch.setattr(CopyCheck, "__init__", clocked(CopyCheck.__init__, checks))
    monkeypatch.setattr(CopyCheck, "compare", clocked(CopyCheck.compare, checks))
    monkeypatch.setattr(Staging, "stage", clocked(Staging.stage, copies))
    state = {str(number): torch.ones(tensor_bytes // 4) for number in range(SIZE_BYTES // tensor_bytes)}
    with open_store(tmp_path, retention=KeepLatest(1), grace_seconds=0, group="solo", durable=False) as store:

        def save() -> None:
            store.save_async(len(copies), state).result()
            count(sum(checks[-2:]))

        benchmark.pedantic(save, rounds=SAVES)
    assert len(checks) == 2 * len(copies) == 2 * SAVES
    copy = median(copies)
    share = median(map(sum, zip(checks[::2], checks[1::2], strict=True))) / copy
    benchmark.extra_info.update(size_bytes=SIZE_BYTES, copy_seconds=copy, share_of_the_copy=share)


def saves(directory: str) -> dict[str, list[float]]:
    """Seconds of the processor of a save that compares what two ranks have alike, and of one that does not."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    state = {"weight": replicated(torch.ones(ALIKE_BYTES // 4))}
    how: dict[str, Any] = {"retention": KeepLatest(1), "grace_seconds": 0, "durable": False}
    comparing: list[float] = []
    plain: list[float] = []
    with (
        open_store(f"{directory}/1", compare_every=1, **how) as every,
        open_store(f"{directory}/2", compare_every=10**6, **how) as never,
    ):
        for step in range(SAVES):
            for store, seconds in ((every, comparing), (never, plain)):
                before = time.process_time()
                store.save(step, state)
                seconds.append(time.process_time() - before)
    torch.distributed.destroy_process_group()
    return {"comparing": comparing[1:], "plain": plain[1:]}  # the first save compares, whatever is asked for


@pytest.fixture(scope="module")
def seconds_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Those of the first of two ranks that have everything alike, saved in both ways in turns."""
    found: dict[str, list[float]] = run_ranks(2, saves, str(tmp_path_factory.mktemp("stores")), timeout_seconds=300)[0]
    return found


@group("A save of what two ranks have alike, processor seconds of one rank")
@pytest.mark.parametrize("way", ["comparing", "plain"])
def test_comparing_of_ranks(benchmark: Any, seconds_of: dict[str, list[float]], way: str) -> None:
    found = iter(seconds_of[way])
    benchmark.pedantic(lambda: count(next(found)), rounds=SAVES - 1)
    cost = median(seconds_of["comparing"]) / median(seconds_of["plain"]) - 1
    benchmark.extra_info.update(size_bytes=ALIKE_BYTES, cost=cost, cost_at_one_in_16=cost / 16)
