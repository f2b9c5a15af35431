"""Retention from outside of a job: put in the trash what a policy does not keep. A save does this in its own record."""

from __future__ import annotations

from ckptstore.format.changes import Remove
from ckptstore.format.record import Record
from ckptstore.job import candidates
from ckptstore.log import Log
from ckptstore.retention import Policy, Verdict, decide


def retain(log: Log, policy: Policy, *, dry_run: bool = False) -> list[Verdict]:
    """Put every live checkpoint in the trash that `policy` does not keep, and return the verdict on each.

    The latest, pinned ones and the resume source stay. It carries no writer epoch: it fences nobody, and a job that
    runs goes on with its own policy at its next save. A dry run returns the same verdicts and changes nothing.
    """
    verdicts: list[Verdict] = []

    def change(newest: Record | None) -> Remove | None:
        verdicts[:] = verdicts_on(log, newest, policy)
        drops = tuple(verdict.number for verdict in verdicts if not verdict.keep)
        return Remove(trash=drops, reason="retention by hand") if drops else None

    if dry_run:
        change(log.newest())
    else:
        log.append(change)
    return verdicts


def verdicts_on(log: Log, newest: Record | None, policy: Policy) -> list[Verdict]:
    """What the policy says of every live checkpoint, oldest first."""
    if newest is None:
        return []
    state = newest.state
    protected = state.protected(latest=state.latest)
    return decide(policy, candidates(log, newest, timed=policy.compares_times()), protected=protected)
