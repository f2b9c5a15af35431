"""Spans and metrics of real saves to a disk of the node, and of how they come into the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.trace import StatusCode
from otel_collecting import Collected, collecting

from ckptstore import FastTier, KeepEvery, open_store
from ckptstore.errors import StorageUnavailable
from ckptstore.testing import with_faults
from ckptstore.testing.hooked import Call

pytestmark = pytest.mark.slow

SECONDS = 60.0


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Bucket:
    """A place that can be away."""

    def __init__(self) -> None:
        self.is_away = threading.Event()

    def __call__(self, call: Call) -> None:
        if self.is_away.is_set() and call.phase == "before" and call.key.startswith(("checkpoints", "log")):
            raise StorageUnavailable("the bucket is away")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step))}


def test_what_the_nodes_have_and_how_far_the_store_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    bucket, uri = Bucket(), str(tmp_path / "store")
    tier = FastTier(tmp_path / "fast", keep=9, drain=KeepEvery(steps=1000))
    with collecting() as collected:

        def value(name: str) -> Any:
            return collected.value(f"ckptstore.{name}", ckptstore_store=uri)

        with with_faults(open_store(uri, fast=tier), bucket) as store:
            pending = store.save_async(1, state(1))
            pending.result()
            assert value("fast.step") == 1
            assert value("fast.age") >= 0
            pending.durable()
            assert (value("durable.step"), value("drain.age"), value("drain.away")) == (1, 0, 0)
            (complete,) = collected.points("ckptstore.save.duration", ckptstore_save_fast=True)
            (delay,) = collected.points("ckptstore.drain.delay", ckptstore_store=uri)
            (took,) = collected.points("ckptstore.drain.duration", ckptstore_drain_superseded=False)
            assert complete.count == delay.count == took.count == 1
            assert value("drain.io") > 4000
            check_spans(collected, uri)

            store.save(2, state(2))
            store.save(3, state(3))
            assert (value("fast.step"), value("durable.step")) == (3, 1)
            assert value("drain.age") > 0
            bucket.is_away.set()
            threading.Thread(target=pending_of(store, 4)).start()
            until(lambda: value("fast.step") == 4)
            until(lambda: value("drain.away") > 0)
            assert value("durable.step") == 1
            bucket.is_away.clear()
            until(lambda: value("durable.step") == 4)
            until(lambda: value("drain.away") == 0)
            assert value("drain.age") == 0, "what was superseded waits no more"
            assert sum(point.count for point in collected.points("ckptstore.drain.delay")) == 2
            (drain,) = (span for span in collected.spans() if span.name == "ckptstore.drain")
            assert [event.name for event in drain.events] == ["stalled", "recovered"]
            assert collected.points("ckptstore.failures", ckptstore_operation="drain") == []
        with with_faults(open_store(uri, fast=tier), bucket) as store:
            store.resume(state(0))
            bucket.is_away.set()  # else it may be in the store before the end
            store.save(5, state(5))
            store._deadline.set(0.0)
    with collecting() as collected, open_store(uri, fast=tier) as store:
        store.resume(state(0))
        assert collected.value("ckptstore.fast.step") == 5
        assert collected.points("ckptstore.durable.step") == [], (
            "it is on the node alone, and this process knows no more"
        )
        store._deadline.set(0.0)


def pending_of(store: Any, step: int) -> Callable[[], None]:
    """Save a step, and ask for it in the store."""
    pending = store.save_async(step, state(step))
    pending.result()

    def wait() -> None:
        pending.durable()

    return wait


def check_spans(collected: Collected, uri: str) -> None:
    """The drain has a trace of its own, with a link to the save."""
    spans = {span.name: span for span in collected.spans()}
    save, drain = spans["ckptstore.save"], spans["ckptstore.drain"]
    assert save.attributes["ckptstore.save.fast"] is True
    assert save.attributes["ckptstore.store"] == uri, "not the disk of the node"
    assert drain.parent is None
    assert [link.context.span_id for link in drain.links] == [save.context.span_id]
    assert drain.attributes["ckptstore.attempt"] == save.attributes["ckptstore.attempt"]
    assert drain.attributes["ckptstore.number"] == 2
    assert drain.status.status_code is StatusCode.UNSET
