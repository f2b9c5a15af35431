"""Following a store: who is told of what, when the tracker is slow, away or broken, and how it ends."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from forked_ranks import run_ranks

from ckptstore import (
    Checkpoint,
    CheckpointGone,
    CkptstoreError,
    FastTier,
    InvalidInput,
    KeepAll,
    KeepEvery,
    KeepWeights,
    StateMismatch,
    StorageGroup,
    open_store,
)
from ckptstore.dcp import StoreWriter
from ckptstore.integrations.trackers import Reference, choose, follow, following
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 60.0


class Notebook:
    """A tracker that writes steps down. `errors` are raised first, one at each call; `gate` is waited for."""

    def __init__(self, *errors: Exception, gate: threading.Event | None = None, poison: int | None = None) -> None:
        self.taken: list[Reference] = []
        self.errors = list(errors)
        self.gate = gate
        self.poison = poison
        self.num_closed = 0
        self.threads: set[int] = set()

    @property
    def steps(self) -> list[int]:
        return [item.step for item in self.taken]

    def log(self, reference: Reference) -> None:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            self.gate.wait()
        if reference.step == self.poison:
            raise OSError("the page is torn")
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(reference)

    def close(self) -> None:
        self.num_closed += 1

    def __str__(self) -> str:
        return "the notebook"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FIRST_PAUSE_SECONDS", 0.01)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [item for item in caplog.records if item.name == "ckptstore.trackers" and item.levelno >= logging.WARNING]
    return [item.getMessage() for item in told]


def test_what_cannot_be_followed_is_refused(store_root: Path) -> None:
    store: Any
    with open_store(store_root) as store, pytest.raises(InvalidInput, match="with log and close"):
        follow(store, object())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is closed"):
        follow(store, Notebook())
    with pytest.raises(InvalidInput, match="an open store or a URI"):
        follow(7, Notebook())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="close_seconds is nan, it is a number"):
        follow(store_root, Notebook(), close_seconds=math.nan)
    with pytest.raises(InvalidInput, match="at least 0"):
        follow(store_root, Notebook(), close_seconds=-1)


def test_a_tracker_that_hangs_holds_up_no_save_and_no_other_tracker_and_its_end_has_a_deadline(
    store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    notebook, other = Notebook(gate=gate), Notebook()
    with (
        open_store(store_root) as store,
        follow(store, notebook, close_seconds=0.1) as followed,
        follow(store, other, close_seconds=DEADLINE_SECONDS),
    ):
        for step in range(12):
            store.save(step, {"weight": step})
        assert len(store) == 12
        assert not followed.flush(0.01)
    try:
        assert [item.step for item in followed.unsent] == list(range(12)) == other.steps
        (line,) = warnings(caplog)
        assert "the notebook was not told of 12 checkpoints" in line
        assert "(steps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...)" in line
    finally:
        gate.set()


def test_a_tracker_that_comes_back_is_told_of_everything(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    notebook = Notebook(*(ConnectionError("http://me:secret@host is away") for _ in range(4)))
    with open_store(store_root) as store, follow(store, notebook, close_seconds=DEADLINE_SECONDS) as followed:
        for step in (1, 2, 3):
            store.save(step, {"weight": step})
    assert sorted(notebook.steps) == [1, 2, 3]
    assert followed.unsent == ()
    assert (len(notebook.threads), notebook.num_closed) == (1, 1)
    (line,) = warnings(caplog)
    assert "http://host is away" in line
    assert "secret" not in caplog.text


def test_what_is_refused_is_given_up_at_once(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    notebook = Notebook(InvalidInput("no such run at http://me:secret@host"))
    with open_store(store_root) as store, follow(store, notebook) as followed:
        store.save(1, {"weight": 1})
        store.save(2, {"weight": 2})
    assert (notebook.steps, [item.step for item in followed.unsent]) == ([2], [1])
    assert warnings(caplog)[0] == "the notebook is not told of step 1: no such run at http://host"


def test_one_that_always_fails_holds_up_no_other(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    notebook = Notebook(poison=2)
    with open_store(store_root) as store, follow(store, notebook) as followed:
        for step in range(1, 7):
            store.save(step, {"weight": step})
            while step not in (*notebook.steps, 2):  # each is taken before the next comes
                time.sleep(0.001)
    assert sorted(notebook.steps) == [1, 3, 4, 5, 6]
    assert [item.step for item in followed.unsent] == [2]
    assert "again and again" in caplog.text


def test_the_queue_has_an_end(
    store_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "MAX_WAITING", 2)
    gate = threading.Event()
    notebook = Notebook(gate=gate)
    with open_store(store_root) as store, follow(store, notebook) as followed:
        for step in range(1, 7):
            store.save(step, {"weight": step})
        gate.set()
    assert notebook.steps[-2:] == [5, 6]
    assert sorted([*notebook.steps, *(item.step for item in followed.unsent)]) == [1, 2, 3, 4, 5, 6]
    assert "is not told of step" in caplog.text


def test_a_store_is_told_from_others_whoever_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = Notebook()
    with follow("runs/../a", notebook):  # nobody has opened it yet
        for name in (tmp_path / "a", tmp_path / "b", (tmp_path / "a").as_uri()):
            with open_store(name) as store:
                store.save(len(notebook.taken) + 1, {"weight": 1})
    assert {item.store for item in notebook.taken} == {str(tmp_path / "a")}
    assert len(notebook.taken) == 2
    with follow("memory://followed", notebook), open_store("memory://followed") as store:
        store.save(9, {"weight": 1})
    assert notebook.taken[-1].open().step == 9


def test_the_end_of_the_store_is_the_end_of_following(store_root: Path) -> None:
    notebook = Notebook()
    store = open_store(store_root)
    followed = follow(store, notebook)
    store.save_async(1, {"weight": 1})
    store.close()
    assert (notebook.steps, notebook.num_closed, followed.unsent) == ([1], 1, ())
    followed.close()
    with open_store(store_root) as store:
        store.save(2, {"weight": 2})
    assert (notebook.steps, notebook.num_closed) == ([1], 1)


def test_a_fast_checkpoint_is_told_when_it_is_in_the_store_and_not_before(store_root: Path, tmp_path: Path) -> None:
    """Step 2 never comes there, 3 does when the store is closed."""
    state = {"w": torch.zeros(100)}
    tracker = Notebook()
    tier = FastTier(tmp_path / "fast", keep=9, drain=KeepEvery(steps=1000))
    with open_store(store_root, fast=tier) as store, follow(store, tracker):
        pending = store.save_async(1, state, metrics={"loss": 0.5})
        fast = pending.result()
        pending.durable()
        for step in (2, 3):
            fast = store.save(step, state)
        with pytest.raises(InvalidInput, match="what the store has"):
            Reference.to(fast)
    assert tracker.steps == [1, 3]
    assert tracker.taken[0].metrics == {"loss": 0.5}
    assert Reference.to(open_store(store_root)[3]) == tracker.taken[1]


def test_a_save_by_dcp_is_told_and_one_that_fails_is_not(store_root: Path) -> None:
    notebook = Notebook()
    with open_store(store_root) as store, follow(store, notebook):
        with pytest.raises(CkptstoreError):
            store.save(1, {"weight": object()})
        dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(store.dcp_target(), step=7), no_dist=True)
        expected = Reference.to(store[7])
    assert notebook.taken == [expected]


def follow_as_rank(root: str) -> list[int]:
    notebook = Notebook()
    group = StorageGroup(int(os.environ["RANK"]), 2, "start")
    with open_store(root, group=group, durable=False) as store, follow(store, notebook):
        for step in (1, 2):
            store.save_directory(step, None if group.rank else Path(root).with_name("files"))
    return notebook.steps


def test_rank_0_alone_tells(store_root: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("a")
    assert run_ranks(2, follow_as_rank, str(store_root)) == [[1, 2], []]


ENDS_WITHOUT_A_CLOSE = """
import os, sys
import ckptstore
from ckptstore.integrations.trackers import follow

