"""Spans and metrics of real saves and loads, as the SDK of OpenTelemetry exports them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks
from opentelemetry.trace import StatusCode
from otel_collecting import Collected, collecting, rank_saves_and_loads

import ckptstore
from ckptstore.dcp import StoreWriter
from ckptstore.errors import AccessDenied, InvalidInput, StepExists, StoreMissing
from ckptstore.events import listeners
from ckptstore.integrations.otel import instrument
from ckptstore.runtime import tracing
from ckptstore.testing.s3_server import Fault, s3_server

pytestmark = pytest.mark.slow

SYNC = ["agree", "upload", "wait", "commit"]
ASYNC = ["agree", "stage", "upload", "wait", "commit"]
LOAD = ["open", "read", "apply"]


@pytest.fixture
def collected() -> Iterator[Collected]:
    with collecting() as collected:
        yield collected
    assert listeners._listeners == []
    assert tracing._tracers == []


@pytest.fixture
def state() -> dict[str, Any]:
    return {"weight": torch.arange(100_000.0), "epoch": 1}


def check_trace(spans: list[Any], kind: str, phases: list[str], *, failed: str | None = None) -> Any:
    """One trace: a span with children, which lie in its time one after the other."""
    *children, root = spans
    assert [span.name for span in spans] == named(kind, phases)
    assert root.parent is None
    slack = 20_000_000  # two clocks of one machine are read one after the other
    at = root.start_time - slack
    for child in children:
        assert (child.parent.span_id, child.context.trace_id) == (root.context.span_id, root.context.trace_id)
        assert at <= child.start_time <= child.end_time <= root.end_time + slack
        at = child.end_time - slack
    assert root.attributes.get("error.type") == failed
    assert root.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert root.status.description is None
    return root


def named(kind: str, phases: list[str]) -> list[str]:
    return [f"ckptstore.{kind}.{name}" for name in phases] + [f"ckptstore.{kind}"]


def test_a_save_has_a_trace_and_metrics(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    before = time.time_ns()
    with ckptstore.open_store(tmp_path) as store:
        checkpoint = store.save(7, state)
    root = check_trace(collected.spans(), "save", SYNC)
    assert before - 1_000_000 <= root.start_time <= root.end_time <= time.time_ns() + 1_000_000
    told = {
        "step": 7,
        "attempt": Path(checkpoint.uri).name,
        "rank": 0,
        "store": str(tmp_path),
        "save.background": False,
    }
    assert root.attributes.items() >= {f"ckptstore.{name}": value for name, value in told.items()}.items()
    (duration,) = collected.points("ckptstore.save.duration", ckptstore_store=str(tmp_path))
    (blocked,) = collected.points("ckptstore.save.blocked", ckptstore_store=str(tmp_path))
    assert duration.count == blocked.count == 1
    assert duration.sum == blocked.sum > 0
    written = collected.value("ckptstore.io", ckptstore_io_direction="write")
    assert 400_000 <= written <= checkpoint.size_bytes
    assert written == root.attributes["ckptstore.size"]
    assert collected.value("ckptstore.requests", ckptstore_operation="save") > 0
    assert collected.value("ckptstore.retries", ckptstore_operation="save") == 0
    assert collected.value("ckptstore.failures", ckptstore_operation="save") == 0
    assert collected.value("ckptstore.durable.step") == 7
    assert 0 <= collected.value("ckptstore.durable.age") < 600


def test_names_and_units_follow_the_conventions(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    with ckptstore.open_store(tmp_path) as store:
        store.save(1, state)
        store.load(state)
    data = collected.reader.get_metrics_data()
    (scope,) = (scope for resource in data.resource_metrics for scope in resource.scope_metrics)
    assert scope.scope.name == "ckptstore"
    assert {metric.name: metric.unit for metric in scope.metrics} == {
        "ckptstore.save.blocked": "s",
        "ckptstore.save.duration": "s",
        "ckptstore.load.duration": "s",
        "ckptstore.io": "By",
        "ckptstore.requests": "{request}",
        "ckptstore.retries": "{request}",
        "ckptstore.failures": "{operation}",
        "ckptstore.durable.step": "{step}",
        "ckptstore.durable.age": "s",
    }
    assert all(metric.description for metric in scope.metrics)
    names = {name for metric in scope.metrics for point in metric.data.data_points for name in point.attributes or {}}
    assert names <= {
        *("ckptstore.store", "ckptstore.rank", "ckptstore.operation", "ckptstore.io.direction"),
        *("ckptstore.save.background", "ckptstore.save.fast", "error.type"),
    }, "an attribute with many values makes a series for each"


def test_a_save_in_the_background(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    tracer = collected.tracer_provider.get_tracer("training")
    with ckptstore.open_store(tmp_path) as store:
        with tracer.start_as_current_span("step") as step:
            pending = store.save_async(3, state)
        checkpoint = pending.result()
    spans = [span for span in collected.spans() if span.name != "step"]
    root = spans[-1]
    assert root.parent.span_id == step.get_span_context().span_id, "what called it, though that ended long before"
    assert [span.name for span in spans] == named("save", ASYNC)
    assert root.attributes["ckptstore.save.background"] is True
    (blocked,) = collected.points("ckptstore.save.blocked", ckptstore_save_background=True)
    (duration,) = collected.points("ckptstore.save.duration", ckptstore_save_background=True)
    assert blocked.sum == pending.stalled_seconds
    assert duration.sum > blocked.sum
    assert 400_000 <= collected.value("ckptstore.io", ckptstore_io_direction="write") <= checkpoint.size_bytes
    assert collected.value("ckptstore.requests", ckptstore_operation="save") > 0


def test_directories_and_loads(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"x" * 5000)
    with ckptstore.open_store(tmp_path / "store") as store:
        store.save(1, state)
        store.save_directory(2, tmp_path / "files")
        check_trace(collected.spans()[len(SYNC) + 1 :], "save", SYNC)

        store[1].load(state)
        root = check_trace(collected.spans(), "load", LOAD)
        assert root.attributes["ckptstore.step"] == 1
        assert root.attributes["ckptstore.number"] == store[1].number
        read = collected.value("ckptstore.io", ckptstore_io_direction="read")
        assert 400_000 <= read <= store[1].size_bytes

        with store[2].as_directory():
            check_trace(collected.spans(), "load", ["open"])
        store[2].to_directory(tmp_path / "copy")
        check_trace(collected.spans(), "load", ["open", "read"])
        assert collected.value("ckptstore.io", ckptstore_io_direction="read") >= read + 5000
        assert store.resume() is not None
        check_trace(collected.spans(), "load", ["open"])
    assert collected.count("ckptstore.load.duration") == 4


def test_what_a_job_resumes_from_is_durable(tmp_path: Path, state: dict[str, Any]) -> None:
    with ckptstore.open_store(tmp_path) as store:
        saved = store.save(5, state)
    with collecting() as collected, ckptstore.open_store(tmp_path) as store:
        assert collected.points("ckptstore.durable.step") == [], "nobody knows yet"
        store.resume(state)
        check_trace(collected.spans(), "load", LOAD)
        assert collected.value("ckptstore.durable.step") == 5
        age = collected.value("ckptstore.durable.age")
        assert age <= time.time() - saved.created_at
        store.save(6, state)
        assert collected.value("ckptstore.durable.step") == 6
        assert collected.value("ckptstore.durable.age") < age + 600


def test_a_damaged_checkpoint_is_passed_over_in_one_load(
    collected: Collected, tmp_path: Path, state: dict[str, Any]
) -> None:
    with ckptstore.open_store(tmp_path) as store:
        store.save(1, state)
        damaged = store.save(2, state)
        for file in damaged.files:
            path = Path(damaged.uri) / file.name
            if path.stat().st_size > 100_000:
                path.write_bytes(bytes(path.stat().st_size))
        collected.spans()
        store.load(state)
    root = check_trace(collected.spans(), "load", ["open", "read", "open", "read", "apply"])
    assert root.attributes["ckptstore.step"] == 1


def test_failures_have_a_type_and_no_words(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    with ckptstore.open_store(tmp_path / "a") as store:
        with pytest.raises(StoreMissing):
            store.load(state)
        check_trace(collected.spans(), "load", ["open"], failed="StoreMissing")
        store.save(1, state)
        collected.spans()
        with pytest.raises(StepExists):
            store.save(1, state, exists="error")
        check_trace(collected.spans(), "save", [], failed="StepExists")
    assert collected.value("ckptstore.failures", error_type="StoreMissing", ckptstore_operation="load") == 1
    assert collected.value("ckptstore.failures", error_type="StepExists", ckptstore_operation="save") == 1
    assert collected.count("ckptstore.save.duration", error_type="StepExists") == 1
    assert collected.value("ckptstore.durable.step") == 1


def test_retries_and_a_save_that_fails_in_the_background(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any]
) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.05")
    with s3_server(buckets=["test"]) as server:
        options = {**server.storage_options, "secret": "nobody-may-read-this"}
        with ckptstore.open_store("s3://test/run", storage_options=options) as store:
            store.save(1, state)
            before = collected.value("ckptstore.retries", ckptstore_operation="save")
            server.faults.add(Fault(action="status", status=503, code="SlowDown", match="^PUT", times=2))
            store.save(2, state)
            assert collected.value("ckptstore.retries", ckptstore_operation="save") == before + 2
            collected.spans()

            denied = Fault(action="status", match="^PUT .*checkpoints", times=None, status=403, code="AccessDenied")
            server.faults.add(denied)
            pending = store.save_async(3, state)
            with pytest.raises(AccessDenied):
                pending.result()
            server.faults.clear()
            spans = collected.spans()
            check_trace(spans, "save", ["agree", "stage"], failed="AccessDenied")
            assert "nobody-may-read-this" not in "".join(span.to_json() for span in spans)
            with pytest.raises(AccessDenied):
                store.close()
    assert collected.value("ckptstore.failures", error_type="AccessDenied") == 1
    assert collected.value("ckptstore.durable.step", ckptstore_store="s3://test/run") == 2


def test_two_stores_at_once_do_not_mix(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    def save(name: str, first: int) -> None:
        with ckptstore.open_store(tmp_path / name, group="solo") as store:
            for step in range(first, first + 5):
                store.save_async(step, state).result()

    threads = [threading.Thread(target=save, args=item) for item in (("a", 1), ("b", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = collected.spans()
    traces: dict[int, list[Any]] = {}
    for span in spans:
        traces.setdefault(span.context.trace_id, []).append(span)
    assert len(traces) == 10
    for trace in traces.values():
        check_trace(trace, "save", ASYNC)
        assert len({(span.attributes or {})["ckptstore.step"] for span in trace}) == 1
    for name in "ab":
        assert collected.value("ckptstore.durable.step", ckptstore_store=str(tmp_path / name)) == 5
        assert collected.count("ckptstore.save.duration", ckptstore_store=str(tmp_path / name)) == 5


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about a single process
def test_a_save_of_torchs_dcp_counts_once(collected: Collected, tmp_path: Path, state: dict[str, Any]) -> None:
    with ckptstore.open_store(tmp_path) as store:
        dcp.save(state, storage_writer=StoreWriter(store.dcp_target(), step=4), no_dist=True)
    assert [span.name for span in collected.spans()] == named("save", SYNC)
    assert collected.count("ckptstore.save.duration") == 1
    assert collected.value("ckptstore.durable.step", ckptstore_store=str(tmp_path)) == 4
    assert collected.value("ckptstore.io", ckptstore_io_direction="write") > 400_000


@pytest.mark.parametrize("rank_traces", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_ranks_of_a_job_are_in_one_trace(tmp_path: Path, rank_traces: bool) -> None:
    leader, other = run_ranks(2, rank_saves_and_loads, str(tmp_path), rank_traces)
    if not rank_traces:
        assert other == [], "a rank that does not trace is not disturbed by a leader that does"
        return
    steps = [next(span for span in rank if span["name"] == "train") for rank in (leader, other)]
    roots = [
        [span for span in rank if span["name"] in ("ckptstore.save", "ckptstore.load")] for rank in (leader, other)
    ]
    expected = ["ckptstore.save"] * 3 + ["ckptstore.load"] * 2
    assert [[span["name"] for span in rank] for rank in roots] == [expected, expected]
    for number, (mine, theirs) in enumerate(zip(*roots, strict=True)):
        assert mine["parent"] == steps[0]["id"]
        assert mine["rank"] == 0
        assert theirs["rank"] == 1
        if number == 2:  # it failed before anything was told
            assert theirs["trace"] == steps[1]["trace"]
            continue
        assert theirs["trace"] == mine["trace"] == steps[0]["trace"]
        assert theirs["parent"] == mine["id"]
        assert theirs["links"] == [steps[1]["id"]]
        assert mine["links"] == []
    for rank, own in zip((leader, other), roots, strict=True):
        ids = {span["id"] for span in own}
        phases = [span for span in rank if span["name"].count(".") == 2]
        assert len(phases) == len(SYNC) + len(ASYNC) + len(LOAD) + 1
        assert all(span["parent"] in ids for span in phases)


def test_nothing_is_told_when_nobody_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages between the ranks are what they were, byte for byte; with a tracer they have one field more."""
    from ckptstore.group.meeting import Alone, pack

    told: list[bytes] = []
    tell = Alone.tell

    def heard(self: Alone, work: Any) -> Any:
        value = tell(self, work)
        told.append(pack(value))
        return value

    monkeypatch.setattr(Alone, "tell", heard)
    (tmp_path / "a").write_bytes(b"a")

    def save(name: str) -> bytes:
        told.clear()
        with ckptstore.open_store(tmp_path / name, group="solo") as store:
            store.save_directory(1, None)
            store.resume()
        return b"".join(told)

    assert b"trace" not in save("off")
    with instrument():  # the API alone, as where no SDK is installed
        assert b"trace" not in save("alone")
    with collecting():
        assert save("on").count(b'"trace": {"traceparent": "00-') == 2


