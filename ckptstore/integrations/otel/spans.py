"""Spans: a save or a load of a rank, and its phases below. All ranks' spans of one save are in one trace.

A span is begun when the ranks have agreed, with the time of the call; those of phases are made when a phase has ended.
The leader sends the context of its span with the agreement, and the spans of the other ranks are its children. The span
around the call (that of a training step, say) is the parent of the leader's span, and a link of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ckptstore.events import (
    DrainEnded,
    DrainFailed,
    DrainRecovered,
    DrainStalled,
    DrainStarted,
    LoadEnded,
    LoadPhase,
    SaveEnded,
    SavePhase,
)
from ckptstore.integrations.otel.names import (
    ATTEMPT,
    ERROR_TYPE,
    IN_BACKGROUND,
    IS_FAST,
    IS_SUPERSEDED,
    NUMBER,
    RANK,
    REQUESTS,
    RETRIES,
    SIZE,
    STEP,
    STORE,
)
from ckptstore.runtime.fork import in_forked_child
from ckptstore.runtime.tracing import Traced

_MOST_OPEN = 256
"""The most open spans. The oldest is ended above it: its own end may never come if a thread was killed."""

_Key = tuple[str, int]
"""The name of a save or a load, and the rank."""


class Spans:
    """Makes spans of traced operations and events; see `ckptstore.runtime.tracing.Tracer`. Safe for threads."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[_Key, trace.Span] = {}
        self._saved: dict[_Key, trace.SpanContext] = {}
        """The span contexts of fast saves, for the drains that come after them."""
        self._lock = threading.Lock()
        in_forked_child(self, Spans._after_fork)

    def _after_fork(self) -> None:
        """Forget the parent's spans, which end in the parent."""
        self._open, self._saved, self._lock = {}, {}, threading.Lock()

    def tell(self, operation: Traced) -> Mapping[str, str]:
        """Return the leader's span context as W3C `traceparent`; empty if no provider collects spans."""
        carrier: dict[str, str] = {}
        span = self._begin(operation, carrier)
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        return carrier

    def hear(self, operation: Traced, told: Mapping[str, str]) -> None:
        """Continue below the leader's span, on any rank."""
        with self._lock:
            is_open = (operation.name, operation.rank) in self._open
        if not is_open:
            self._begin(operation, told)

    def phase(self, event: SavePhase | LoadPhase) -> None:
        """Record a phase that has ended, as a child of its save or load if that one is known."""
        kind, name = ("save", event.attempt) if isinstance(event, SavePhase) else ("load", event.load)
        with self._lock:
            parent = self._open.get((name, event.rank))
        span = self._tracer.start_span(
            f"ckptstore.{kind}.{event.phase}",
            None if parent is None else trace.set_span_in_context(parent),
            attributes=_known({STEP: event.step, RANK: event.rank}),
            start_time=_nanoseconds(event.started_at),
        )
        span.end(_nanoseconds(event.started_at + event.seconds))

    def save_ended(self, event: SaveEnded) -> None:
        """End the span of a save; one that failed before the ranks agreed gets its span now."""
        attributes = {STEP: event.step, ATTEMPT: event.attempt or None, IN_BACKGROUND: event.in_background}
        context = self._end("save", event.attempt, event, {**attributes, IS_FAST: event.is_fast or None})
        if event.is_fast and event.error_type is None:
            with self._lock:
                self._saved[event.attempt, event.rank] = context
                if len(self._saved) > _MOST_OPEN:
                    del self._saved[next(iter(self._saved))]

    def load_ended(self, event: LoadEnded) -> None:
        """End the span of a load."""
        self._end("load", event.load, event, {STEP: event.step, NUMBER: event.number})

    def drain(self, event: DrainStarted | DrainEnded | DrainFailed | DrainStalled | DrainRecovered) -> None:
        """Record the way of a fast checkpoint into the store: a trace of its own on each rank, with a link to its save.

        A drain whose begin was not seen has no span.
        """
        key = (f"drain {event.attempt}", event.rank)
        with self._lock:
            is_open = key in self._open
        if not is_open and isinstance(event, DrainStarted | DrainStalled):  # it may stall before a byte moves
            self._begin_drain(event, key)
        is_over = isinstance(event, DrainEnded | DrainFailed)
        with self._lock:
            span = self._open.pop(key, None) if is_over else self._open.get(key)
        if span is None or isinstance(event, DrainStarted):
            return
        if isinstance(event, DrainEnded):
            counted = {SIZE: event.size_bytes, NUMBER: event.number, IS_SUPERSEDED: event.is_superseded}
            span.set_attributes(_known(counted))
        elif isinstance(event, DrainFailed):  # no message, as for a save
            span.set_status(trace.StatusCode.ERROR)
        else:
            span.add_event("stalled" if isinstance(event, DrainStalled) else "recovered")
        if is_over:
            span.end()

    def _begin_drain(self, event: DrainStarted | DrainStalled, key: _Key) -> None:
        with self._lock:
            saved = self._saved.pop((event.attempt, event.rank), None)
        span = self._tracer.start_span(
            "ckptstore.drain",
            trace.set_span_in_context(trace.INVALID_SPAN),
            attributes=_known({STEP: event.step, ATTEMPT: event.attempt, RANK: event.rank, STORE: event.store or None}),
            links=[] if saved is None else [trace.Link(saved)],
        )
        self._keep_open(key, span)

    def end_all(self) -> None:
        """End all open spans now."""
        with self._lock:
            spans, self._open = [*self._open.values()], {}
        for span in spans:
            span.end()

    def _begin(self, operation: Traced, carrier: Mapping[str, str]) -> trace.Span:
        caller = trace.get_current_span().get_span_context()
        context = self._propagator.extract(carrier) if carrier else None
        links = [trace.Link(caller)] if context is not None and caller.is_valid else []
        span = self._tracer.start_span(
            f"ckptstore.{operation.kind}",
            context,
            attributes=_known({STEP: operation.step, RANK: operation.rank}),
            links=links,
            start_time=_nanoseconds(operation.started_at),
        )
        self._keep_open((operation.name, operation.rank), span)
        return span

    def _keep_open(self, key: _Key, span: trace.Span) -> None:
        with self._lock:
            self._open[key] = span
            lost = self._open.pop(next(iter(self._open))) if len(self._open) > _MOST_OPEN else None
        if lost is not None:
            lost.end()

    def _end(
        self, kind: str, name: str, event: SaveEnded | LoadEnded, more: Mapping[str, str | int | None]
    ) -> trace.SpanContext:
        """End a span, and return its context."""
        with self._lock:
            span = self._open.pop((name, event.rank), None)
        if span is None:
            span = self._tracer.start_span(f"ckptstore.{kind}", start_time=_nanoseconds(event.started_at))
        counted = {SIZE: event.size_bytes, REQUESTS: event.requests, RETRIES: event.retries}
        span.set_attributes(_known({RANK: event.rank, STORE: event.store, **more, **counted}))
        if event.error_type is not None:  # no message: it may name files, which readers of traces need not know
            span.set_attribute(ERROR_TYPE, event.error_type)
            span.set_status(trace.StatusCode.ERROR)
        span.end(_nanoseconds(event.started_at + event.seconds))
        return span.get_span_context()


def _known(attributes: Mapping[str, str | int | None]) -> dict[str, str | int]:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
