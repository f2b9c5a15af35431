"""What goes to the trash by hand: what a policy does not keep, as a save does in its own record; a roll back."""

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


def roll_back(newest: Record | None, target: Record, *, epoch: int | None) -> Remove | None:
    """The change by which a live checkpoint becomes the latest: those above it go to the trash. None if it is that."""
    live = newest.state.live if newest else ()
    later = tuple(number for number in live if number > target.number)
    return Remove(trash=later, epoch=epoch, reason=f"roll back to step {target.entry.step}") if later else None


def verdicts_on(log: Log, newest: Record | None, policy: Policy) -> list[Verdict]:
    """What the policy says of every live checkpoint, oldest first."""
    if newest is None:
        return []
    state = newest.state
    protected = state.protected(latest=state.latest)
    return decide(policy, candidates(log, newest, timed=policy.compares_times()), protected=protected)
