"""The instruments of a fast tier: the nodes' newest checkpoint, the lag of the store, and the cost of drains.

A checkpoint that is complete on the nodes waits for the store until it, or a newer one, is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from ckptstore.events import (
    CheckpointCommitted,
    CheckpointResumed,
    DrainEnded,
    DrainFailed,
    DrainRecovered,
    DrainStalled,
    FastCommitted,
)
from ckptstore.integrations.otel.names import IS_SUPERSEDED, RANK, STORE
from ckptstore.runtime.fork import new_lock_in_child

TierEvent = (
    FastCommitted | CheckpointCommitted | CheckpointResumed | DrainEnded | DrainFailed | DrainStalled | DrainRecovered
)
Place = tuple[str, int]
"""A store and a rank."""


@dataclass(slots=True)
class _Tier:
    """One rank's view of its fast tier, by the clock of this machine."""

    step: int
    complete_at: float
    waiting: dict[str, float] = field(default_factory=dict)
    """Maps attempts that neither are in the store nor have a newer one there to their completion, oldest first."""
    away_since: float | None = None


class DrainMeters:
    """The instruments of one provider. Safe for threads."""

    def __init__(self, meter: metrics.Meter, bounds_seconds: Sequence[float]) -> None:
        self._tiers: dict[Place, _Tier] = {}
        self._lock = threading.Lock()
        new_lock_in_child(self, "_lock")
        bounds = {"explicit_bucket_boundaries_advisory": bounds_seconds}
        self._duration = meter.create_histogram(
            "ckptstore.drain.duration", "s", "How long a rank took to bring a fast checkpoint into the store.", **bounds
        )
        self._delay = meter.create_histogram(
            "ckptstore.drain.delay",
            "s",
            "From when a checkpoint was complete on nodes to when it was durable.",
            **bounds,
        )
        self._io = meter.create_counter("ckptstore.drain.io", "By", "Bytes that drains sent to the store.")
        gauges: list[tuple[str, str, str, Callable[[_Tier, float], float]]] = [
            ("fast.step", "{step}", "The step of the last fast checkpoint.", lambda tier, _: tier.step),
            (
                "fast.age",
                "s",
                "The time since the last fast checkpoint was complete.",
                lambda tier, now: now - tier.complete_at,
            ),
            (
                "drain.age",
                "s",
                "How long the oldest fast checkpoint has waited for the store; 0 while none waits.",
                lambda tier, now: now - next(iter(tier.waiting.values()), now),
            ),
            (
                "drain.away",
                "s",
                "How long the store has not answered drains; 0 while it does.",
                lambda tier, now: now - (tier.away_since or now),
            ),
        ]
        for name, unit, description, value in gauges:
            meter.create_observable_gauge(f"ckptstore.{name}", [self._observer(value)], unit, description)

    def clear(self) -> None:
        """Drop all values; gauges have none until the next event."""
        with self._lock:
            self._tiers.clear()

    def observe(self, event: TierEvent) -> None:
        """Take an event of a fast checkpoint; others are ignored."""
        now = time.time()
        with self._lock:
            self._follow(event, (event.store, event.rank), now)

    def stored(self, store: str, rank: int) -> None:
        """Note that a save went to the store directly: it is newer than all waiting ones."""
        with self._lock:
            if (tier := self._tiers.get((store, rank))) is not None:
                tier.waiting.clear()

    def _follow(self, event: TierEvent, place: Place, now: float) -> None:
        where: dict[str, str | int] = {STORE: place[0], RANK: place[1]}
        if isinstance(event, FastCommitted):
            self._complete(place, event.step, now).waiting[event.attempt] = now
            return
        if isinstance(event, CheckpointResumed):
            if event.number is None:
                self._complete(place, event.step, min(now, event.created_at))
            return
        tier = self._tiers.get(place)
        if tier is None:
            return
        if isinstance(event, CheckpointCommitted):
            self._durable(tier, event.attempt, now, where)
        elif isinstance(event, DrainEnded):
            tier.away_since = None
            self._duration.record(event.seconds, {**where, IS_SUPERSEDED: event.is_superseded})
            self._io.add(event.size_bytes, where)
        elif isinstance(event, DrainStalled):
            tier.away_since = now
        else:
            tier.away_since = None

    def _complete(self, place: Place, step: int, at: float) -> _Tier:
        tier = self._tiers.setdefault(place, _Tier(step, at))
        tier.step, tier.complete_at = step, at
        return tier

    def _durable(self, tier: _Tier, attempt: str, now: float, where: dict[str, str | int]) -> None:
        complete_at = tier.waiting.get(attempt)
        if complete_at is None:
            return
        self._delay.record(max(0.0, now - complete_at), where)
        for older in list(tier.waiting):
            del tier.waiting[older]
            if older == attempt:
                return

    def _observer(self, value: Callable[[_Tier, float], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observations(_options: CallbackOptions) -> Iterable[Observation]:
            now = time.time()
            with self._lock:
                return [
                    Observation(max(0.0, value(tier, now)), {STORE: store, RANK: rank})
                    for (store, rank), tier in self._tiers.items()
                ]

        return observations
