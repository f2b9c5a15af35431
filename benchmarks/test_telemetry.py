"""What telemetry costs: nothing that anybody would notice when it is off, and below 1 % of a save when it is on.

    pytest benchmarks/test_telemetry.py -s

Times are those of the processor, the best of many: the machine may do what it likes meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sizes import FULL

from ckptstore import KeepLatest, open_store
from ckptstore.events import SaveEnded, SavePhase, is_heard
from ckptstore.integrations.otel import instrument
from ckptstore.runtime import tracing
from ckptstore.saving.phases import SaveClock

SIZE_BYTES = (256 if FULL else 64) << 20


def watched_save() -> None:
    """All that a save does for those who listen, and nothing else of it."""
    clock = SaveClock()
    clock.asked(step=1, rank=0)
    with clock.part("memory://store", is_last=False):
        tracing.told(lambda: clock.traced("attempt"))
        tracing.hear({}, lambda: clock.traced("attempt"))
        clock.agreed("attempt", step=1, rank=0)
    with clock.part("memory://store", is_last=True):
        clock.ended("upload")
        clock.met(0.0)


def timed_save() -> None:
    """What of it was there before anybody could listen to the end of a save, or trace it: its times."""
    clock = SaveClock()
    clock.agreed("attempt", step=1, rank=0)
    clock.ended("upload")
    clock.met(0.0)


def asked_in_vain() -> None:
    """What an event costs that nobody hears."""
    is_heard(SavePhase)
    is_heard(SaveEnded)


def nanoseconds(call: Callable[[], object], times: int) -> float:
    """Of the processor for one call, the best of many rounds."""

    def once() -> float:
        before = time.thread_time_ns()
        for _ in range(times):
            call()
        return (time.thread_time_ns() - before) / times

    return min(once() for _ in range(40))


def test_telemetry_is_cheap(tmp_path: Path) -> None:
    off, asked = nanoseconds(watched_save, 200), nanoseconds(asked_in_vain, 2000) / 2
    before = nanoseconds(timed_save, 200)
    tracer_provider, meter_provider = TracerProvider(), MeterProvider([InMemoryMetricReader()])
    tracer_provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    with instrument(tracer_provider, meter_provider):
        on = nanoseconds(watched_save, 50)
    tracer_provider.shutdown()
    meter_provider.shutdown()

    state = {"weight": torch.zeros(SIZE_BYTES // 4)}
    seconds = []
    with open_store(tmp_path, retention=KeepLatest(1), grace_seconds=0, group="solo") as store:
        for step in range(4):
            began = time.perf_counter()
            store.save(step, state)
            seconds.append(time.perf_counter() - began)
    save = min(seconds) * 1e9
    print(
        f"\nan event that nobody hears: {asked:.0f} ns\n"
        f"a save when telemetry is off: {(off - before) / 1e3:.1f} us more than without it, and {before / 1e3:.1f} us "
        f"to time it: {off / save:.4%} of a save of {SIZE_BYTES >> 20} MiB in {save / 1e9:.3f} s\n"
        f"a save when it is on: {on / 1e3:.0f} us, {on / save:.3%}"
    )
    assert off < 0.001 * save
    assert on < 0.01 * save
