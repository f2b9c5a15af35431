"""Links, second names and directories that cannot be listed: each checkpoint is stored whole, or named."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from ckptstore import CheckpointStore, open_store
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules, newest_first, restore_folder
from tests.folders.test_finished_property import zipped

MARKED = Rules(patterns=("step_{step}",), marker="done")
FILES = {"w.pt": zipped(1, "x"), "done": b"1"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with open_store(tmp_path / "store", durable=False, group="solo") as opened:
        opened.resume()
        yield opened


def agent(store: CheckpointStore, folder: Path, rules: Rules = MARKED) -> Committer:
    return Committer(
        store=store, folder=Folder(folder, rules), job=lambda: JobSeen(frozenset()), interval_seconds=0.01, began_at=0.0
    )


def checkpoint(top: Path, **more: bytes) -> Path:
    top.mkdir(parents=True)
    for name, data in {**FILES, **more}.items():
        (top / name).write_bytes(data)
    return top


def stored(store: CheckpointStore) -> dict[int, dict[str, bytes]]:
    found = {}
    for it in store:
        with it.as_directory() as directory:
            found[it.step] = {file.name: (directory / file.name).read_bytes() for file in it.files}
    return found


def deep(top: Path) -> None:
    """Directories whose path is longer than the system takes one."""
    with chdir(top):
        for _ in range(25):
            os.mkdir("n" * 200)
            os.chdir("n" * 200)
        Path("w.bin").write_bytes(b"w")


@pytest.mark.parametrize(
    ("odd", "files", "why"),
    [
        (lambda top: os.link(top / "w.pt", top / "x.pt"), {"x.pt": FILES["w.pt"]}, ""),
        (lambda top: (top / "a.pt").symlink_to("w.pt"), {"a.pt": FILES["w.pt"]}, ""),
        (lambda top: (top / "l").symlink_to("../../fast"), {"l/f.bin": b"f"}, ""),
        (
            lambda top: [(top / "sub").mkdir(), (top / "sub/l").symlink_to(top / "../../fast")],
            {"sub/l/f.bin": b"f"},
            "",
        ),
        (lambda top: (top / "l.pt").symlink_to("../../fast/f.bin"), {}, "l.pt is a link that leads out"),
        (lambda top: (top / "l").symlink_to(".."), {}, "l is a link to a directory of the folder"),
        (lambda top: (top / "l").symlink_to("l"), {}, "l is a link to nothing"),
        (deep, {}, "cannot be stored: it has"),
        (lambda top: os.mkfifo(top / "pipe.pt"), {}, "pipe.pt is no regular file: a pipe"),
        (lambda top: (top / "a\nb").touch(), {}, "it has a control character"),
        (lambda top: (top / os.fsdecode(b"\xff")).touch(), {}, "it is not valid Unicode"),
        (lambda top: (top / "ckptstore.json").touch(), {}, "is reserved by ckptstore"),
    ],
    ids=[
        *("second name", "link inside", "directory", "directory below", "link out", "link up", "loop", "deep"),
        *("pipe", "control character", "no UTF-8", "reserved"),
    ],
)
def test_one_odd_checkpoint_keeps_no_other_out(
    tmp_path: Path, store: CheckpointStore, odd: Callable[[Path], object], files: dict[str, bytes], why: str
) -> None:
    """Four of five are odd, and all come before the one that is not."""
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast/f.bin").write_bytes(b"f")
    for step in range(1, 6):
        top = checkpoint(tmp_path / f"out/step_{step}")
        if step < 5:
            odd(top)
    committer = agent(store, tmp_path / "out")
    for _ in range(3):
        assert not committer._round()
    committer.finish()
    assert committer._round(), "and none keeps the agent from ending"
    whole = {step: {**FILES, **files} for step in range(1, 5)} if not why else {}
    assert stored(store) == {**whole, 5: FILES}
    passed = committer.outcome().passed
    assert sorted(passed) == [f"step_{step}" for step in range(1, 5) if why]
    assert all(why in said for said in passed.values())


def test_what_changes_under_the_agent_each_time_keeps_no_other_out(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that gets a new status between each look and its hold, which no look can see."""
    for step in (1, 2):
        checkpoint(tmp_path / f"out/step_{step}")
    committer = agent(store, tmp_path / "out")
    hold = committer.folder.hold

    def touched(found: object, names: object = None) -> object:
        os.chmod(tmp_path / "out/step_1/w.pt", 0o644)
        return hold(found, names)  # type: ignore[arg-type]

    monkeypatch.setattr(committer.folder, "hold", touched)
    committer.finish()
    while not committer._round():
        pass
    assert stored(store) == {2: FILES}
    (reason,) = committer.outcome().passed.values()
    assert "step_1 changed after it had been finished: w.pt" in reason


