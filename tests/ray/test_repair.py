"""A run whose list of checkpoints Ray has torn: it is named, mended, and the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keeping
import pytest
from cluster import RayCluster, fit
from keeping import notes
from pyarrow.fs import FileSystem
from ray.train import CheckpointConfig, Result
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from storing import arrow_s3, make_run, stored

import ckptstore
from ckptstore import InvalidInput, NoUsableCheckpoint
from ckptstore.testing.s3_server import S3Server
from ckptstore.tools.doctor.examination import examine
from ckptstore.tools.doctor.finding import Finding

pytestmark = pytest.mark.slow

SNAPSHOT = "checkpoint_manager_snapshot.json"


def told_by_doctor(uri: str, **options: Any) -> Finding:
    (finding,) = [item for item in examine(uri, **options).findings if item.name == "list of Ray Train"]
    return finding


def test_a_run_with_a_torn_list_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    run = tmp_path / "runs/torn"
    given: dict[str, Any] = {"storage_path": tmp_path / "runs", "name": "torn"}
    fit(keeping.save_directories, config={"notes": str(tmp_path / "1"), "steps": 3}, **given)
    assert told_by_doctor(str(run)).status == "ok"
    os.truncate(run / SNAPSHOT, 0)  # its driver was killed while it wrote

    with pytest.raises(Exception, match="Expecting value: line 1 column 1"):
        fit(keeping.save_directories, config={"notes": str(tmp_path / "2"), "steps": 1}, **given)
    for uri in (run, run / "_ckptstore"):
        found = told_by_doctor(str(uri))
        assert found.status == "failed"
        assert "it is empty" in found.detail
        assert found.hint == f"In Python: ckptstore.ray.repair({str(run)!r})"

    repaired = ckptstore.ray.repair(str(run))
    assert repaired.steps == (1, 2)
    assert set(repaired.left_out.values()) == {"step 0 is not in the store any more"}
    assert (run / repaired.backup).read_bytes() == b""
    assert told_by_doctor(str(run)).status == "ok"
    again = {"notes": str(tmp_path / "3"), "steps": 1, "prefer": "ray"}
    result = fit(keeping.save_directories, config=again, **given)
    assert sorted(notes(tmp_path / "3", "resumed")) == [["0", "3"], ["1", "3"]]
    assert [ckptstore.ray.resolve(pointer).step for pointer, _ in result.best_checkpoints[1:]] == [2, 3]


def source(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.pt").write_text("bytes")
    return directory


def manager(root: str, filesystem: FileSystem | None, config: CheckpointConfig) -> Any:
    """What Ray makes of the list when it starts the run."""
    return CheckpointManager(config, StorageContext(root, "run", storage_filesystem=filesystem))


@pytest.mark.parametrize("where", ["local", "s3"])
def test_the_list_is_made_of_whole_directories(where: str, s3: S3Server, tmp_path: Path) -> None:
    root = str(tmp_path) if where == "local" else f"test/{tmp_path.name}"
    system = None if where == "local" else arrow_s3(s3)
    uri = f"{root}/run" if system is None else f"s3://{root}/run"
    options = {} if system is None else {"storage_options": s3.storage_options}
    ranked = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min")
    make_run(f"{root}/run", system)
    filesystem = system or FileSystem.from_uri("/")[0]

    def write(name: str, data: bytes) -> None:
        filesystem.create_dir(f"{root}/run/{name}".rpartition("/")[0])
        with filesystem.open_output_stream(f"{root}/run/{name}") as stream:
            stream.write(data)

    ours = [
        stored(
            f"{root}/run",
            [source(tmp_path / f"source-{step}")],
            name=f"checkpoint_{step}",
            step=step,
            filesystem=system,
        )
        for step in (4, 7)
    ]
    names = [Path(checkpoint.path).name for checkpoint in ours]
    write("by_ray_listed/model.pt", b"bytes")
    write("by_ray/model.pt", b"bytes")
    listed = {"version": 0, "checkpoint_dir_name": "by_ray_listed", "metrics": {"loss": 0.1, "text": "kept"}}
    write(
        SNAPSHOT,
        ('{"ray_version": "2", "checkpoint_results": [' + json.dumps(listed) + ', {"version": 0, "che').encode(),
    )

    assert "is torn after" in told_by_doctor(uri, **options).detail
    with pytest.raises(InvalidInput, match="no directory 'nowhere'"):
        ckptstore.ray.repair(uri, whole=["nowhere"], **options)
    repaired = ckptstore.ray.repair(uri, checkpoint_config=ranked, **options)
    assert set(repaired.kept) == {*names, "by_ray_listed"}
    assert repaired.left_out == {"by_ray": "Ray stored its 1 files itself: whether they are all is not known"}
    assert any("by_ray is left out" in sentence for sentence in repaired.unknown)

    of_ray = manager(root, system, ranked)
    assert of_ray._latest_checkpoint_result.checkpoint.path.endswith(repaired.kept[-1])
    assert [result.metrics["loss"] for result in of_ray._checkpoint_results] == [0.5, 0.5, 0.1], "worst first"
    assert of_ray._checkpoint_results[-1].metrics["text"] == "kept"
    assert of_ray._current_report_index == 7, "reports go on with step 8"
    assert ckptstore.ray.repair(uri, **options).fault == "", "nothing is left to mend"
    filesystem.delete_dir(f"{root}/run/by_ray_listed")
    assert "by_ray_listed" in told_by_doctor(uri, **options).detail
    assert ckptstore.ray.repair(uri, **options).kept == tuple(names)


def test_what_only_ray_has_stored_is_taken_on_the_users_word(tmp_path: Path) -> None:
    make_run(str(tmp_path / "run"))
    source(tmp_path / "run/checkpoint_1")
    (tmp_path / "run" / SNAPSHOT).write_bytes(b"")
    with pytest.raises(NoUsableCheckpoint, match=r"checkpoint_1: Ray stored its 1 files itself.*whole="):
        ckptstore.ray.repair(str(tmp_path / "run"))
    assert ckptstore.ray.repair(str(tmp_path / "run"), whole=["checkpoint_1"]).steps == (None,)
    assert Result.from_path(tmp_path / "run").checkpoint.path == str(tmp_path / "run/checkpoint_1")
    (tmp_path / "run" / SNAPSHOT).unlink()
    assert ckptstore.ray.repair(str(tmp_path / "run"), whole=["checkpoint_1"]).fault == "it is not there"
    (tmp_path / "run" / SNAPSHOT).unlink()
    (tmp_path / "run/.validate_storage_marker").unlink()
    with pytest.raises(InvalidInput, match="There is no run of Ray Train"):
        ckptstore.ray.repair(str(tmp_path / "run"), whole=["checkpoint_1"])
