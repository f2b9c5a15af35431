"""Save and load states like users' with ckptstore and with torch.save, and compare the results bit by bit.

    outcome = run(42)                                  # the case of a seed
    assert outcome.ok, outcome.detail

A seed decides the contents of the state, its life before the save, the way it is saved, and the target of the load.
ckptstore must give back what `load_state_dict` gives back from `torch.load`, also after one more training step, or
refuse with one of `REFUSALS`. `python -m kit.states` runs seeds too.
"""

from __future__ import annotations

from kit.states.case_runner import StateOutcome, run
from kit.states.case_shrink import script, shrink
from kit.states.refusals import REFUSALS, Refusal
from kit.states.several_ranks import run_on_ranks
from kit.states.state_case import StateCase, draw

__all__ = [
    "REFUSALS",
    "Refusal",
    "StateCase",
    "StateOutcome",
    "draw",
    "run",
    "run_on_ranks",
    "script",
    "shrink",
]
