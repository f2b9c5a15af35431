"""Going over from one way of keeping checkpoints to another: a start never leaves out, without a word, what Ray has.

A run of one worker without a cluster; the page on Ray Train goes over with Ray.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pyarrow.fs import S3FileSystem
from ray.train import Checkpoint
from storing import make_run, stored, worker_at

import ckptstore
from ckptstore import CheckpointDamaged, CheckpointGone, InvalidSource, NoUsableCheckpoint
from ckptstore.config import RetryConfig
from ckptstore.format.changes import StoreState
from ckptstore.format.ranges import Numbers
from ckptstore.integrations.ray import handed, ray_store
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import Run
from ckptstore.integrations.ray.kept_by_ray.reporting import _Brought, _Reporter
from ckptstore.integrations.ray.pointer import Pointer, write_pointer
from ckptstore.integrations.ray.reports import Reports
from ckptstore.saving.phases import SaveClock
from ckptstore.store import load_in_order

pytestmark = pytest.mark.slow

ONCE = RetryConfig(retry_attempts=1)
Start = Callable[..., ckptstore.ray.RayStore]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(str(tmp_path / "run"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.pt").write_text("weights")
    return tmp_path / "run"


@pytest.fixture
def told() -> list[int]:
    """The steps that were reported to Ray."""
    return []


@pytest.fixture
def start(run: Path, monkeypatch: pytest.MonkeyPatch, told: list[int]) -> Start:
    """The store of a new start of the run's worker, to which Ray hands a checkpoint."""

    def committed(_self: Any, checkpoint: ckptstore.Checkpoint, *_given: Any, **_options: Any) -> None:
        told.append(checkpoint.step)

    monkeypatch.setattr(Reports, "committed", committed)

    def start(handed: Checkpoint | None, *given: Any, **options: Any) -> ckptstore.ray.RayStore:
        monkeypatch.setattr(ray_store, "current_worker", lambda: worker_at(str(run)))
        monkeypatch.setattr(ray_store, "handed_back", lambda: handed)
        return ckptstore.ray.store(*given, **options)

    return start


def saved(root: Path, step: int) -> ckptstore.Checkpoint:
    with ckptstore.open_store(root) as store:
        return store.save_directory(step, root.parent.parent / "source" if root.name == "_ckptstore" else root.parent)


def pointer_to(run: Path, what: ckptstore.Checkpoint | int, root: str = "_ckptstore") -> Checkpoint:
    """To a checkpoint, or of a save of that step which failed."""
    failed = isinstance(what, int)
    pointer = Pointer(root=root, step=what, number=None, error="no space") if failed else Pointer.to(what, root=root)
    write_pointer(worker_at(str(run)), "pointer", pointer, retry=ONCE)
    return Checkpoint.from_directory(str(run / "pointer"))


def reported(run: Path, step: int) -> Checkpoint:
    """What `ckptstore.ray.report` stored."""
    return stored(str(run), [run.parent / "source"], name=f"step-{step}", step=step)


def of_ray_itself(run: Path) -> Checkpoint:
    (run / "checkpoint_000000").mkdir()
    (run / "checkpoint_000000/model.pt").write_text("weights")
    return Checkpoint.from_directory(str(run / "checkpoint_000000"))


def text_of(checkpoint: ckptstore.Checkpoint) -> str:
    with checkpoint.as_directory() as directory:
        return (directory / "model.pt").read_text()


@pytest.mark.parametrize("prefer", ["newest", "ray"])
def test_from_report_to_a_store(run: Path, start: Start, prefer: Any) -> None:
    with start(reported(run, 3)) as store:
        found = ckptstore.ray.resume(store=store, prefer=prefer)
        assert (found.step, found.number, text_of(found)) == (3, None, "weights")
        assert store._job.epoch == 1, "the store is claimed"


