"""Save and load states like users' with ckptstore and with torch.save, and compare the results bit by bit.

    outcome = run(42)                                  # the case of a seed
    assert outcome.ok, outcome.detail
    check(state, make=make_state)                      # your own state

A seed decides the contents of the state, its life before the save, the way it is saved, and the target of the load.
ckptstore must give back what `load_state_dict` gives back from `torch.load`, also after one more training step, or
refuse with one of `REFUSALS`. `python -m ckptstore.testing.states` runs seeds too.
"""

from __future__ import annotations

from ckptstore.runtime.extras import needs

needs("torch")

from ckptstore.testing.states.case_runner import StateOutcome, run  # noqa: E402
from ckptstore.testing.states.case_shrink import script, shrink  # noqa: E402
from ckptstore.testing.states.own_state import StateDiffers, check  # noqa: E402
from ckptstore.testing.states.refusals import REFUSALS, Refusal  # noqa: E402
from ckptstore.testing.states.several_ranks import run_on_ranks  # noqa: E402
from ckptstore.testing.states.state_case import StateCase, draw  # noqa: E402

__all__ = [
    "REFUSALS",
    "Refusal",
    "StateCase",
    "StateDiffers",
    "StateOutcome",
    "check",
    "draw",
    "run",
    "run_on_ranks",
    "script",
    "shrink",
]