class Tracker:
    def log(self, reference):
        with open(sys.argv[2], "a") as file:
            file.write(f"{reference.step} ")
    def close(self):
        pass

store = ckptstore.open_store(sys.argv[1], durable=False, group="solo")
followed = follow(store, Tracker())
store.save_directory(1, sys.argv[3])
followed.flush()
store.save_directory(2, sys.argv[3])
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    store = ckptstore.open_store(sys.argv[1], durable=False, group="solo")
    store.save_directory(3, sys.argv[3])
"""


def test_a_process_that_ends_tells_what_it_has_and_its_child_tells_nothing(store_root: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("a")
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_A_CLOSE, store_root, tmp_path / "told", tmp_path / "files"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 3 is not told" in done.stderr
    assert (tmp_path / "told").read_text() == "1 2 "


def a_reference(**changed: Any) -> Reference:
    fields: dict[str, Any] = {"store": "/a", "step": 1, "number": 2, "attempt": "step-1-e1-a", "manifest_sha256": "0"}
    return Reference(**{**fields, "size_bytes": 3, "world_size": 4, "created_at": 5.5, **changed})


def test_a_reference_survives_as_text() -> None:
    reference = a_reference(store="s3://bucket/é '\"", metrics={"loss": 0.1, "inf": -math.inf})
    assert Reference.decode(reference.encode()) == reference
    assert math.isnan(Reference.decode(a_reference(metrics={"a": math.nan}).encode()).metrics["a"])
    assert (reference.uri, reference.target) == (
        "s3://bucket/é '\"/checkpoints/step-1-e1-a",
        "s3://bucket/é '\"@1",
    )


def test_a_checkpoint_on_its_own_has_no_reference(store_root: Path) -> None:
    with open_store(store_root) as store:
        store.save(1, {"weight": 1})
        reference = Reference.to(store[1])
    alone = Checkpoint.from_uri(reference.uri)
    assert alone.step == 1
    with pytest.raises(InvalidInput, match="outside of a store"):
        Reference.to(alone)


def test_a_reference_opens_in_a_copy_of_the_store(store_root: Path, tmp_path: Path) -> None:
    with open_store(store_root) as store:
        for step in (1, 2, 3):
            store.save(step, {"weight": step})
        store.roll_back(2)
        reference = Reference.to(store[2])
        assert CliRunner().invoke(main, ["cp", str(store_root), str(tmp_path / "copy")]).exit_code == 0
        store.save(4, {"weight": 4})
        late = Reference.to(store[4])
    assert reference.open(at=tmp_path / "copy").step == 2
    with pytest.raises(InvalidInput, match=r"not in .*copy: record 6 is not there"):
        late.open(at=tmp_path / "copy")


def test_a_reference_to_what_was_thinned_since_opens_what_is_left(store_root: Path) -> None:
    with open_store(store_root, retention=KeepAll() | KeepWeights(KeepAll()), grace_seconds=0.0) as store:
        for step in (1, 2, 3):
            store.save(step, {"model": torch.full((3,), float(step)), "optimizer": torch.zeros(3)})
        reference, gone = Reference.to(store[1]), Reference.to(store[2])
        store.thin(1, "optimizer")
        store.thin(2, "optimizer")
        thinned = Reference.to(store[1])
        store.remove(2)
        store.prune()
        for held in (reference, thinned):
            left = held.open()
            assert torch.equal(left.to_dict()["model"], torch.ones(3)), "the bytes of that step"
            assert left.uri == store[1].uri
            with pytest.raises(StateMismatch, match="thinned"):
                left.load({"model": torch.zeros(3), "optimizer": torch.zeros(3)})
        with pytest.raises(CheckpointGone, match="Step 2"):
            gone.open()


def test_the_way_back_asks_for_what_is_clear() -> None:
    references = [a_reference(step=step, number=step + 2, metrics={"loss": -step}) for step in (1, 2, 3)]
    assert choose(references, run="it").step == 3
    assert choose(references, run="it", best="loss").step == 3
    assert choose(references, run="it", best="loss", mode="max").step == 1
    for asked in ({"step": 1, "best": "loss"}, {"mode": "min"}):
        with pytest.raises(InvalidInput):
            choose(references, run="it", **asked)  # type: ignore[arg-type]
    with pytest.raises(CkptstoreError, match=r"no reference to a checkpoint of /b; it has those of /a"):
        choose(references, run="it", store="/b")


def test_a_callback_that_opens_the_store_itself_is_followed_by_its_place(store_root: Path, tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    from ckptstore.integrations.lightning import CheckpointStoreCallback

    notebook = Notebook()
    callback = CheckpointStoreCallback(store_root, asynchronous=True)
    with follow(store_root, notebook, close_seconds=DEADLINE_SECONDS):
        limits: Any = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 0}
        trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, callbacks=[callback], **limits)
        trainer.fit(BoringModel())
    assert notebook.steps == [2, 4]