def test_a_file_that_is_itself_a_link_out_of_the_folder_is_named(tmp_path: Path, store: CheckpointStore) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "fast/x.ckpt").write_bytes(zipped(3, "x"))
    for name in ("epoch=0-step=3.ckpt", "last.ckpt"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "fast/x.ckpt")
    committer = agent(store, tmp_path / "out", Rules())
    assert not committer._round()
    outcome = committer.outcome()
    assert outcome.had_any
    assert not outcome.has_last
    why = "is a link that leads out of the folder"
    assert outcome.passed == {name: f"{name} {why}" for name in ("epoch=0-step=3.ckpt", "last.ckpt")}
    (tmp_path / "out/epoch=1-step=4.ckpt").write_bytes(zipped(4, "x"))
    for _ in range(2):
        committer._round()
    assert list(stored(store)) == [4]


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_what_another_user_may_not_read_is_named_and_taken_later() -> None:
    text = """
import encodings.cp437, os, sys
from ckptstore.tools.run.folders import Folder, JobSeen, Rules, newest_first, restore_folder
os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder = Folder(sys.argv[1], Rules(patterns=("step_{step}",), marker="done", quiet_seconds=1e-9))
for _ in range(2):
    for _ in range(2):
        look = folder.look(JobSeen(frozenset()), notes=False)
    print(sorted(look.refused.items()), [found.name for found in look.finished], flush=True)
    sys.stdin.readline()
"""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        top = Path(place)
        for step in range(1, 5):
            checkpoint(top / f"step_{step}")
        for name, mode in (("step_1/sub", 0o700), ("step_2/sub", 0o744), ("alone", 0o700)):
            (top / name).mkdir()
            (top / name / "a.bin").write_bytes(b"a")
            os.chmod(top / name, mode)
        os.chmod(top / "step_3", 0o700)
        command = [sys.executable, "-c", text, place]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            said = process.stdout.readline()
            for path in top.rglob("*"):
                os.chmod(path, 0o755)
            process.stdin.write("\n")
            process.stdin.flush()
            later = process.stdout.readline()
    listed = "is a directory that cannot be listed: Permission denied"
    assert f"('alone', '{listed}')" in said
    assert f"('step_1', 'sub {listed}')" in said
    assert "('step_2', 'sub/a.bin cannot be looked at: Permission denied')" in said
    assert f"('step_3', 'step_3 {listed}')" in said
    assert said.endswith("['step_4']\n")
    assert later == "[] ['step_1', 'step_2', 'step_3', 'step_4']\n"


def test_a_link_out_of_the_folder_is_left_alone_by_a_restore(tmp_path: Path, store: CheckpointStore) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/epoch=0-step=4.ckpt").write_bytes(zipped(4, "x"))
    committer = agent(store, tmp_path / "out", Rules())
    for _ in range(2):
        committer._round()
    (tmp_path / "fast.ckpt").write_bytes(zipped(9, "x"))
    link = tmp_path / "out/epoch=0-step=9.ckpt"
    link.symlink_to(tmp_path / "fast.ckpt")
    (tmp_path / "out/epoch=0-step=4.ckpt").unlink()
    report = restore_folder(Folder(tmp_path / "out", Rules()), newest_first(store))
    assert report is not None
    assert (report.name, report.is_restored, report.moved_aside) == ("epoch=0-step=4.ckpt", True, ())
    assert link.is_symlink()
