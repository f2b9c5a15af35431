"""Measure `latest()` and a listing, as a store grows: seconds, and requests, which do not depend on the machine.

Peers find the newest step in the names of directories, which they take for checkpoints without looking inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.format.changes import Claim, Commit
from ckptstore.format.entry import CheckpointEntry
from ckptstore.log import Log
from ckptstore.log.identity import read_or_create_identity
from ckptstore.opening import open_store
from ckptstore.storage.open import open_storage
from ckptstore.testing import CountCalls, with_faults
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import OURS, Options, Role, Sample, Workload, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter

_NUM_LOCAL = (1, 100, 1000)
_NUM_REMOTE = (1, 10, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """A peer that knows the checkpoints of a directory by their names."""

    name: str
    family: str
    module: str
    directory: str
    """Its name for the directory of a step."""
    newest: Callable[[Path], int]


def _newest_of_orbax(directory: Path) -> int:
    from orbax.checkpoint import CheckpointManager

    with CheckpointManager(directory) as manager:
        return int(manager.latest_step())


def _newest_of_transformers(directory: Path) -> int:
    from transformers.trainer_utils import get_last_checkpoint

    return int(str(get_last_checkpoint(str(directory))).rpartition("-")[2])


FINDERS = (
    Finder(
        name="Orbax CheckpointManager",
        family="orbax",
        module="orbax.checkpoint",
        directory="{}",
        newest=_newest_of_orbax,
    ),
    Finder(
        name="transformers get_last_checkpoint",
        family="transformers",
        module="transformers.trainer_utils",
        directory="checkpoint-{}",
        newest=_newest_of_transformers,
    ),
)


def finding(place: Place, options: Options, *, tell: Callable[[str], None]) -> list[Workload]:
    """Measure one workload for each size of a store. The limit is one listing of the log, which reads no record."""
    found = []
    finders = [one for one in FINDERS if options.wants(one.family)]
    objections = {one.name: objection for one in finders if (objection := _objection(one, place))}
    absent = [
        WorkloadOutcome(name=one.name, family=one.family, role="peer", status="skipped", reason=objections[one.name])
        for one in finders
        if one.name in objections
    ]
    able = [one for one in finders if one.name not in objections]
    for number in _NUM_LOCAL if place.is_local else _NUM_REMOTE:
        uri = f"{place.uri}/log-of-{number}"
        tell(f"a store of {number}")
        fill(uri, place, number)
        searches = {one: _search(one, place, number) for one in able}
        workload = _measure(uri, place, searches, number, options.repeat)
        found.append(replace(workload, outcomes=(*workload.outcomes, *absent)))
        place.remove(uri)
    return found


def _objection(finder: Finder, place: Place) -> str | None:
    """Return why a peer cannot take part. Its module is imported now, before the clock runs."""
    if not place.is_local:
        return "it reads directories"
    try:
        import_module(finder.module)
    except ImportError as error:
        return f"{finder.module} is not installed, or cannot be imported: {error}"
    return None


def _search(finder: Finder, place: Place, number: int) -> Callable[[], None]:
    """Return its search for the newest of so many steps, each a directory."""
    above = place.path / f"{finder.family}-{number}"
    for step in range(number):
        (above / finder.directory.format(step)).mkdir(parents=True)

    def search() -> None:
        assert finder.newest(above) == number - 1

    return search


def fill(uri: str, place: Place, num_checkpoints: int) -> None:
    """Create a store whose log has so many checkpoints, without their files."""
    storage = open_storage(uri, storage_options=place.storage_options, durable=False)
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


def _measure(
    uri: str, place: Place, searches: Mapping[Finder, Callable[[], None]], number: int, repeat: int
) -> Workload:
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

    ours = {OURS: latest, "ckptstore, listing": listing}
    peers = {one.name: search for one, search in searches.items()}
    bodies = {**ours, **peers, "one listing of the log": raw}
    samples: dict[str, list[Sample]] = {name: [] for name in bodies}
    failures: dict[str, str] = {}
    for turn in range(repeat + 1):
        for name in Random(turn).sample([*bodies], len(bodies)):
            counted.clear()
            try:
                with Meter() as meter:
                    bodies[name]()
            except Exception as error:  # of a peer, or of the place: the others go on
                failures.setdefault(name, f"{type(error).__name__}: {error}")
            if turn:
                requests = None if name in peers else counted.total - counted.counts["close"]
                sample = meter.sample(requests=requests)
                samples[name].append(replace(sample, retries=None) if name in peers else sample)
    families = {one.name: one.family for one in searches}
    outcomes = []
    for name, found in samples.items():
        role: Role = "ckptstore" if name in ours else "peer" if name in peers else "limit"
        outcome = WorkloadOutcome.of(name, found, role=role, family=families.get(name))
        if name in failures:
            outcome = replace(outcome, status="failed", reason=failures[name], samples=())
        outcomes.append(outcome)
    facts: dict[str, Any] = {"checkpoints": number}
    title = f"latest() and a listing of {number} checkpoints"
    return Workload(name="ls", title=title, size_bytes=0, ranks=1, facts=facts, outcomes=tuple(outcomes))
