"""List the states that ckptstore refuses though torch accepts them, each with its error and its condition."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.errors import CkptstoreError, InvalidState, StateMismatch
from kit.states.state_case import StateCase
from kit.states.tensor_makers import OVERLAPPING


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kind of documented refusal."""

    phase: str
    """"save" or "load"."""
    error: type[CkptstoreError]
    pattern: str
    """Matches the error's text, which names the key."""
    reason: str
    applies: Callable[[StateCase], bool]
    """Returns True if the case has the refused contents."""

    def fits(self, case: StateCase, phase: str, error: CkptstoreError) -> bool:
        """True if this refusal explains the error of a case in a phase."""
        is_it = phase == self.phase and isinstance(error, self.error) and self.applies(case)
        return is_it and re.search(self.pattern, str(error)) is not None


def _has(*names: str) -> Callable[[StateCase], bool]:
    """Return a predicate: one of the case's makers has one of the names."""
    return lambda case: bool(set(names) & {*case.modules, *case.tensors, *case.values})


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "save", InvalidState, r"raw\.\d (sparse|quantised|nested|jagged)",
        "Only dense tensors have one memory whose bytes are their numbers.",
        _has("sparse", "sparse rows", "quantised", "nested", "jagged"),
    ),
    Refusal(
        "save", InvalidState, r"raw\.\d meta is on the meta device", "A meta tensor has no numbers.", _has("meta"),
    ),
    Refusal(
        "save", InvalidState, r"values\.\d (enum|dataclass|function|named tuple|deque)",
        "A value of an unknown class would need a pickle, which can run code when it is read.",
        _has("enum", "dataclass", "function", "named tuple", "deque"),
    ),
    Refusal(
        "save", InvalidState, r"\b[ab]\..*(weight|bias|packed|scale)",
        "Quantised weights keep their numbers where no other process can read them.", _has("quantised"),
    ),
    Refusal(
        "save", InvalidState, r"\b[ab]\..*(weight|bias)", "A lazy parameter has no shape before the first batch.",
        _has("lazy"),
    ),
    Refusal(
        "save", InvalidState, r"optimizer at 'optimizer' has .* and FSDP1 cannot put the parts",
        "FSDP1 shows an optimizer flat pieces of parameters; torch puts only tensors of their sizes together.",
        lambda case: case.wrapper.startswith("fsdp1"),
    ),
    Refusal(
        "load", InvalidState, r"optimizer at 'optimizer' has .* and FSDP1 cannot put the parts",
        "The same holds for a running optimizer that has come to such state since the save.",
        lambda case: (
            case.wrapper.startswith("fsdp1")
            and case.into == "running"
            and case.optimizer in ("lists in state", "global item", "lbfgs")
        ),
    ),
    Refusal(
        "load", StateMismatch, r"optimizer\.state\..* has no .* with which FSDP1 keeps it in one flat parameter",
        "FSDP1 gives the parameters that it keeps in one flat parameter state together, or none of them.",
        lambda case: case.wrapper == "fsdp1 flat" and bool(case.change),
    ),
    Refusal(
        "load", StateMismatch, r"\b[ab]\..* is lazy", "A lazy parameter has no memory to load into.", _has("lazy"),
    ),
    Refusal(
        "load", StateMismatch, r"raw\.\d .*has several elements in the same memory",
        "What one element is filled with would be what another one is read as.",
        lambda case: case.target in OVERLAPPING or bool(set(OVERLAPPING) & set(case.tensors)),
    ),
    Refusal(
        "load", StateMismatch, r"without a place in the state|missing in the checkpoint|nothing called|differ",
        "A strict load wants the same keys on both sides.",
        lambda case: case.strict and case.change not in ("", "upgraded"),
    ),
    Refusal(
        "load", StateMismatch, r"missing in the checkpoint: optimizer\.param_groups\..*\.d\b",
        "A setting that an optimizer has made up since the save would be lost; strict=False keeps it.",
        lambda case: case.strict and case.into == "running" and case.optimizer == "global item",
    ),
)  # fmt: skip
"""In the order of matching. An error that none of them explains is a fault."""


def explanation(case: StateCase, phase: str, error: CkptstoreError) -> Refusal | None:
    """Return the documented refusal that explains an error, None if there is none."""
    return next((refusal for refusal in REFUSALS if refusal.fits(case, phase, error)), None)
