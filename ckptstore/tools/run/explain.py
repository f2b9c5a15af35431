"""Say what is taken for what in a folder, and what to write for the rest."""

from __future__ import annotations

import re

from ckptstore.tools.run.folders import Look, Prospect


def rule_of(candidate: Prospect) -> str:
    """Return where the step of a candidate is from, for people."""
    if candidate.is_exact and candidate.step is not None:
        return f"its step is {candidate.step}"
    if candidate.step is not None:
        return f"its step is taken to be {candidate.step}; --step-from or {{step}} in the pattern says it for certain"
    return "nothing says its step, so the store counts; --step-from or {step} in the pattern says it"


def explained(look: Look) -> list[dict[str, str]]:
    """Return what would be done with everything in a folder, for people."""
    rows = []
    for it in look.candidates:
        why = look.refused.get(it.name) or look.unfinished.get(it.name)
        verdict = "would be committed" if why is None else f"not yet: {why}" if it.name not in look.refused else why
        rows.append({"name": it.name, "shape": it.shape, "step": rule_of(it), "verdict": verdict})
    return rows


def pattern_for(name: str) -> str:
    """Return the pattern that fits a name and those of other steps."""
    return re.sub(r"\d+", "*", name)
