"""Put checkpoints in the trash by hand: apply a policy, as a save does in its own record, roll back, or remove."""

from __future__ import annotations

from collections.abc import Collection

from ckptstore.errors import InvalidInput
from ckptstore.format.changes import EMPTY, Remove, Resumed
from ckptstore.format.order import BEGINNING, SaveOrder, Void
from ckptstore.format.record import Record
from ckptstore.job import candidates, record_of_step
from ckptstore.log import Log
from ckptstore.retention import KeepBest, Policy, Verdict, check_metric_exists, decide

_BY_HAND = "removed by hand"


def retain(log: Log, policy: Policy, *, dry_run: bool = False) -> list[Verdict]:
    """Put every live checkpoint that `policy` does not keep in the trash, and return the verdict on each; see
    `Catalogue.retain`. The record has no writer epoch: it fences nobody."""
    verdicts: list[Verdict] = []

    def change(newest: Record | None) -> Remove | None:
        metrics = sorted(policy.required_metrics())
        found = candidates(log, newest, timed=False) if metrics else []
        for metric in metrics:
            if isinstance(policy, KeepBest) or any(one.metrics for one in found):
                check_metric_exists(found, metric)
        verdicts[:] = verdicts_on(log, newest, policy)
        drops = tuple(verdict.number for verdict in verdicts if not verdict.keep)
        return Remove(trash=drops, reason="retention by hand") if drops else None

    if dry_run:
        change(log.newest())
    else:
        log.append(change)
    return verdicts


def roll_back(
    newest: Record | None, target: Record | None, *, epoch: int | None, next_save: int = 0, unpins: bool = False
) -> Remove | Resumed | None:
    """Return the change that makes a live checkpoint the latest: those above it go to the trash, all for None.

    Return None if it is the latest and the job `epoch` has made no fast checkpoint since.

    Fast checkpoints that are newer than the target become void, but not those that the job `epoch` saves afterwards:
    `next_save` is the number of its next save, if it has saved to the nodes. If `epoch` is None, a running job does not
    know of the roll back, and all its saves to the nodes are void. Only with `unpins` may pinned ones go.
    """
    if newest is None:
        return None
    state = newest.state
    order, attempt = (target.entry.order, target.entry.attempt) if target else (BEGINNING, "")
    if target is not None and target.entry.thinned is not None:
        raise InvalidInput(
            f"Step {target.entry.step} {target.entry.thinned}, so no job can go on from it",
            step=target.entry.step,
            hint="Restore the whole one, as long as it is in the trash, or choose another step",
        )
    later = tuple(number for number in state.live if target is None or state.place(number) > state.place(target.number))
    is_job = epoch is not None and epoch == state.epoch
    next_save = max(next_save, state.save_number + 1)
    if not later and epoch is not None and is_job and next_save > state.save_number + 1:
        return Resumed(epoch=epoch, source=order, attempt=attempt, next_save=next_save)
    if not later:
        return None
    before = SaveOrder(state.epoch, next_save) if is_job else SaveOrder(state.epoch + 1, 0)
    reason = f"roll back to step {target.entry.step}" if target else _BY_HAND
    unpins = unpins and not state.pinned.isdisjoint(later)
    return Remove(trash=later, epoch=epoch, reason=reason, voids=Void(order, before), unpins=unpins)


def remove(
    log: Log, newest: Record | None, step: int, *, epoch: int | None, next_save: int, force: bool
) -> Remove | Resumed | None:
    """Return the change that puts the live checkpoint of a step in the trash; see `Catalogue.remove`.

    Of the latest it is a roll back to the one before it. With `force` the same change takes the pin of a pinned one.
    """
    target = record_of_step(log, newest, step)
    state, number = newest.state if newest else EMPTY, target.number
    earlier = [other for other in state.in_order() if state.place(other) < state.place(number)]
    before = earlier[-1] if earlier else None
    if not force:
        users = [record.entry.step for record in log.records(state.bases.get(number, ()))]
        why = state.protected(latest=state.latest).get(number, "")
        why = why or (f"step {', '.join(map(str, users))} refers to its files" if users else "")
        if why:
            raise InvalidInput(
                f"Step {step} was not removed: {why}",
                step=step,
                hint="With force it goes to the trash all the same; its files stay as long as they are needed",
            )
    if number != state.latest:
        return Remove(trash=(number,), epoch=epoch, reason=_BY_HAND, unpins=number in state.pinned)
    record = None if before is None else log.records([before])[0]
    if record is not None and record.entry.thinned is not None:
        raise InvalidInput(
            f"Step {step} was not removed: step {record.entry.step} before it {record.entry.thinned}, so no job could"
            " go on from what is left",
            step=step,
            hint="Remove that one first, restore the whole one of it, or remove all checkpoints",
        )
    return roll_back(newest, record, epoch=epoch, next_save=next_save, unpins=force)


def verdicts_on(log: Log, newest: Record | None, policy: Policy, *, unthinned: Collection[int] = ()) -> list[Verdict]:
    """Return the verdict of the policy on every live checkpoint, oldest first. `unthinned` as for `candidates`."""
    if newest is None:
        return []
    state = newest.state
    protected = state.protected(latest=state.latest)
    found = candidates(log, newest, timed=policy.compares_times(), unthinned=unthinned)
    return decide(policy, found, protected=protected)
