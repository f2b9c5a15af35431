"""The instruments: the cost of saves and loads, their bytes and failures, and the newest durable checkpoint.

Of a fast tier they show the nodes' newest checkpoint, the lag of the store, and the cost of drains: a checkpoint that
is complete on the nodes waits for the store until it, or a newer one, is there.

Attributes are few, and have few values: the store, the rank, save or load. Steps and keys are in spans alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    LoadEnded,
    SaveEnded,
)
from ckptstore.integrations.otel.names import (
    DIRECTION,
    ERROR_TYPE,
    IN_BACKGROUND,
    IS_FAST,
    IS_SUPERSEDED,
    OPERATION,
    RANK,
    STORE,
)
from ckptstore.runtime.fork import new_lock_in_child

_BOUNDS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)

_BOUNDS = {"explicit_bucket_boundaries_advisory": _BOUNDS_SECONDS}

_Attributes = dict[str, str | int]


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
    """The instruments of a fast tier. Safe for threads."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._tiers: dict[Place, _Tier] = {}
        self._lock = threading.Lock()
        new_lock_in_child(self, "_lock")
        self._duration = meter.create_histogram(
            "ckptstore.drain.duration",
            "s",
            "How long a rank took to bring a fast checkpoint into the store.",
            **_BOUNDS,
        )
        self._delay = meter.create_histogram(
            "ckptstore.drain.delay",
            "s",
            "From when a checkpoint was complete on nodes to when it was durable.",
            **_BOUNDS,
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


class Meters:
    """The instruments of one provider. Safe for threads."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._is_on = False
        self._durable: dict[tuple[str, int], tuple[int, float]] = {}
        """Maps store and rank to the step of the last known commit and its time since the epoch."""
        self._lock = threading.Lock()
        new_lock_in_child(self, "_lock")
        self._blocked = meter.create_histogram(
            "ckptstore.save.blocked", "s", "How long a save held up the training.", **_BOUNDS
        )
        self._save_duration = meter.create_histogram(
            "ckptstore.save.duration", "s", "From the call of a save to its end, the background included.", **_BOUNDS
        )
        self._load_duration = meter.create_histogram(
            "ckptstore.load.duration", "s", "From the call of a load to its end.", **_BOUNDS
        )
        self._io = meter.create_counter("ckptstore.io", "By", "Bytes that saves wrote and loads read.")
        self._requests = meter.create_counter("ckptstore.requests", "{request}", "Requests to the storage.")
        self._retries = meter.create_counter("ckptstore.retries", "{request}", "Requests that were made again.")
        self._failures = meter.create_counter(
            "ckptstore.failures", "{operation}", "Saves, loads and drains that failed."
        )
        self._drains = DrainMeters(meter)
        meter.create_observable_gauge(
            "ckptstore.durable.step", [self._steps], "{step}", "The step of the last durable checkpoint."
        )
        meter.create_observable_gauge(
            "ckptstore.durable.age", [self._ages], "s", "The time since the last durable checkpoint was committed."
        )

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report gauges during the context. No provider releases a gauge that it has."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._drains.clear()
            with self._lock:
                self._durable.clear()

    def save_ended(self, event: SaveEnded) -> None:
        """Count a save."""
        timed = self._counted(event, "save", "write") | {IN_BACKGROUND: event.in_background, IS_FAST: event.is_fast}
        self._save_duration.record(event.seconds, timed)
        self._blocked.record(event.stalled_seconds, timed)
        if event.error_type is None and not event.is_fast:
            self._durable_is(event.store, event.rank, event.step, event.started_at + event.seconds)
            self._drains.stored(event.store, event.rank)

    def load_ended(self, event: LoadEnded) -> None:
        """Count a load."""
        self._load_duration.record(event.seconds, self._counted(event, "load", "read"))

    def resumed(self, event: CheckpointResumed) -> None:
        """Take a resumed checkpoint as the newest durable one, or the newest fast one if no record has it."""
        if event.number is not None:
            self._durable_is(event.store, event.rank, event.step, event.created_at)
        self._drains.observe(event)

    def fast(self, event: TierEvent) -> None:
        """Take an event of a checkpoint that may be a fast one. One that came into the store is as old as its state."""
        if isinstance(event, CheckpointCommitted) and event.store:
            self._durable_is(event.store, event.rank, event.step, event.created_at)
        elif isinstance(event, DrainFailed):
            self._failures.add(1, {STORE: event.store, RANK: event.rank, OPERATION: "drain"})
        self._drains.observe(event)

    def _counted(self, event: SaveEnded | LoadEnded, operation: str, direction: str) -> _Attributes:
        """Count the fields that both events have; return the attributes of their duration."""
        where: _Attributes = {STORE: event.store, RANK: event.rank}
        what: _Attributes = {**where, OPERATION: operation}
        self._io.add(event.size_bytes, {**where, DIRECTION: direction})
        self._requests.add(event.requests, what)
        self._retries.add(event.retries, what)
        if event.error_type is None:
            self._failures.add(0, what)  # so that a rate exists before the first failure
            return where
        self._failures.add(1, {**what, ERROR_TYPE: event.error_type})
        return {**where, ERROR_TYPE: event.error_type}

    def _durable_is(self, store: str, rank: int, step: int, committed_at: float) -> None:
        with self._lock:
            self._durable[store, rank] = step, committed_at

    def _observed(self) -> list[tuple[_Attributes, int, float]]:
        if not self._is_on:
            return []
        with self._lock:
            return [({STORE: store, RANK: rank}, *known) for (store, rank), known in self._durable.items()]

    def _steps(self, _options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(step, attributes) for attributes, step, _ in self._observed()]

    def _ages(self, _options: CallbackOptions) -> Iterable[Observation]:
        now = time.time()
        return [Observation(max(0.0, now - at), attributes) for attributes, _, at in self._observed()]


_made: weakref.WeakKeyDictionary[metrics.MeterProvider, weakref.ref[Meters]] = weakref.WeakKeyDictionary()
"""By provider, which holds its callbacks: a second gauge of a name would never be called."""
_of_global: list[Meters] = []
"""The meters of the global provider, whichever that is."""


def meters_of(provider: metrics.MeterProvider | None, scope: str, version: str | None) -> Meters:
    """Return the instruments of a provider, None for the global one."""
    if provider is None:
        if not _of_global:
            _of_global.append(Meters(metrics.get_meter(scope, version or "")))
        return _of_global[0]
    known = _made.get(provider)
    if known is None or (found := known()) is None:
        found = Meters(metrics.get_meter(scope, version or "", provider))
        _made[provider] = weakref.ref(found)
    return found
