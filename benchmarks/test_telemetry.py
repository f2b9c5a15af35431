"""What telemetry costs: nothing that anybody would notice when it is off, and below 1 % of a save when it is on.

Times are those of the processor, and the shares those of the least: the machine may do what it likes meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sizes import FULL

from ckptstore import KeepLatest, open_store
from ckptstore.events import SavePhase, is_heard
from ckptstore.integrations.otel import instrument
from ckptstore.runtime import tracing
from ckptstore.saving.phases import SaveClock

pytestmark = pytest.mark.benchmark(group="What telemetry costs a save", timer=time.thread_time)
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


@pytest.fixture(scope="module")
def save_seconds(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The fastest of a few durable saves."""
    state, seconds = {"weight": torch.zeros(SIZE_BYTES // 4)}, []
    path = tmp_path_factory.mktemp("store")
    with open_store(path, retention=KeepLatest(1), grace_seconds=0, group="solo") as store:
        for step in range(4):
            began = time.perf_counter()
            store.save(step, state)
            seconds.append(time.perf_counter() - began)
    return min(seconds)


@pytest.fixture
def telemetry() -> Iterator[None]:
    """An application that reads all of it."""
    tracer_provider, meter_provider = TracerProvider(), MeterProvider([InMemoryMetricReader()])
    tracer_provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    with instrument(tracer_provider, meter_provider):
        yield
    tracer_provider.shutdown()
    meter_provider.shutdown()


def shared(benchmark: Any, save_seconds: float) -> float:
    """Its share of a save."""
    share: float = benchmark.stats.stats.min / save_seconds
    benchmark.extra_info["share_of_a_save"] = share
    return share


def test_event_that_nobody_hears(benchmark: Any, save_seconds: float) -> None:
    benchmark.pedantic(asked_in_vain, rounds=40, iterations=2000)
    assert shared(benchmark, save_seconds) < 0.0001


def test_times_alone(benchmark: Any) -> None:
    benchmark.pedantic(timed_save, rounds=40, iterations=200)


def test_telemetry_off(benchmark: Any, save_seconds: float) -> None:
    benchmark.pedantic(watched_save, rounds=40, iterations=200)
    assert shared(benchmark, save_seconds) < 0.001


@pytest.mark.usefixtures("telemetry")
def test_telemetry_on(benchmark: Any, save_seconds: float) -> None:
    benchmark.pedantic(watched_save, rounds=40, iterations=50)
    assert shared(benchmark, save_seconds) < 0.01
