"""Run cases on several ranks at once: processes of one machine, which meet through gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from ckptstore.testing.ranks import run_ranks
from kit.states.case_runner import StateOutcome, run
from kit.states.state_case import StateCase


def run_on_ranks(
    cases: Sequence[StateCase], *, timeout_seconds: float = 600, start: Callable[..., list[Any]] = run_ranks
) -> list[StateOutcome]:
    """Run cases one after the other, on as many ranks as the first one has, and return an outcome for each.

    It is that of the first rank with a fault, else of rank 0. Where the ranks do not end alike, the kind is "ranks
    differ". `start` is `run_ranks`, or a function with its arguments. Raises RanksFailed when a rank dies or hangs,
    with the case in which the ranks diverged.
    """
    found = start(cases[0].num_ranks, _run_all, [case.to_json() for case in cases], timeout_seconds=timeout_seconds)
    return [_joined(case, outcomes) for case, outcomes in zip(cases, zip(*found, strict=True), strict=True)]


def _joined(case: StateCase, outcomes: Sequence[tuple[str, str]]) -> StateOutcome:
    of_ranks = [StateOutcome(case, *outcome) for outcome in outcomes]
    first = next((outcome for outcome in of_ranks if not outcome.ok), of_ranks[0])
    if first.ok and len({outcome.kind for outcome in of_ranks}) > 1:
        return replace(first, kind="ranks differ", detail=", ".join(outcome.kind for outcome in of_ranks))
    return first


def _run_all(texts: Sequence[str]) -> list[tuple[str, str]]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        outcomes = [_run_together(text) for text in texts]
    finally:
        dist.destroy_process_group()
    return [(outcome.kind, outcome.detail) for outcome in outcomes]


def _run_together(text: str) -> StateOutcome:
    """Run a case, and wait until the other ranks end it too: otherwise later cases would fail as well."""
    import torch.distributed as dist

    try:
        outcome = run(StateCase.from_json(text))
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    except RuntimeError as error:
        raise RuntimeError(f"the ranks went apart in {text}: {error}") from error
    return outcome
