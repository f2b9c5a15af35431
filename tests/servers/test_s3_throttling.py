"""A storage that throttles: saves commit, with fewer requests in flight meanwhile, and as many as before afterwards."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.events import ConcurrencyChanged, Event, RequestRetried, listening
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

NUM_REQUESTS = 8
THROTTLED_SECONDS = 6.0
DEADLINE_SECONDS = 120.0


@pytest.mark.timeout(300)
def test_fewer_requests_while_every_second_one_is_throttled(
    fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPTSTORE_NUM_REQUESTS", str(NUM_REQUESTS))
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "60")  # each try is a toss of a coin
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.5")
    (tmp_path / "big.bin").write_bytes(os.urandom(40 << 20))
    for number in range(60):
        (tmp_path / f"small-{number}.bin").write_bytes(os.urandom(10_000))
    events: list[Event] = []
    clear = threading.Timer(THROTTLED_SECONDS, fast_s3.faults.clear)
    uri = "s3://test/throttling/one"
    options = {"storage_options": fast_s3.storage_options}
    with listening(events.append), ckptstore.open_store(uri, **options) as store:
        store.save_directory(0, tmp_path)
        assert limits(events) == []
        fast_s3.faults.add(Fault(action="status", status=503, code="SlowDown", times=None, probability=0.5))
        clear.start()
        last = -1
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            for last in itertools.count(1):
                store.save_directory(last, tmp_path)
                if not fast_s3.faults.pending and limits(events)[-1:] == [NUM_REQUESTS]:
                    break
                assert time.monotonic() < deadline, limits(events)
        finally:
            clear.cancel()
            clear.join()
            fast_s3.faults.clear()
        assert min(limits(events)) <= 2
        assert any(isinstance(event, RequestRetried) for event in events)
        assert [checkpoint.step for checkpoint in store] == list(range(last + 1))
        for checkpoint in store:
            checkpoint.verify()
        assert fast_s3.objects.uploads == {}, "no part is left behind"


def limits(events: list[Event]) -> list[int]:
    """Every change of the limit so far."""
    return [event.limit for event in events if isinstance(event, ConcurrencyChanged)]
