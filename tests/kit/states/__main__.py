"""Run seeds, or one, by `python -m kit.states`; shrink a failing one and write it as a script."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from kit.simulation.__main__ import check_some
from kit.simulation.simulator import write
from kit.states.case_runner import StateOutcome, run
from kit.states.case_shrink import script, shrink
from kit.states.several_ranks import run_on_ranks
from kit.states.state_case import StateCase, draw

_AT_ONCE = 200
"""Cases that the same processes of several ranks run."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 when a case failed."""
    parser = argparse.ArgumentParser(prog="python -m kit.states", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="how many seeds; 1 without --seconds")
    parser.add_argument("--seconds", type=float, help="run seeds for so long")
    parser.add_argument("--ranks", type=int, default=1, help="in how many processes each case runs")
    parser.add_argument("--device", default="", help="where modules and tensors lie: cuda, for instance (the host)")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first seed that fails")
    parser.add_argument("--script", type=Path, help="where to write the script of a failing seed (a temporary file)")
    options = parser.parse_args(arguments)
    check_some(parser, options, "count", "seconds", "ranks")
    _check_device(parser, options.device)
    if options.script is not None and not options.script.parent.is_dir():
        parser.error(f"--script is {options.script}, and there is no such directory")
    count = 1 if options.count is None and options.seconds is None else options.count
    began, seed, ends = time.monotonic(), options.seed, Counter[str]()
    first: dict[str, StateOutcome] = {}
    while (count is None or seed - options.seed < count) and (options.keep_going or not first):
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        at_once = 1 if options.ranks == 1 else min(_AT_ONCE, _AT_ONCE if count is None else options.seed + count - seed)
        cases = [draw(each, num_ranks=options.ranks, device=options.device) for each in range(seed, seed + at_once)]
        seed += at_once
        for outcome in _run_all(cases):
            ends[outcome.kind] += 1
            if not outcome.ok:
                first.setdefault(outcome.kind, outcome)
    seconds = time.monotonic() - began
    write(f"{seed - options.seed} seeds in {seconds:.1f} s; {sum(ends[kind] for kind in first)} failed")
    for kind, times in ends.most_common():
        where = f" (seed {first[kind].case.seed}: {first[kind].detail[:200]})" if kind in first else ""
        write(f"  {times:5} {kind}{where}")
    if first and not options.keep_going:
        _show(next(iter(first.values())), options.script)
    return 1 if first else 0


def _check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End with an error for a device that torch has not here: no program could be built, and none would fail."""
    try:
        torch.zeros(1, device=device or "cpu")
    except Exception as error:  # torch raises an AssertionError without CUDA
        parser.error(f"--device is {device!r}, and torch has nothing there: {str(error).partition(chr(10))[0]}")


def _run_all(cases: list[StateCase]) -> list[StateOutcome]:
    return list(map(run, cases)) if cases[0].num_ranks == 1 else run_on_ranks(cases)


def _show(outcome: StateOutcome, path: Path | None) -> None:
    """Write the script of the smallest case that fails as this one does."""
    text = script(shrink(outcome, runs=lambda case: _run_all([case])[0]))
    if path is None:
        with tempfile.NamedTemporaryFile("w", prefix=f"state-{outcome.case.seed}-", suffix=".py", delete=False) as file:
            path = Path(file.name)
    path.write_text(text)
    write(f"\n# {path}\n{text}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small, and several such processes run beside each other
    sys.exit(main())
