"""Shrink a failing case to a smaller one that fails in the same way, and write a script that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kit.states.case_runner import StateOutcome, run
from kit.states.state_case import StateCase


def shrink(outcome: StateOutcome, *, runs: Callable[[StateCase], StateOutcome] = run) -> StateOutcome:
    """Return the outcome of the smallest case found that fails with the same `kind`.

    Every field of it has its default, or is needed for the failure; so has every item of its lists.
    """
    smaller = True
    while smaller:
        smaller = False
        for case in _smaller(outcome.case):
            found = runs(case)
            if found.kind == outcome.kind:
                outcome, smaller = found, True
                break
    return outcome


def _smaller(case: StateCase) -> Iterator[StateCase]:
    """Yield the case with one field less, then with one item less."""
    plain: Any = StateCase(case.seed)
    named = [field.name for field in fields(case) if field.name not in ("seed", "num_ranks")]
    for name in named:
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    for name in named:
        value = getattr(case, name)
        if isinstance(value, tuple) and len(value) > 1:
            for at in range(len(value)):
                fewer: dict[str, Any] = {name: value[:at] + value[at + 1 :]}
                yield replace(case, **fewer)


def script(outcome: StateOutcome) -> str:
    """Return a Python program that runs the case alone, prints its outcome, and ends with 1 while it fails."""
    runs = "run(case)" if outcome.case.num_ranks == 1 else "run_on_ranks([case])[0]"
    return f'''"""{outcome.kind.replace('"', "'")}"""

import sys

sys.path.append({str(Path(__file__).parents[2])!r})

from kit.states import StateCase, {runs.partition("(")[0]}

if __name__ == "__main__":
    case = StateCase.from_json({outcome.case.to_json()!r})
    outcome = {runs}
    print(outcome.kind, outcome.detail, sep="\\n")
    raise SystemExit(0 if outcome.ok else 1)
'''
