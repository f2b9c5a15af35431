"""The health of a job with a fast tier: the age of the last checkpoint, on the nodes and in the store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckptstore.format.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """The lag of the store behind the checkpoints that this process has saved since it opened it, or resumed from."""

    fast_step: int | None
    """The step of the last checkpoint that was complete on the nodes; None if there is none."""
    fast_age_seconds: float | None
    """The time since it was complete there. If the job resumed from it: since its save, by the clocks of both leaders.
    """
    durable_step: int | None
    """The step of the last checkpoint that reached the store; None if there is none."""
    durable_age_seconds: float | None
    """The time since it reached the store; after a resume as above."""
    draining: int | None
    """The step that is being drained now."""
    waiting: int | None
    """The step that is drained next."""
    not_durable_seconds: float | None
    """The time for which the oldest fast checkpoint has waited for the store, failed drains included; None while the
    store has the newest one."""
    away_seconds: float | None
    """The time for which the store has not answered; None while it does."""
    error: str | None
    """The last error of the store or of a drain; None since the last checkpoint that reached the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHealth:
    """The lag of the store behind the fast checkpoints. Moments are those of `time.monotonic`."""

    draining: int | None
    """The step that is being drained now."""
    waiting: int | None
    """The step that is drained next."""
    durable_step: int | None
    """The step of the last checkpoint that this process drained."""
    durable_at: float | None
    """The moment at which it became durable."""
    not_durable_since: float | None
    """The moment at which the oldest fast checkpoint was saved that is not durable and has no newer durable one; None
    if there is none."""
    away_since: float | None
    """The moment of the store's first failure, if it has not answered since; None while it does."""
    error: str | None
    """The last error of the store or of a drain."""


Moment = tuple[int, float]
"""A step, and the moment of `time.monotonic` at which it was complete or durable."""


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """The checkpoint that the job resumed from."""

    moment: Moment
    is_durable: bool

    @staticmethod
    def of(step: int, created_at: float, *, is_durable: bool) -> ResumedFrom:
        """Convert `created_at`, in seconds since the epoch, to a moment."""
        return ResumedFrom((step, time.monotonic() - max(0.0, time.time() - created_at)), is_durable)


def health_of(
    fast: Moment | None,
    saved: tuple[Record, float] | None,
    drains: DrainHealth | None,
    resumed: ResumedFrom | None = None,
) -> StoreHealth:
    """Build the health from the last fast checkpoint, the last one saved to the store directly, the drains, and the
    checkpoint that the job resumed from."""
    now = time.monotonic()
    durable = None if saved is None else (saved[0].entry.step, saved[1])
    behind_since = drains.not_durable_since if drains else None
    if durable is not None and behind_since is not None:  # only a fast checkpoint saved after it counts
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
