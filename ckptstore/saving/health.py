"""What an operator watches of a job with a fast tier: how old the last checkpoint is, on the nodes and in the store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckptstore.format.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """How far the store is behind what this process has saved since it opened it, or resumed from."""

    fast_step: int | None
    """The step that was complete on the nodes last; None where none was."""
    fast_age_seconds: float | None
    """Since when. Of one that the job resumed from, since it was saved, by the clocks of both leaders."""
    durable_step: int | None
    """The step that came into the store last; None where none did."""
    durable_age_seconds: float | None
    """Since when; as above."""
    draining: int | None
    """The step that is brought into the store now."""
    waiting: int | None
    """The step that comes next."""
    not_durable_seconds: float | None
    """How long the oldest fast checkpoint has waited for the store, those that failed to come there too; None while the
    store has the newest one."""
    away_seconds: float | None
    """How long the store has not answered; None while all is well."""
    error: str | None
    """What the store failed with last, or a checkpoint that did not come there; None since the last one that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHealth:
    """How far the store is behind the fast checkpoints. Moments are those of `time.monotonic`."""

    draining: int | None
    """The step that is brought into the store now."""
    waiting: int | None
    """The step that comes next."""
    durable_step: int | None
    """The step that became durable last, as far as this process brought it there."""
    durable_at: float | None
    """When that was."""
    not_durable_since: float | None
    """When the oldest fast checkpoint was saved that is not durable, nor is a newer one; None where all are."""
    away_since: float | None
    """When the store failed first, if it has not answered since; None while all is well."""
    error: str | None
    """What the store failed with last, or a checkpoint that did not come there."""


Moment = tuple[int, float]
"""A step, and the moment of `time.monotonic` at which something became of it."""


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """What the job goes on from."""

    moment: Moment
    is_durable: bool

    @staticmethod
    def of(step: int, created_at: float, *, is_durable: bool) -> ResumedFrom:
        """`created_at` is in seconds since the epoch."""
        return ResumedFrom((step, time.monotonic() - max(0.0, time.time() - created_at)), is_durable)


def health_of(
    fast: Moment | None,
    saved: tuple[Record, float] | None,
    drains: DrainHealth | None,
    resumed: ResumedFrom | None = None,
) -> StoreHealth:
    """From the last fast checkpoint, the last one that was saved to the store directly, the drains, and what the job
    resumed from."""
    now = time.monotonic()
    durable = None if saved is None else (saved[0].entry.step, saved[1])
    behind_since = drains.not_durable_since if drains else None
    if durable is not None and behind_since is not None:  # only what was saved after it is newer
        behind_since = None if fast is None or fast[1] < durable[1] else max(behind_since, durable[1])
    if drains is not None and drains.durable_step is not None and drains.durable_at is not None:
        drained = drains.durable_step, drains.durable_at
        durable = drained if durable is None else max(durable, drained, key=lambda moment: moment[1])
    if resumed is not None and resumed.is_durable:
        durable = durable or resumed.moment
    elif resumed is not None:
        fast = fast or resumed.moment
        if durable is None:
            behind_since = min(behind_since or resumed.moment[1], resumed.moment[1])

    def age(moment: float | None) -> float | None:
        return None if moment is None else now - moment

    return StoreHealth(
        fast_step=fast[0] if fast else None,
        fast_age_seconds=age(fast[1] if fast else None),
        durable_step=durable[0] if durable else None,
        durable_age_seconds=age(durable[1] if durable else None),
        draining=drains.draining if drains else None,
        waiting=drains.waiting if drains else None,
        not_durable_seconds=age(behind_since),
        away_seconds=age(drains.away_since if drains else None),
        error=drains.error if drains else None,
    )
