"""Seeds of states, run and looked at, for the tests of many of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from forked_ranks import run_ranks
from kit.states import StateOutcome, draw, run, run_on_ranks, script


def check(seeds: Iterable[int], *, num_ranks: int = 1, device: str = "") -> list[str]:
    """Run the cases of seeds; fail with the kinds of faults, a seed and the script of each. The kinds of all."""
    cases = [draw(seed, num_ranks=num_ranks, device=device) for seed in seeds]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outcomes = list(map(run, cases)) if num_ranks == 1 else run_on_ranks(cases, start=run_ranks)
    finally:
        torch.set_num_threads(threads)
    faults: dict[str, StateOutcome] = {}
    for outcome in outcomes:
        if not outcome.ok:
            faults.setdefault(outcome.kind, outcome)
    assert not faults, "\n".join(f"seed {each.case.seed}: {each.detail}\n{script(each)}" for each in faults.values())
    assert sum(outcome.kind == "same" for outcome in outcomes) > len(cases) // 2
    return [outcome.kind for outcome in outcomes]
