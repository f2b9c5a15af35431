"""Start spans and metrics with `instrument`. One listener and one tracer for each process, no thread of our own."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Self

from opentelemetry import metrics, trace

from ckptstore.boundary import boundary
from ckptstore.errors import InvalidInput
from ckptstore.events import (
    CheckpointCommitted,
    CheckpointResumed,
    DrainEnded,
    DrainFailed,
    DrainRecovered,
    DrainStalled,
    DrainStarted,
    Event,
    FastCommitted,
    LoadEnded,
    LoadPhase,
    SaveEnded,
    SavePhase,
    listening,
)
from ckptstore.integrations.otel.meters import meters_of
from ckptstore.integrations.otel.spans import Spans
from ckptstore.runtime.fork import new_lock_in_child
from ckptstore.runtime.tracing import tracing

SCOPE = "ckptstore"
"""The instrumentation scope of all spans and metrics."""


_OF_TIERS = (FastCommitted, CheckpointCommitted, DrainEnded, DrainFailed, DrainStalled, DrainRecovered)
_EVENTS = (SavePhase, SaveEnded, LoadPhase, LoadEnded, CheckpointResumed, DrainStarted, *_OF_TIERS)


class Telemetry:
    """The instrumentation of this process. `end` ends it; so does leaving it as a context."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None, meter_provider: metrics.MeterProvider | None
    ) -> None:
        self.providers = tracer_provider, meter_provider
        self._spans = Spans(trace.get_tracer(SCOPE, _version(), tracer_provider))
        self._meters = meters_of(meter_provider, SCOPE, _version())
        self._stack = ExitStack()
        self._stack.callback(self._spans.end_all)
        self._stack.enter_context(self._meters.reporting())
        self._stack.enter_context(listening(self._on_event, *_EVENTS))
        self._stack.enter_context(tracing(self._spans))

    def end(self) -> None:
        """Stop listening. Spans of saves in flight end now. Does nothing the second time."""
        global _telemetry
        with _lock:
            if _telemetry is self:
                _telemetry = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, SavePhase | LoadPhase):
            self._spans.phase(event)
        elif isinstance(event, SaveEnded):
            self._spans.save_ended(event)
            self._meters.save_ended(event)
        elif isinstance(event, LoadEnded):
            self._spans.load_ended(event)
            self._meters.load_ended(event)
        elif isinstance(event, CheckpointResumed):
            self._meters.resumed(event)
        elif isinstance(event, _OF_TIERS):
            self._meters.fast(event)
        if isinstance(event, DrainStarted | DrainEnded | DrainFailed | DrainStalled | DrainRecovered):
            self._spans.drain(event)


_lock = threading.Lock()
new_lock_in_child(sys.modules[__name__], "_lock")
_telemetry: Telemetry | None = None


@boundary
def instrument(
    tracer_provider: trace.TracerProvider | None = None, meter_provider: metrics.MeterProvider | None = None
) -> Telemetry:
    """Make spans and metrics of every save and load of this process from now on, until `end` of the result.

    Every rank calls it, before its first save. Without providers the global ones of OpenTelemetry are used, also when
    they are set later. Called again, it returns the same object, and nothing counts twice. No error of a provider or an
    exporter can fail a save.

    Raises InvalidInput when it is active already with other providers.
    """
    global _telemetry
    with _lock:
        if _telemetry is None:
            _telemetry = Telemetry(tracer_provider, meter_provider)
        elif _telemetry.providers != (tracer_provider, meter_provider):
            raise InvalidInput(
                "This process is instrumented already, with other providers",
                hint="Call end() of what the first instrument() returned, then instrument again",
            )
        return _telemetry


def _version() -> str | None:
    try:
        return version("ckptstore")
    except PackageNotFoundError:  # run from a directory
        return None