def test_instrumenting_twice_counts_once(collected: Collected, tmp_path: Path) -> None:
    again = instrument(collected.tracer_provider, collected.meter_provider)
    assert again is collected.telemetry
    with pytest.raises(InvalidInput, match="already, with other providers"):
        instrument()
    with ckptstore.open_store(tmp_path) as store:
        store.save_directory(1, None)
        assert collected.count("ckptstore.save.duration") == 1
        assert len(collected.spans()) == len(SYNC) + 1
        again.end()
        again.end()
        store.save_directory(2, None)
        assert collected.spans() == []
        assert collected.count("ckptstore.save.duration") == 1
        assert collected.points("ckptstore.durable.step") == []
        with instrument(collected.tracer_provider, collected.meter_provider) as third:
            assert third is not again
            store.save_directory(3, None)
            assert collected.count("ckptstore.save.duration") == 2
            assert collected.value("ckptstore.durable.step") == 3


def test_a_provider_that_raises_fails_nothing(
    collected: Collected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: Any, **_keywords: Any) -> None:
        raise RuntimeError("no span today")

    monkeypatch.setattr(collected.telemetry._spans._tracer, "start_span", broken)
    with ckptstore.open_store(tmp_path) as store:
        assert store.save_directory(1, None).step == 1
    assert "a tracer failed" in caplog.text
    assert "a listener failed" in caplog.text


def test_saves_without_an_end_do_not_pile_up(collected: Collected) -> None:
    for number in range(600):
        tracing.told(lambda number=number: tracing.Traced("save", f"attempt-{number}", 0, number, time.time()))  # type: ignore[misc]
    assert len(collected.telemetry._spans._open) == 256
    assert len(collected.spans()) == 344
    collected.telemetry.end()
    assert len(collected.spans()) == 256


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_nothing_of_the_saves_of_its_parent(collected: Collected, tmp_path: Path) -> None:
    tracing.told(lambda: tracing.Traced("save", "of the parent", 0, 1, time.time()))
    pid = os.fork()
    if pid == 0:
        try:
            assert collected.telemetry._spans._open == {}
            with ckptstore.open_store(tmp_path, group="solo") as store:
                store.save_directory(1, None)
            ok = [span.name for span in collected.spans()] == named("save", SYNC)
            ok &= collected.value("ckptstore.durable.step") == 1
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert [*collected.telemetry._spans._open] == [("of the parent", 0)]
    assert collected.spans() == []
    gc.collect()
