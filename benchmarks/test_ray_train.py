"""A run of Ray Train whose two workers save ten times: Ray alone against Ray with ckptstore, and the way back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
sys.path.append(str(Path(__file__).parents[1] / "tests" / "ray"))

import ray_runs
from cluster import fit, ray_cluster
from sizes import FULL, Take, group, turns

from ckptstore.storage.open import open_storage
from ckptstore.tools.bench.destination import Place, opened_place
from ckptstore.tools.bench.figures.report import S3_SINK, S3_TEST, Sample, WorkloadOutcome

pytestmark = pytest.mark.long

SIZE_BYTES = (1 << 30) if FULL else (4 << 20)
NUM_STEPS = 10 if FULL else 2
STEP_SECONDS = {"busy": 1.0, "calm": 3.0} if FULL else {"busy": 0.2}
"""Between two saves: longer than what Ray's controller waits between two looks at its workers (0.1 s here). While it is
busy an upload takes longer than that, so that either saves wait for each other or copies pile up."""
NUM_WORKERS = 2


PLACES = ["disk", "s3"] if FULL else ["s3"]
WAYS = (
    ["ckptstore", "ckptstore, save", "ckptstore, durable", "Ray, SYNC", "Ray, ASYNC"]
    if FULL
    else ["ckptstore", "Ray, SYNC"]
)


@pytest.fixture(scope="module")
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


def outcome_of(way: str, samples: list[Sample], **facts: float) -> WorkloadOutcome:
    role = "peer" if way.startswith("Ray") else "ckptstore"
    return replace(WorkloadOutcome.of(way, samples, role=role), facts=facts)


@pytest.mark.parametrize(
    ("where", "pace"),
    [
        pytest.param(where, pace, marks=group(f"Ray Train: {NUM_STEPS} saves to {where}, {seconds} s apart"))
        for where in PLACES
        for pace, seconds in STEP_SECONDS.items()
    ],
    indirect=["where"],
)
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("way", WAYS)
def test_ten_saves(take: Take, sink: Place, tmp_path: Path, way: str, turn: int, pace: str) -> None:
    """What each of ten saves of a sharded state blocks rank 0; besides, the seconds of all with the steps, and of the
    whole run.
    """
    if way == "ckptstore, durable" and not sink.is_local:
        pytest.skip("in a bucket every save is durable")

    def saves() -> tuple[WorkloadOutcome, int]:
        sink.remove(run_uri(way, sink))
        run_seconds = run(ray_runs.train, way, sink, tmp_path, pace)
        found = json.loads((tmp_path / "told").read_text())
        samples = [Sample(**sample) for sample in found["samples"]]
        return outcome_of(way, samples, loop_seconds=found["seconds"], run_seconds=run_seconds), SIZE_BYTES

    take(saves, figure="blocked_seconds")


@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=group(f"Ray Train: a new run loads the state from {where}")) for where in PLACES],
    indirect=True,
)
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("way", ["ckptstore", "Ray"])
def test_restore(take: Take, place: Place, tmp_path: Path, way: str, turn: int) -> None:
    """Two workers on two nodes load their parts; besides, the bytes that the server sent over those of the state."""
    if not is_saved(way, place):
        run(ray_runs.train, "Ray, SYNC" if way == "Ray" else way, place, tmp_path)
        (tmp_path / "told").unlink()
    (tmp_path / "told").mkdir()

    def loads() -> tuple[WorkloadOutcome, int]:
        before = place.counts()[2]
        run(ray_runs.restore, way, place, tmp_path)
        ranks = [Sample(**json.loads((tmp_path / "told" / str(rank)).read_text())) for rank in range(NUM_WORKERS)]
        facts = {"sent_over_the_state": (place.counts()[2] - before) / SIZE_BYTES} if place.is_s3 else {}
        return outcome_of(way, [Sample.over_ranks(ranks)], **facts), SIZE_BYTES

    take(loads)
