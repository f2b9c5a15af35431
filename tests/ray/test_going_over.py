"""A run of Ray Train that goes over from one way of keeping checkpoints to another goes on where it was.

Of files, which need no torch; the page on Ray Train loads a state that was reported into a run with a store.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from cluster import RayCluster, fit
from keeping import note, notes

import ckptstore
from ckptstore import InvalidSource, NoUsableCheckpoint

pytestmark = pytest.mark.slow


def opened(config: dict[str, Any], store: ckptstore.ray.RayStore) -> ckptstore.Checkpoint | None:
    import ray.train

    if config["reads"] == "store":
        return ckptstore.ray.resume(store=store, prefer=config.get("prefer", "newest"))
    handed = ray.train.get_checkpoint()
    return None if handed is None else ckptstore.ray.wrap(handed)


def train_in_ways(config: dict[str, Any]) -> None:
    """One way after another; all but the last are refused, and keep nothing."""
    for way in config["ways"]:
        train_one_more({**config, **way})


def train_one_more(config: dict[str, Any]) -> None:
    """Go on in the way of `config["reads"]`, and keep one more step in the way of `config["keeps"]`."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    store = ckptstore.ray.store(ignore_ray=config.get("ignore_ray", False))
    try:
        found = opened(config, store)
    except ckptstore.CkptstoreError as error:
        note(config, "resumed", f"{rank} {type(error).__name__}")
        store.close()
        return
    step, sizes = -1, []
    if found is not None:
        step = found.step
        with found.as_directory() as directory:
            sizes = [path.stat().st_size for path in sorted(directory.glob("model*"))]
    note(config, "resumed", f"{rank} {step} {sizes}")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.bin").write_bytes(bytes(100 * (step + 1) + rank))
        if config["keeps"] == "store":
            store.save_directory(step + 1, directory)
        elif config["keeps"] == "report":
            ckptstore.ray.report({}, directory=directory, step=step + 1)
        else:
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(directory))
    store.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_way_from_one_to_another_loses_a_step(cluster: RayCluster, tmp_path: Path) -> None:
    """In one run, whose name holds what URIs are cut at elsewhere. Each line is a start of its own."""
    starts = [
        [({"reads": "wrap", "keeps": "report"}, "-1 []")],
        [({"reads": "store", "keeps": "store"}, "0 [0, 1]")],  # from report to a store
        [({"reads": "wrap", "keeps": "report"}, "1 [100, 101]")],  # and back
        [({"reads": "store", "keeps": "store", "prefer": "ray"}, "2 [200, 201]")],
        [({"reads": "store", "keeps": "ray"}, "3 [300, 301]")],
        [
            ({"reads": "store", "keeps": "store"}, NoUsableCheckpoint.__name__),  # what Ray stored itself
            ({"reads": "wrap", "keeps": "report"}, InvalidSource.__name__),
            ({"reads": "store", "keeps": "store", "ignore_ray": True}, "3 [300, 301]"),
        ],
    ]
    run: dict[str, Any] = {"storage_path": tmp_path / "runs", "name": "exp#1 a%20b"}
    for number, ways in enumerate(starts):
        told = tmp_path / str(number)
        fit(train_in_ways, config={"notes": str(told), "ways": [way for way, _ in ways]}, **run)
        for rank in "01":
            found = [" ".join(line) for line in notes(told, "resumed") if line[0] == rank]
            assert found == [f"{rank} {resumed}" for _, resumed in ways], ways
    assert [item.name for item in (tmp_path / "runs").iterdir()] == ["exp#1 a%20b"]
