"""A run of Ray Train whose two workers save ten times: Ray alone against Ray with ckptstore, and the way back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ray"))

import ray_runs
from cluster import fit, ray_cluster
from sizes import FULL, ROUNDS

from ckptstore.storage.open import open_storage
from ckptstore.tools.bench.destination import Place, opened_place
from ckptstore.tools.bench.figures.report import S3_SINK, S3_TEST, Sample, Workload, WorkloadOutcome

SIZE_BYTES = (1 << 30) if FULL else (4 << 20)
NUM_STEPS = 10 if FULL else 2
STEP_SECONDS = {"busy": 1.0, "calm": 3.0} if FULL else {"busy": 0.2}
"""Between two saves: longer than what Ray's controller waits between two looks at its workers (0.1 s here). While it is
busy an upload takes longer than that, so that either saves wait for each other or copies pile up."""
NUM_WORKERS = 2


@pytest.fixture(scope="module", params=["disk", "s3"] if FULL else ["s3"])
def where(request: pytest.FixtureRequest) -> str:
    """The kind of place."""
    return str(request.param)


@pytest.fixture(scope="module")
def place(where: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where runs are that another one loads."""
    with opened_place(S3_TEST if where == "s3" else str(tmp_path_factory.mktemp("kept")), {}) as opened:
        yield opened


@pytest.fixture(scope="module")
def sink(where: str, place: Place) -> Iterator[Place]:
    """Where saves are timed. At real sizes that is a server that keeps nothing large."""
    if FULL and where == "s3":
        with opened_place(S3_SINK, {}) as opened:
            yield opened
    else:
        yield place


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two nodes."""
    path = [str(Path(__file__).parent), *sys.path]
    with ray_cluster(environment={"PYTHONPATH": ":".join(path)}):
        yield


def run_uri(way: str, place: Place) -> str:
    """Ray's and ckptstore's runs lie side by side."""
    return f"{place.uri}/{'ray' if way.startswith('Ray') else 'ckptstore'}"


def is_saved(way: str, place: Place) -> bool:
    """Whether there is a run that can be loaded."""
    with closing(open_storage(run_uri(way, place), storage_options=place.storage_options)) as storage:
        return any(True for _ in storage.list(""))


def run(train: Any, way: str, place: Place, tmp_path: Path, pace: str = "busy") -> float:
    """The seconds of one run of Ray Train, from the call to the result."""
    from ray.train import CheckpointConfig

    config = {
        "way": way,
        "num_steps": NUM_STEPS,
        "num_workers": NUM_WORKERS,
        "size_bytes": SIZE_BYTES,
        "step_seconds": STEP_SECONDS[pace],
        "scratch": str(tmp_path),
        "told": str(tmp_path / "told"),
    }
    # A storage path as users of Ray write it.
    options = f"?region=us-east-1&endpoint_override={place.endpoint_url}" if place.is_s3 else ""
    started = time.perf_counter()
    fit(
        train,
        storage_path=f"{place.uri}{options}",
        name=run_uri(way, place).rpartition("/")[2],
        config=config,
        num_workers=NUM_WORKERS,
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    return time.perf_counter() - started


@pytest.mark.parametrize("pace", list(STEP_SECONDS))
def test_ten_saves(tell: Callable[[Workload], None], sink: Place, tmp_path: Path, pace: str) -> None:
    """Ten saves of a sharded state; the facts: the seconds of all ten with the steps, and of the run as a whole."""
    ways = ["ckptstore", "ckptstore, save", "Ray, SYNC", "Ray, ASYNC"] if FULL else ["ckptstore", "Ray, SYNC"]
    ways += ["ckptstore, durable"] if sink.is_local else []
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    loops: dict[str, list[float]] = {way: [] for way in ways}
    runs: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            sink.remove(run_uri(way, sink))
            runs[way].append(round(run(ray_runs.train, way, sink, tmp_path, pace), 2))
            told = json.loads((tmp_path / "told").read_text())
            samples[way] += [Sample(**sample) for sample in told["samples"]]
            loops[way].append(round(told["seconds"], 2))
    tell(
        workload(
            f"Ray Train: {NUM_STEPS} saves, {STEP_SECONDS[pace]} s apart (ckptstore: save_async), seconds of rank 0",
            samples,
            seconds_of_all_saves=loops,
            seconds_of_the_run=runs,
        )
    )


def test_restore(tell: Callable[[Workload], None], place: Place, tmp_path: Path) -> None:
    """Two workers on two nodes load their parts; facts: the bytes that the server sent over those of the state."""
    samples: dict[str, list[Sample]] = {"ckptstore": [], "Ray": []}
    sent: dict[str, list[float]] = {"ckptstore": [], "Ray": []}
    for way in ("ckptstore", "Ray, SYNC"):
        if not is_saved(way, place):
            run(ray_runs.train, way, place, tmp_path)
    (tmp_path / "told").unlink(missing_ok=True)
    (tmp_path / "told").mkdir()
    for _ in range(ROUNDS):
        for way, found in samples.items():
            before = place.counts()[2]
            run(ray_runs.restore, way, place, tmp_path)
            ranks = [json.loads((tmp_path / "told" / str(rank)).read_text()) for rank in range(NUM_WORKERS)]
            found.append(Sample.over_ranks([Sample(**one) for one in ranks]))
            sent[way].append(round((place.counts()[2] - before) / SIZE_BYTES, 3))
    facts = {"bytes_sent_over_the_state": sent} if place.is_s3 else {}
    tell(workload("Ray Train: a new run loads the state", samples, **facts))


def workload(title: str, samples: dict[str, list[Sample]], **facts: Any) -> Workload:
    """All ways."""
    outcomes = tuple(
        WorkloadOutcome.of(way, found, role="peer" if way.startswith("Ray") else "ckptstore")
        for way, found in samples.items()
    )
    return Workload(name="", title=title, size_bytes=SIZE_BYTES, ranks=NUM_WORKERS, outcomes=outcomes, facts=facts)
