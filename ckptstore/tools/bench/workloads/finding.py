"""Measure `latest()` and a listing, as a store grows: seconds, and requests, which do not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from ckptstore.format.changes import Claim, Commit
from ckptstore.format.entry import CheckpointEntry
from ckptstore.log import Log
from ckptstore.log.identity import read_or_create_identity
from ckptstore.storage.open import open_storage
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Workload
from ckptstore.tools.bench.work import Contests, Task

_NUM_LOCAL = (1, 100, 1000)
_NUM_REMOTE = (1, 10, 100)


def finding(task: Task, contests: Contests) -> Iterator[Workload]:
    """Measure one workload for each size of a store. The limit is one listing of the log, which reads no record."""
    tasks = []
    for number in _NUM_LOCAL if task.place.is_local else _NUM_REMOTE:
        place = replace(task.place, uri=f"{task.place.uri}/log-of-{number}")
        fill(place, number)
        options = replace(task.options, pause_seconds=0.0)  # nothing is stored between the turns
        tasks.append(replace(task, options=options, place=place, num_checkpoints=number))
    for one, found in zip(tasks, contests(tasks, 1), strict=True):
        title = f"latest() and a listing of {one.num_checkpoints} checkpoints"
        yield replace(found, title=title, size_bytes=0, facts={"checkpoints": one.num_checkpoints})


def fill(place: Place, num_checkpoints: int) -> None:
    """Create a store whose log has so many checkpoints, without their files."""
    storage = open_storage(place.uri, storage_options=place.storage_options, durable=False)
    try:
        read_or_create_identity(storage)
        log = Log(storage)
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
