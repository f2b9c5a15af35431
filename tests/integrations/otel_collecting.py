"""Providers of OpenTelemetry's SDK that keep everything in memory, and what the ranks of a job do between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import ckptstore
from ckptstore.integrations.otel import Telemetry, instrument

Point = tuple[frozenset[tuple[str, Any]], Any]


@dataclass
class Collected:
    """What was exported."""

    tracer_provider: TracerProvider
    meter_provider: MeterProvider
    telemetry: Telemetry
    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    def spans(self, *, clear: bool = True) -> list[ReadableSpan]:
        """Those that have ended, in the order of their ends."""
        spans = list(self.exporter.get_finished_spans())
        if clear:
            self.exporter.clear()
        return spans

    def points(self, name: str, **wanted: Any) -> list[Any]:
        """The data points of a metric whose attributes (dots as "_") have these values."""
        data = self.reader.get_metrics_data()
        found = []
        for metric in (
            metric
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ):
            for point in metric.data.data_points:
                attributes = {key.replace(".", "_"): value for key, value in (point.attributes or {}).items()}
                if all(attributes.get(key) == value for key, value in wanted.items()):
                    found.append(point)
        return found

    def value(self, name: str, **wanted: Any) -> Any:
        """That of the one such point."""
        (point,) = self.points(name, **wanted)
        return point.value

    def count(self, name: str, **wanted: Any) -> int:
        """How often a histogram was recorded."""
        return sum(point.count for point in self.points(name, **wanted))


@contextmanager
def collecting() -> Iterator[Collected]:
    """Instrument this process, with providers of its own."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracer_provider, meter_provider = TracerProvider(), MeterProvider([reader])
    tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    with instrument(tracer_provider, meter_provider) as telemetry:
        yield Collected(tracer_provider, meter_provider, telemetry, exporter, reader)
    tracer_provider.shutdown()
    meter_provider.shutdown()


def shown(span: ReadableSpan) -> dict[str, Any]:
    """What a test compares of a span; it can be pickled."""
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": None if span.parent is None else span.parent.span_id,
        "links": [link.context.span_id for link in span.links],
        "rank": span.attributes.get("ckptstore.rank"),
    }


def rank_saves_and_loads(root: str, rank_traces: bool) -> list[dict[str, Any]]:
    """On each rank: save, save in the background, fail, and load, inside a span of a training step."""
    import os

    import torch

    rank = int(os.environ["RANK"])
    group = ckptstore.StorageGroup(rank, 2, "one-start")
    if rank and not rank_traces:
        with ckptstore.open_store(Path(root) / "store", group=group) as store:
            _train(store, torch)
        return []
    with collecting() as collected:
        tracer = collected.tracer_provider.get_tracer("training")
        with ckptstore.open_store(Path(root) / "store", group=group) as store, tracer.start_as_current_span("train"):
            _train(store, torch)
        return [shown(span) for span in collected.spans()]


def _train(store: ckptstore.CheckpointStore, torch: Any) -> None:
    state = {"weight": torch.arange(1000.0), "epoch": 1}
    store.save(1, state)
    store.save_async(2, state).result()
    try:
        store.save(2, state, exists="error")
    except ckptstore.StepExists:
        pass
    else:
        raise AssertionError("the step is there")
    store.load(state)
    store.resume()
