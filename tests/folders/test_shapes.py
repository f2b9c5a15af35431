"""Shapes of a user's own, and what is no shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore import InvalidInput, open_store
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules, read_shapes
from ckptstore.tools.run.folders.candidate import guessed_step
from tests.folders.test_finished_property import zipped

JOB = JobSeen(frozenset(), is_started=True)
OWN = """
[[shape]]
name = "mine"
project = "mine"
directory = 'v(?P<step>\\d+)_run'
marker = "END"
beside = ["best.txt"]
"""


def rules(tmp_path: Path, text: str, **options: Any) -> Rules:
    (tmp_path / "shapes.toml").write_text(text)
    return Rules(shapes=read_shapes(tmp_path / "shapes.toml"), **options)


def test_a_shape_of_ones_own_is_tried_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "v7_run").mkdir(parents=True)
    (out / "v7_run/.metadata").write_bytes(b"m")  # that of torch's DCP too
    (out / "best.txt").write_text("v7")
    folder = Folder(out, rules(tmp_path, OWN))
    folder.look(JOB)
    assert folder.look(JOB).unfinished == {"v7_run": "END is not there yet"}
    (out / "v7_run/END").touch()
    folder.look(JOB)
    (found,) = folder.look(JOB).finished
    assert (found.shape, found.step, found.is_exact, found.beside["best.txt"].text) == ("mine", 7, True, "v7")


@pytest.mark.parametrize(
    "entry",
    [
        "directory = 'a('",
        "directory = '(?i)a'\nhas = 'b(?i)'",
        "directory = 'a'\nfile = 'b'",
        "marker = 'END'",
        "directory = 'a'\nmarked = 'END'",
        "directory = 1",
        "directory = 'a'\ntells_all = 'yes'",
        "directory = 'a'\nbeside = [1]",
        "directory = 'a'\nbeside = 'x'",
        "directory = 'a'\nstep = ['name:step']",
        "directory = 'a'\nstep = ['somewhere']",
        "file = 'a'\ntogether = 'b('",
        "directory = 'a'\nranked_by = 'r'",
        "directory = 'a'\n[[other]]",
        "directory = ",
    ],
)
def test_what_is_no_shape_is_refused_by_name(tmp_path: Path, entry: str) -> None:
    with pytest.raises(InvalidInput, match=r"shape"):
        rules(tmp_path, f"[[shape]]\nname = 'mine'\n{entry}")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-100-epoch-9", 100),
        ("ep1-ba20-rank0.pt", 20),
        ("weights.02-14.94.keras", 2),
        ("best_neg_loss=-0.3056.pt", None),
        ("step=5.ckpt", 5),
        ("model_v2_iter_000300.pth", 300),
        ("last.pt", None),
        ("7", 7),
    ],
)
def test_the_number_that_is_taken_for_a_step(name: str, step: int | None) -> None:
    assert guessed_step(name) == step


def test_what_cannot_come_along_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine_1.pt").write_bytes(zipped(1, ""))
    (out / "small.csv").write_text("1")
    (out / "large.csv").write_text("1" * 1_100_000)
    (out / "bytes.csv").write_bytes(b"\xff\xfe")
    folder = Folder(out, Rules(patterns=("mine_*",), beside=("*.csv",)))
    folder.look(JOB)
    look = folder.look(JOB)
    assert set(look.finished[0].beside) == {"small.csv", "bytes.csv"}
    assert look.left_out == {"large.csv": "has 1,100,000 bytes, and at most 1,048,576 come along"}


def test_a_disk_that_fails_for_a_while_is_not_the_fault_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine_1.pt").write_bytes(zipped(1, ""))
    folder, fails = Folder(tmp_path / "out", Rules(patterns=("mine_*",))), [True] * 6
    hold = folder.hold

    def flaky(*arguments: Any) -> Any:
        if fails and fails.pop():
            raise OSError(28, "No space left on device")
        return hold(*arguments)

    monkeypatch.setattr(folder, "hold", flaky)
    with open_store(tmp_path / "store", durable=False) as store:
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
        for _ in range(20):
            committer.failures.not_before = 0.0
            committer._round()
        assert [checkpoint.step for checkpoint in store] == [1]
        assert committer.outcome().passed == {}


def test_what_the_store_has_left_behind_is_not_asked_for_at_the_end(tmp_path: Path) -> None:
    """`--require-commit` wants the newest; an older one that is left in the folder is none."""
    (tmp_path / "out").mkdir()
    with open_store(tmp_path / "store", durable=False) as store:
        for step in (1, 5):
            (tmp_path / f"out/mine_{step}.pt").write_bytes(zipped(step, ""))
        folder = Folder(tmp_path / "out", Rules(patterns=("mine_{step}.pt",)))
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
        committer.hurry()  # step 5 goes first
        for _ in range(4):
            committer._round()
        (tmp_path / "out/mine_5.pt").unlink()
        outcome = committer.outcome()
        assert (outcome.has_last, list(outcome.passed)) == (True, ["mine_1.pt"])


def test_torchtune_writes_its_own_format_too(tmp_path: Path) -> None:
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "epoch_0/model-00001-of-00001.bin").write_bytes(zipped(1, ""))
    assert set(Folder(tmp_path, Rules()).look(JOB).unfinished) == {"epoch_0"}


def test_a_whole_file_that_is_still_open_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "mine_1.pt").write_bytes(zipped(1, ""))
    folder = Folder(tmp_path, Rules(patterns=("mine_*",)))
    with (tmp_path / "mine_1.pt").open("ab"):
        folder.look(JOB)
        assert folder.look(JOB).unfinished == {"mine_1.pt": "mine_1.pt is open for writing"}
    assert [found.name for found in folder.look(JOB).finished] == ["mine_1.pt"]


def test_a_guess_of_a_later_run_replaces_no_other_name(tmp_path: Path) -> None:
    """Each folder alone gives no reason to doubt the number."""
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        (tmp_path / run / f"{run}-7.pt").write_bytes(zipped(7, run))
        with open_store(tmp_path / "store", durable=False) as store:
            folder = Folder(tmp_path / run, Rules(patterns=("*.pt",)))
            committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
            for _ in range(3):
                committer._round()
    with open_store(tmp_path / "store") as store:
        found = {checkpoint.step: checkpoint.metadata["folder"]["name"] for checkpoint in store}
        assert (found, store.trash()) == ({7: "first-7.pt", 8: "second-7.pt"}, [])
