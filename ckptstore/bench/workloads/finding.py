"""`latest()` and a listing, as a store grows: seconds, and requests that do not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ckptstore.bench.destination import Place
from ckptstore.bench.figures.report import OURS, Sample, Workload, WorkloadOutcome
from ckptstore.bench.measure import Meter
from ckptstore.catalogue import job_of
from ckptstore.config import RetryConfig
from ckptstore.format.changes import CheckpointEntry, Claim, Commit
from ckptstore.log import Log
from ckptstore.log.identity import read_or_create_identity
from ckptstore.opening import open_store
from ckptstore.storage.open import open_storage
from ckptstore.testing import CountCalls, with_faults

_NUM_LOCAL = (1, 100, 1000)
_NUM_REMOTE = (1, 10, 100)


def finding(place: Place, *, repeat: int, tell: Callable[[str], None]) -> list[Workload]:
    """One workload for each size of a store. The limit is one listing of the log, which reads no record."""
    found = []
    for number in _NUM_LOCAL if place.is_local else _NUM_REMOTE:
        uri = f"{place.uri}/log-of-{number}"
        tell(f"a store of {number}")
        fill(uri, place, number)
        found.append(_measure(uri, place, number, repeat))
        place.remove(uri)
    return found


def fill(uri: str, place: Place, num_checkpoints: int) -> None:
    """A store whose log says that it holds so many checkpoints; their files are not there."""
    storage = open_storage(uri, storage_options=place.storage_options, durable=False)
    try:
        read_or_create_identity(storage)
        log = Log(storage, retry=RetryConfig())
        log.append(lambda _: Claim(start_token="bench", world_size=8))
        for step in range(num_checkpoints):
            entry = CheckpointEntry(
                step=step,
                epoch=1,
                attempt=f"step-{step:010d}-e0001-0123abcd",
                manifest_sha256="0" * 64,
                kind="state",
                world_size=8,
                size_bytes=10**9,
                num_files=16,
                created_at=time.time(),
                metrics={"loss": 1.0 / (1 + step)},
                save_number=step + 1,
            )
            log.append(lambda _, entry=entry: Commit(entry=entry))  # type: ignore[misc]
    finally:
        storage.close()


def _measure(uri: str, place: Place, number: int, repeat: int) -> Workload:
    counted = CountCalls()

    def latest() -> None:
        with with_faults(open_store(uri, storage_options=place.storage_options), counted) as store:
            found = store.latest()
            assert found is not None
            assert found.step == number - 1

    def listing() -> None:
        with with_faults(open_store(uri, storage_options=place.storage_options), counted) as store:
            assert len(store.entries()) == number

    def raw() -> None:
        storage = job_of(with_faults(open_store(uri, storage_options=place.storage_options), counted)).storage
        assert len([*storage.list("log/")]) > number
        storage.close()

    bodies = {OURS: latest, "ckptstore, listing": listing, "one listing of the log": raw}
    samples: dict[str, list[Sample]] = {name: [] for name in bodies}
    for turn in range(repeat + 1):
        for name, body in bodies.items():
            counted.clear()
            with Meter() as meter:
                body()
            if turn:
                samples[name].append(meter.sample(requests=counted.total - counted.counts["close"]))
    outcomes = [
        WorkloadOutcome.of(name, found, role="limit" if name.startswith("one") else "ckptstore")
        for name, found in samples.items()
    ]
    facts: dict[str, Any] = {"checkpoints": number}
    title = f"latest() and a listing of {number} checkpoints"
    return Workload(name="ls", title=title, size_bytes=0, ranks=1, facts=facts, outcomes=tuple(outcomes))
