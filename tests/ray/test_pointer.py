"""The file that stands in Ray's directory for a checkpoint in a store; no cluster is needed for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.train import Checkpoint, Result
from storing import arrow_s3, worker_at

import ckptstore
from ckptstore import AccessDenied, CheckpointGone, InvalidInput
from ckptstore.config import RetryConfig
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.pointer import POINTER_NAME, Pointer, read_pointer, write_pointer
from ckptstore.integrations.ray.preemption import Notice
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

ONCE = RetryConfig(retry_attempts=1)


def worker_in(directory: Path) -> Worker:
    return worker_at(str(directory))


def reported(worker: Worker, name: str) -> Checkpoint:
    return Checkpoint(worker.path_of(name), worker.filesystem)


def save_step(run: Path, step: int) -> ckptstore.Checkpoint:
    """A committed checkpoint where the default store of a run lies."""
    source = run.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "model.bin").write_bytes(bytes([step]))
    with ckptstore.open_store(run / "_ckptstore") as store:
        return store.save_directory(step, source)


@pytest.mark.parametrize(
    "pointer",
    [
        Pointer(root="_ckptstore", step=3, number=7, attempt="step-0000000003-e0001-0a0b0c0d"),
        Pointer(root="s3://bucket/runs", step=3, number=None, error="AccessDenied: no", extra={"later": [1]}),
    ],
)
def test_a_pointer_is_read_as_it_was_written(tmp_path: Path, pointer: Pointer) -> None:
    worker = worker_in(tmp_path)
    for _ in range(2):  # Ray may call an upload function again
        write_pointer(worker, "checkpoint_1", pointer, retry=ONCE)
    assert read_pointer(reported(worker, "checkpoint_1"), retry=ONCE) == pointer
    assert [path.name for path in (tmp_path / "checkpoint_1").iterdir()] == [POINTER_NAME]


def test_a_checkpoint_without_a_pointer_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    worker = worker_in(tmp_path)
    (tmp_path / "of_files").mkdir()
    with pytest.raises(InvalidInput, match=r"holds no pointer.*ckptstore\.ray\.wrap"):
        ckptstore.ray.resolve(reported(worker, "of_files"))
    with pytest.raises(CheckpointGone, match="directory of the checkpoint was removed"):
        ckptstore.ray.resolve(reported(worker, "nowhere"))


def test_a_store_with_a_root_of_its_own_is_found(tmp_path: Path) -> None:
    checkpoint = save_step(tmp_path / "far", 3)
    pointer = Pointer.to(checkpoint, root=str(tmp_path / "far/_ckptstore"))
    write_pointer(worker_in(tmp_path / "run"), "checkpoint_1", pointer, retry=ONCE)
    assert ckptstore.ray.resolve(reported(worker_in(tmp_path / "run"), "checkpoint_1")) == checkpoint


def test_a_run_that_was_moved_still_resolves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pointer = Pointer.to(save_step(run, 3), root="_ckptstore")
    write_pointer(worker_in(run), "checkpoint_1", pointer, retry=ONCE)
    run.rename(tmp_path / "elsewhere")
    found = ckptstore.ray.resolve(reported(worker_in(tmp_path / "elsewhere"), "checkpoint_1"))
    with found.as_directory() as path:
        assert (path / "model.bin").read_bytes() == b"\3"


def test_a_whole_result_is_as_good_as_its_checkpoint_and_none_says_where_the_store_is(tmp_path: Path) -> None:
    worker = worker_in(tmp_path / "run")
    saved = save_step(tmp_path / "run", 3)
    write_pointer(worker, "checkpoint_1", Pointer.to(saved, root="_ckptstore"), retry=ONCE)
    places = {"path": worker.run_path, "_storage_filesystem": worker.filesystem, "metrics": {}, "error": None}
    whole = Result(checkpoint=reported(worker, "checkpoint_1"), **places)
    lost = Result(checkpoint=None, **places)
    for open_it in (ckptstore.ray.resolve, ckptstore.ray.wrap):
        assert open_it(whole) == saved
        with pytest.raises(InvalidInput, match=rf"gives None.*open_store\('{tmp_path}/run/_ckptstore'\)\.latest\(\)"):
            open_it(lost)
        with pytest.raises(InvalidInput, match="gives None"):
            open_it(None)


def test_a_pointer_never_leads_to_another_attempt(tmp_path: Path) -> None:
    """A store that was made anew at the same place has the same numbers."""
    run = tmp_path / "run"
    checkpoint = save_step(run, 3)
    pointer = Pointer(root="_ckptstore", step=3, number=checkpoint.number, attempt="step-0000000003-e0001-00000000")
    write_pointer(worker_in(run), "checkpoint_1", pointer, retry=ONCE)
    with pytest.raises(CheckpointGone, match=r"step 3 was removed; live steps at .*: 3"):
        ckptstore.ray.resolve(reported(worker_in(run), "checkpoint_1"))


def test_a_refusal_is_not_tried_again(s3: S3Server) -> None:
    s3.faults.add(Fault(action="status", status=403, code="AccessDenied", times=None))
    worker = worker_at("test/run", filesystem=arrow_s3(s3))
    with pytest.raises(AccessDenied, match="ACCESS_DENIED"):
        write_pointer(worker, "checkpoint_1", Pointer(root="x", step=1, number=1), retry=RetryConfig())
    assert len(s3.operations()) <= 2, "and once more when pyarrow lets go of the file"


def test_the_file_is_json_that_people_can_read(tmp_path: Path) -> None:
    checkpoint = save_step(tmp_path / "run", 3)
    told = json.loads(Pointer.to(checkpoint, root="_ckptstore").encode())
    assert told == {
        "version": 1,
        "about": "The checkpoint of step 3 is in the store _ckptstore beside this directory: in Python "
        "ckptstore.ray.resolve(result.checkpoint) opens it, in a shell `ckptstore show ../_ckptstore@3` shows it.",
        "root": "_ckptstore",
        "step": 3,
        "number": checkpoint.number,
        "attempt": Path(checkpoint.uri).name,
    }


def test_a_notice_stops_no_save_without_a_deadline_and_each_behind_it() -> None:
    untimed, past = (Notice(deadline_seconds=seconds, node_ids=("a",), ranks=(0,)) for seconds in (None, 1.0))
    assert untimed.objection(needed_seconds=1e9) == ""
    assert "0.0 s are left" in past.objection(needed_seconds=0.0)
