"""Whether records follow on each other. Pure."""

from __future__ import annotations

from dataclasses import replace

from ckptstore.errors import CkptstoreError
from ckptstore.format.changes import EMPTY, apply
from ckptstore.format.layout import record_key
from ckptstore.format.record import Record


def link_problem(before: Record | None, record: Record) -> str | None:
    """What is wrong between a record and the one before it, None if nothing is; the first one has none before it."""
    if record.previous == (before.sha256 if before else ""):
        return None
    return f"{record_key(record.number)} was not written after the {record_key(record.number - 1)} that is there now"


def record_problem(number: int, before: Record | None, found: Record | CkptstoreError | None) -> list[str]:
    """What is wrong with what was found at a number, the record before it given where it could be read."""
    if found is None:
        return [f"{record_key(number)} is missing"]
    if isinstance(found, CkptstoreError):
        return [found.message]
    if before is None and number > 1:
        return []
    problem = link_problem(before, found)
    if problem:
        return [problem]
    try:
        expected = apply(before.state if before else EMPTY, number, found.change)
        if replace(expected, extra={}) == replace(found.state, extra={}):
            return []
    except CkptstoreError as error:
        return [f"{record_key(number)} breaks a rule: {error.message}"]
    return [f"{record_key(number)} has a state that its change does not lead to"]
