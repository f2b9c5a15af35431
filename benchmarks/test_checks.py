"""What a save costs that checks itself: a sample of its own copies, and comparing what ranks are to have alike.

    pytest benchmarks/test_checks.py -s

Times are those of the processor, the medians of several saves in turns: the machine may do what it likes meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from sizes import FULL, ROUNDS

from ckptstore import KeepLatest, open_store
from ckptstore.saving.staging import Staging
from ckptstore.state import replicated
from ckptstore.state.write.shard_files import CopyCheck
from ckptstore.testing import run_ranks

SIZE_BYTES = (1024 if FULL else 64) << 20
ALIKE_BYTES = (256 if FULL else 32) << 20
SAVES = 2 + 5 * ROUNDS


@pytest.mark.parametrize("tensor_bytes", [64 << 20, 2 << 20], ids=["64 MiB", "2 MiB"])
def test_copies_are_sampled_cheaply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_bytes: int) -> None:
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
        for step in range(SAVES):
            store.save_async(step, state).result()
    assert len(checks) == 2 * len(copies) == 2 * SAVES
    check, copy = median(map(sum, zip(checks[::2], checks[1::2], strict=True))), median(copies)
    print(f"\n{len(state)} tensors: {check * 1e3:.2f} ms to check, {copy * 1e3:.0f} ms to copy, {check / copy:.2%}")


def saves(directory: str) -> tuple[float, float]:
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
    return median(comparing[1:]), median(plain[1:])  # the first save compares, whatever is asked for


def test_what_ranks_have_alike_is_compared_cheaply(tmp_path: Path) -> None:
    comparing, plain = run_ranks(2, saves, str(tmp_path), timeout_seconds=300)[0]
    print(
        f"\n{ALIKE_BYTES >> 20} MiB on two ranks: {plain * 1e3:.0f} ms of a processor for a save, "
        f"{(comparing - plain) * 1e3:.0f} ms more for one that compares: {comparing / plain - 1:.1%} of it, "
        f"{(comparing / plain - 1) / 16:.2%} at one in 16"
    )