def test_a_state_that_was_reported_is_loaded(run: Path, start: Start) -> None:
    reporter = _Reporter(Run.open(worker_at(str(run))), None)
    kept = {"epoch": 3, "weight": torch.arange(4.0)}
    attempt = reporter._store(reporter._met(), "state", _Brought({}, None, None, kept, 3, None), SaveClock())
    state = {"epoch": -1, "weight": torch.zeros(4)}
    found = ckptstore.ray.resume(state, start(Checkpoint.from_directory(str(run / attempt.directory))))
    assert (found.step, state["epoch"], state["weight"].tolist()) == (3, 3, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(("prefer", "step"), [("newest", 4), ("ray", 3)])
def test_a_run_that_died_before_ray_heard_of_the_first_save(run: Path, start: Start, prefer: Any, step: int) -> None:
    handed = reported(run, 3)
    saved(run / "_ckptstore", 4)
    assert ckptstore.ray.resume(store=start(handed), prefer=prefer).step == step


@pytest.mark.parametrize(
    ("hands", "options", "reported_steps"),
    [
        (lambda run, steps: None, {}, [3, 4]),
        (lambda run, steps: pointer_to(run, steps[3]), {}, [4]),
        (lambda run, steps: pointer_to(run, steps[4]), {}, []),
        (lambda run, steps: pointer_to(run, steps[4]), {"ignore_ray": True}, []),
        (lambda run, steps: pointer_to(run, steps[3]), {"ignore_ray": True}, [4]),
        (lambda run, steps: pointer_to(run, 3), {}, [4]),
        (lambda run, steps: pointer_to(run, 5), {}, []),
        (lambda run, steps: of_ray_itself(run), {"ignore_ray": True}, [4]),
    ],
)
def test_what_ray_does_not_know_of_is_reported(
    run: Path, start: Start, told: list[int], hands: Any, options: dict[str, Any], reported_steps: list[int]
) -> None:
    """A killed worker takes the reports with it that Ray had not fetched; one that Ray has is not made twice."""
    steps = {step: saved(run / "_ckptstore", step) for step in (3, 4)}
    with start(hands(run, steps), **options) as store:
        found = store.resume()
    assert (found.step, told) == (4, reported_steps)


@pytest.mark.parametrize("prefer", ["newest", "ray"])
def test_from_a_store_to_report_and_back(run: Path, start: Start, prefer: Any) -> None:
    saved(run / "_ckptstore", 4)
    found = ckptstore.ray.resume(store=start(reported(run, 5)), prefer=prefer)
    assert (found.step, found.number) == (5, None)


def test_which_one_is_newer_is_not_guessed(run: Path, start: Start) -> None:
    saved(run / "_ckptstore", 4)
    handed = reported(run, 2)
    with pytest.raises(NoUsableCheckpoint, match=r"hands back step 2, and the store has step 4.*ignore_ray=True"):
        ckptstore.ray.resume(store=start(handed))
    assert ckptstore.ray.resume(store=start(handed), prefer="ray").step == 2
    assert ckptstore.ray.resume(store=start(handed, ignore_ray=True)).step == 4


def test_a_store_whose_checkpoints_lost_their_manifests(run: Path, start: Start) -> None:
    checkpoint = saved(run / "_ckptstore", 4)
    handed = reported(run, 3)
    Path(checkpoint.uri, "ckptstore.json").unlink()
    found = start(handed).resume()
    assert (found.step, found.number) == (3, None)


@pytest.mark.parametrize("prefer", ["newest", "ray"])
@pytest.mark.parametrize("has_saved", [False, True])
def test_what_ray_stored_itself_is_never_left_out(run: Path, start: Start, prefer: Any, has_saved: bool) -> None:
    if has_saved:
        saved(run / "_ckptstore", 4)
    handed = of_ray_itself(run)
    with pytest.raises(NoUsableCheckpoint, match=r"no state can be loaded.*as_directory\(\).*ignore_ray=True"):
        ckptstore.ray.resume(store=start(handed), prefer=prefer)
    with pytest.raises(NoUsableCheckpoint, match="no state can be loaded"):
        start(handed).resume()  # as the callbacks do
    found = start(handed, ignore_ray=True).resume(prefer=prefer)
    assert (found and found.step) == (4 if has_saved else None)


@pytest.mark.parametrize("prefer", ["newest", "ray"])
def test_a_pointer_to_another_store(run: Path, start: Start, tmp_path: Path, prefer: Any) -> None:
    far = tmp_path / "far/_ckptstore"
    far.parent.mkdir()
    handed = pointer_to(run, saved(far, 3), root=str(far))
    with pytest.raises(NoUsableCheckpoint, match=rf"step 3 of another store, {far};.*ckptstore\.ray\.store\('{far}'\)"):
        start(handed).resume(prefer=prefer)
    assert start(handed, far).resume(prefer=prefer).step == 3


@pytest.mark.parametrize("prefer", ["newest", "ray"])
def test_one_store_by_two_names_is_one(run: Path, start: Start, prefer: Any) -> None:
    handed = pointer_to(run, saved(run / "_ckptstore", 3))
    for root in (run / "_ckptstore", f"file://{run}/_ckptstore", os.path.relpath(run / "_ckptstore")):
        assert start(handed, root).resume(prefer=prefer).step == 3


def test_a_store_that_was_removed(run: Path, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = saved(run / "_ckptstore", 3)
    handed = pointer_to(run, checkpoint)
    (run / "_ckptstore").rename(run / "elsewhere")
    with pytest.raises(NoUsableCheckpoint, match=r"step 3 is not in the store any more.*has no checkpoint"):
        start(handed).resume()
    saved(run / "_ckptstore", 1)
    saved(run / "_ckptstore", 2)
    (run / "pointer/ckptstore-pointer.json").write_text("torn")
    assert start(handed).resume().step == 2
    assert "is passed over" in caplog.text
    shutil.rmtree(run / "_ckptstore")
    assert start(pointer_to(run, 3)).resume() is None, "a save that failed is no checkpoint"


def test_a_pointer_to_what_was_thinned_since(run: Path, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    policy = ckptstore.KeepAll() | ckptstore.KeepWeights(ckptstore.KeepAll())
    with ckptstore.open_store(run / "_ckptstore", retention=policy) as store:
        for step in (1, 2):
            store.save(step, {"model": torch.full((3,), float(step)), "optimizer": torch.zeros(3)})
        pointer = pointer_to(run, store[1])
        store.thin(1, "optimizer")
    assert torch.equal(ckptstore.ray.resolve(pointer).to_dict()["model"], torch.ones(3))
    with start(pointer) as store:
        assert store.resume().step == 2
    assert "step 1 was thinned at" in caplog.text
    assert "and lacks optimizer" in caplog.text


def test_wrap_opens_a_pointer_too(run: Path) -> None:
    handed = pointer_to(run, saved(run / "_ckptstore", 3))
    assert text_of(ckptstore.ray.wrap(handed)) == "weights"


def test_wrap_says_what_ray_stored_itself(run: Path) -> None:
    handed = of_ray_itself(run)
    with pytest.raises(InvalidSource, match=r"Ray stored it itself.*as_directory\(\)"):
        ckptstore.ray.wrap(handed)
    (run / "checkpoint_000000/.metadata").touch()
    with pytest.raises(InvalidSource, match=r"from_uri"):
        ckptstore.ray.wrap(handed)
    (run / "checkpoint_000000/tensors.index").touch()
    with pytest.raises(CheckpointDamaged, match="never ended"):
        ckptstore.ray.wrap(handed)
    with pytest.raises(CheckpointGone, match="Ray has deleted"):
        ckptstore.ray.wrap(Checkpoint.from_directory(str(run / "nothing")))


@pytest.mark.parametrize("name", ["exp#1", "a%20b", "a b", "run@3", "é", "e\u0301", "what?"])
def test_run_names_are_taken_literally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.pt").write_text("weights")
    path = tmp_path / "runs" / name
    make_run(str(path))
    handed = stored(str(path), [tmp_path / "source"])
    monkeypatch.setattr(ray_store, "current_worker", lambda: worker_at(str(path)))
    monkeypatch.setattr(ray_store, "handed_back", lambda: handed)
    found = ckptstore.ray.store().resume()
    assert found.uri == handed.path
    assert [item.name for item in (tmp_path / "runs").iterdir()] == [name]


def test_a_store_in_the_run_is_recognized_whatever_credentials_ray_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was opened with `storage_options`, because ckptstore cannot take a role from Ray's file system."""
    pointer = Pointer(root="_ckptstore", step=3, number=7)
    monkeypatch.setattr(handed, "read_pointer", lambda *_, **__: pointer)
    filesystem = S3FileSystem(role_arn="arn:aws:iam::1:role/train", session_name="run", region="us-east-1")
    newest = SimpleNamespace(state=StoreState(live=Numbers([7])))
    job: Any = SimpleNamespace(
        log=SimpleNamespace(newest=lambda: newest), storage=SimpleNamespace(uri="s3://bucket/run/_ckptstore")
    )
    assert handed.look(Checkpoint("bucket/run/step-3", filesystem), job, prefers_ray=True) == (7, "")


def test_starts_that_prefer_ray_leave_nothing_on_the_nodes(tmp_path: Path) -> None:
    """What is on them alone would fill their disks, start by start, and be gone on with later."""
    tier = ckptstore.FastTier(tmp_path / "node", keep=2)
    for start in range(4):
        with ckptstore.open_store(tmp_path / "store", fast=tier, retention=ckptstore.KeepLatest(2)) as store:
            state = {"n": torch.zeros(3)}
            latest = store.latest()
            if latest is None or latest.number is None:
                store.resume(state)
            else:
                found = load_in_order(store, state, ray_store.RaysOrder(latest.number), claim=True)
                assert found.number == latest.number
            for step in range(3):
                store.save(10 * start + step, state)
        assert len({path.name for path in (tmp_path / "node").rglob("step-*") if path.is_dir()}) == 2, start
