"""What goes to the trash by hand: what a policy does not keep, as a save does in its own record; a roll back."""

from __future__ import annotations

from ckptstore.format.changes import Remove, Resumed
from ckptstore.format.order import SaveOrder, Void
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


def roll_back(
    newest: Record | None, target: Record, *, epoch: int | None, next_save: int = 0
) -> Remove | Resumed | None:
    """The change by which a live checkpoint becomes the latest: those above it go to the trash. None if it is that, and
    the job `epoch` has made no fast checkpoint since.

    Fast checkpoints that are newer than the target are void from then on. Those that the job `epoch` saves afterwards
    are not: `next_save` is the number that its next save gets, where it has saved to the nodes. Where `epoch` is None,
    a job that runs now knows nothing of the roll back, and all that it saves is void.
    """
    if newest is None:
        return None
    state, entry = newest.state, target.entry
    later = tuple(number for number in state.live if number > target.number)
    is_job = epoch is not None and epoch == state.epoch
    next_save = max(next_save, state.save_number + 1)
    if not later and epoch is not None and is_job and next_save > state.save_number + 1:
        return Resumed(epoch=epoch, source=entry.order, attempt=entry.attempt, next_save=next_save)
    if not later:
        return None
    before = SaveOrder(state.epoch, next_save) if is_job else SaveOrder(state.epoch + 1, 0)
    voids = Void(entry.order, before)
    return Remove(trash=later, epoch=epoch, reason=f"roll back to step {target.entry.step}", voids=voids)


def verdicts_on(log: Log, newest: Record | None, policy: Policy) -> list[Verdict]:
    """What the policy says of every live checkpoint, oldest first."""
    if newest is None:
        return []
    state = newest.state
    protected = state.protected(latest=state.latest)
    return decide(policy, candidates(log, newest, timed=policy.compares_times()), protected=protected)
