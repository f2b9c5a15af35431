"""The position in a dataset of Ray Data is saved with the state: after a resume come the samples that were due."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ingesting
import pytest
from cluster import RayCluster, fit, ray_cluster
from keeping import notes

pytestmark = pytest.mark.slow

NUM_FILES, ROWS_PER_FILE, EPOCHS, WORKERS = 6, 16, 2, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One node: each CPU that is left over gets a process that reads."""
    with ray_cluster(num_nodes=1, num_cpus=WORKERS + 2) as running:
        yield running


@pytest.mark.long
@pytest.mark.timeout(600)
def test_after_a_resume_come_the_samples_that_were_due(cluster: RayCluster, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    from ray.train import DataConfig

    (tmp_path / "data").mkdir()
    for number in range(NUM_FILES):
        rows = pa.table({"row": range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)})
        pq.write_table(rows, tmp_path / f"data/{number}.parquet")
    ordered = ray.data.ExecutionOptions(preserve_order=True)
    data = ray.data.read_parquet(str(tmp_path / "data"), override_num_blocks=NUM_FILES)
    trainer = {"datasets": {"train": data}, "dataset_config": DataConfig(execution_options=ordered)}
    how: Any = {"config": {"notes": str(tmp_path), "epochs": EPOCHS}, "num_workers": WORKERS, "max_failures": 1}
    fit(ingesting.train, tmp_path / "runs", **how, trainer=trainer)
    assert (tmp_path / "died").exists()
    assert sorted(notes(tmp_path, "resumed")) == [["0", "0", "0"], ["0", "1", "2"], ["1", "0", "0"], ["1", "1", "2"]]

    seen: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for rank, epoch, number, *rows in notes(tmp_path, "batches"):
        seen[rank, epoch, number].append(rows)
    assert len(seen[("1", "1", "3")]) == 2, "the batch after the last save came again"
    for where, batches in seen.items():
        assert all(rows == batches[0] for rows in batches), f"rank, epoch, batch {where}"
    for epoch in range(EPOCHS):
        trained = [row for (_, other, _), batches in seen.items() if other == str(epoch) for row in batches[0]]
        assert sorted(map(int, trained)) == list(range(NUM_FILES * ROWS_PER_FILE)), "every sample, and each once"
    orders = [[seen["0", str(epoch), str(number)][0] for number in range(1, 7)] for epoch in range(EPOCHS)]
    assert orders[0] != orders[1], "each epoch has an order of its own"
