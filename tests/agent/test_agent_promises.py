"""The sentences at the top of docs/how-to/run.md, one by one, with real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agents import Start
from click.testing import CliRunner

from ckptstore import open_store
from ckptstore.tools.cli import main
from ckptstore.tools.run.story import NOTHING_FOUND
from tests.folders.test_finished_property import zipped as torch_file

pytestmark = pytest.mark.slow

HEAD = """
import io, json, os, pickle, shutil, signal, sys, time, zipfile
from pathlib import Path
def zipped(values):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps(values, protocol=2))
    return buffer.getvalue()
def save(name, **values):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(zipped(values))
def until(count):
    "Wait until so many checkpoints are in the store, beside the folder; then a moment for what is superfluous."
    last, store = time.monotonic() + 60, Path(os.environ.get("STORE") or Path(sys.argv[1]).parent / "store")
    while len(list(store.glob("checkpoints/*/ckptstore.json"))) < count and time.monotonic() < last:
        time.sleep(0.05)
    time.sleep(0.3)
"""


def script(text: str) -> list[object]:
    """A trainer: some lines of Python, with what they need. `save` writes as torch.save does."""
    return [sys.executable, "-c", HEAD + text]


def names_of(store: Path) -> dict[int, str]:
    """The names in the folder of what is live, by step. All of it verifies."""
    with open_store(store) as opened:
        assert all(checkpoint.verify().ok for checkpoint in opened)
        return {checkpoint.step: checkpoint.metadata["folder"]["name"] for checkpoint in opened}


def test_1_nothing_is_made_in_the_folder_of_a_trainer_that_lists_it(start: Start, tmp_path: Path) -> None:
    """accelerate sorts whatever it finds by the number in it, and deletes by that."""
    text = """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
import torch
config = ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=config)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for count in range(4):
    accelerator.save_state()
    until(count)
    assert all(name.startswith("checkpoint_") for name in os.listdir(sys.argv[1] + "/checkpoints"))
"""
    folder = tmp_path / "project" / "checkpoints"
    agent = start(tmp_path / "store", folder, trainer=[*script(text), str(tmp_path / "project")])
    assert agent.code() == 0, agent.output
    assert sorted(names_of(tmp_path / "store").values())[-2:] == ["checkpoint_2", "checkpoint_3"]
    assert sorted(os.listdir(folder)) == ["checkpoint_2", "checkpoint_3"]


def test_1_a_folder_that_is_a_mount_point_stays_clean_too(start: Start, tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"ckptstore-test-{os.getpid()}" / "out"
    try:
        env = {"XDG_STATE_HOME": str(tmp_path / "state"), "STORE": str(tmp_path / "store")}
        where = "from ckptstore.tools.run.folders import own_directory as own; own.is_on_one_disk = lambda *_: False; "
        where += "from ckptstore.tools.run.folders import folder; folder.is_on_one_disk = own.is_on_one_disk; "
        where += "from ckptstore.tools.run import meeting; meeting.is_on_one_disk = own.is_on_one_disk; "
        where += "from ckptstore.tools.cli import main; main(sys.argv[1:])"
        text = "for step in (1, 2, 3):\n save(f'{sys.argv[1]}/mine_{step}.pt', step=step); until(step)\n"
        text += " assert all('mine' in name for name in os.listdir(sys.argv[1]))"
        command = [
            sys.executable,
            "-c",
            "import sys; " + where,
            "run",
            "--store",
            tmp_path / "store",
            "--folder",
            folder,
        ]
        command += ["--interval", "0.1", "--pattern", "mine_{step}.pt", "--", *script(text), folder]
        done = subprocess.run(list(map(str, command)), env={**os.environ, **env}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert names_of(tmp_path / "store") == {1: "mine_1.pt", 2: "mine_2.pt", 3: "mine_3.pt"}
        assert sorted(os.listdir(folder)) == ["mine_1.pt", "mine_2.pt", "mine_3.pt"]
        assert (tmp_path / "state/ckptstore/folders").is_dir()
        shutil.rmtree(folder)
        restore = [sys.executable, "-c", "import sys; " + where, "restore-folder", tmp_path / "store", folder]
        subprocess.run(list(map(str, restore)), env={**os.environ, **env}, check=True)
        assert sorted(os.listdir(folder)) == ["mine_3.pt"]
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def test_2_what_it_does_not_take_is_named_at_once_with_the_words_that_take_it(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "save(sys.argv[1] + '/weights_7.pth', x=1); time.sleep(1)"
    agent = start(tmp_path / "store", out, "--require-commit", trainer=[*script(text), out])
    assert agent.code() == NOTHING_FOUND
    (notice,) = [it["text"] for it in agent.events("FolderNotice") if "weights_7.pth" in it["text"]]
    assert "--pattern 'weights_*.pth'" in notice
    assert "--pattern" in agent.events("FolderNotice")[-1]["text"]
    (summary,) = agent.events("RunSummary")
    assert summary["committed"] == 0


def test_2_nothing_is_stored_without_saying_so(start: Start, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").write_text("nothing")
    agent = start(tmp_path / "store", tmp_path / "empty", "--once", "--pattern", "step_*")
    assert agent.code() == NOTHING_FOUND
    assert "step_*" in agent.events("FolderNotice")[-1]["text"]
    missing = start(tmp_path / "store", tmp_path / "missing", "--once")
    assert missing.code() == 2
    assert "There is no folder" in missing.output
    told = CliRunner().invoke(main, ["run", "--dry-run", str(tmp_path / "empty")])
    assert told.exit_code == NOTHING_FOUND
    assert "--pattern" in told.output


def test_2_the_last_one_must_be_there_if_a_commit_is_required(start: Start, tmp_path: Path) -> None:
    text = "save(sys.argv[1] + '/mine_1/a.pt', x=1); Path(sys.argv[1] + '/mine_1/DONE').touch(); until(1)\n"
    text += "save(sys.argv[1] + '/mine_2/a.pt', x=1); time.sleep(0.5)"
    options = ("--require-commit", "--pattern", "mine_{step}", "--marker", "DONE")
    agent = start(tmp_path / "store", tmp_path / "out", *options, trainer=[*script(text), tmp_path / "out"])
    assert agent.code() == 1
    assert names_of(tmp_path / "store") == {1: "mine_1"}
    (summary,) = agent.events("RunSummary")
    assert summary["unfinished"] == ["mine_2"]


@pytest.mark.parametrize(
    ("pattern", "names", "steps"),
    [
        ("mine-*", ["mine-100-epoch-9.pt", "mine-200-epoch-9.pt", "mine-300-epoch-9.pt"], [9, 10, 11]),
        ("checkpoint-*", ["checkpoint-100-epoch-9.pt", "checkpoint-200-epoch-9.pt"], [100, 200]),
        ("ep*.pt", ["ep1-ba20-rank0.pt", "ep1-ba40-rank0.pt"], [20, 40]),
        ("*.pt", ["neg_loss=-0.3056.pt", "neg_loss=-0.2001.pt"], [0, 1]),
        ("w.*.pt", ["w.02-14.94.pt", "w.03-13.10.pt"], [2, 3]),
        ("m_{step}_of_9.pt", ["m_5_of_9.pt", "m_7_of_9.pt"], [5, 7]),
        ("a9-*.pt", ["a9-0.pt", "a9-1.pt", "a9-0-again.pt"], [0, 1, 2]),
    ],
)
def test_3_no_name_replaces_another(
    start: Start, tmp_path: Path, pattern: str, names: list[str], steps: list[int]
) -> None:
    out = tmp_path / "out"
    text = f"for n, name in enumerate({names!r}):\n save(sys.argv[1] + '/' + name, n=n); until(n + 1)"
    agent = start(tmp_path / "store", out, "--pattern", pattern, trainer=[*script(text), out])
    assert agent.code() == 0, agent.output
    assert names_of(tmp_path / "store") == dict(zip(steps, names, strict=True))
    with open_store(tmp_path / "store") as store:
        assert store.trash() == []
    again = start(tmp_path / "store", out, "--pattern", pattern, "--once")
    assert again.code() == 0
    assert again.committed == [], "a restart knows them by name"


def test_3_a_regular_expression_says_the_step_for_certain(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "for n in (20, 40):\n save(f'{sys.argv[1]}/e1-b{n}-r0.pt', n=n); until(n // 20)"
    options = ("--pattern", "e*.pt", "--step-from", r"b(\d+)")
    assert start(tmp_path / "store", out, *options, trainer=[*script(text), out]).code() == 0
    assert names_of(tmp_path / "store") == {20: "e1-b20-r0.pt", 40: "e1-b40-r0.pt"}


def test_4_each_state_of_a_file_that_is_overwritten_is_a_checkpoint(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "path = Path(sys.argv[1]) / 'ckpt.pt'\nbegin = 0 if not path.exists() else 30\n"
    text += "for n in (10, 20, 30):\n save(path, iter_num=begin + n, model='w' * n); until((begin + n) // 10)\n"
    text += "print('began at', begin)"
    assert start(tmp_path / "store", out, trainer=[*script(text), out]).code() == 0
    assert set(names_of(tmp_path / "store")) == {10, 20, 30}
    shutil.rmtree(out)
    again = start(tmp_path / "store", out, trainer=[*script(text), out])
    assert again.code() == 0
    assert "began at 30" in again.output
    assert set(names_of(tmp_path / "store")) == {10, 20, 30, 40, 50, 60}


@pytest.mark.parametrize(
    ("name", "steps", "rule"), [("last.bin", [0, 1, 2], "the store counts"), ("gpt2.bin", [2, 3, 4], "2")]
)
def test_4_each_state_is_counted_where_no_step_is_said(
    start: Start, tmp_path: Path, name: str, steps: list[int], rule: str
) -> None:
    """The number in a name that stays is none of a step."""
    out = tmp_path / "out"
    text = f"for n in range(3):\n save(sys.argv[1] + '/{name}', weights=str(n) * 9); until(n + 1)"
    agent = start(tmp_path / "store", out, "--pattern", name, trainer=[*script(text), out])
    assert agent.code() == 0
    assert agent.committed == steps
    assert rule in agent.events("ShapeFound")[0]["rule"]
    with open_store(tmp_path / "store") as store:
        assert store.trash() == []


def test_5_what_lies_beside_it_comes_back_with_it(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "top = Path(sys.argv[1])\ntop.mkdir(exist_ok=True)\nfor n in (1, 2):\n"
    text += " name = f'model_000000{n}.pth'; (top / 'last_checkpoint').write_text(name)\n"
    text += " (top / 'log.csv').write_bytes(b'%d,0.5\\r\\n' % n); (top / 'scheduler.pt').write_bytes(bytes([n, 255]))\n"
    text += " save(top / name, iteration=n); until(n)\n"
    beside = "--beside", "*.csv", "--beside", "scheduler.pt"
    assert start(tmp_path / "store", out, *beside, trainer=[*script(text), out]).code() == 0
    told = CliRunner().invoke(main, ["restore-folder", str(tmp_path / "store"), str(tmp_path / "new"), "--step", "1"])
    assert told.exit_code == 0, told.output
    found = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert found.pop("model_0000001.pth") == (out / "model_0000001.pth").read_bytes()
    assert found == {"last_checkpoint": b"model_0000001.pth", "log.csv": b"1,0.5\r\n", "scheduler.pt": b"\1\xff"}


def test_6_a_damaged_file_keeps_no_trainer_from_its_start(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "top = Path(sys.argv[1])\nfor n in (1, 2, 3):\n save(top / f'mine_{n}/a.pt', x=n)\n"
    text += " if n == 2: (top / 'mine_2/a.h5').write_bytes(b'\\x89HDF\\r\\n\\x1a\\n')\n"
    text += " (top / f'mine_{n}/DONE').touch(); until(2 if n == 3 else 1)"
    for _ in range(2):
        options = ("--pattern", "mine_{step}", "--marker", "DONE")
        agent = start(tmp_path / "store", out, *options, trainer=[*script(text), out])
        assert agent.code() == 0, agent.output
        assert names_of(tmp_path / "store") == {1: "mine_1", 3: "mine_3"}
        assert agent.events("UnfinishedLeft")[-1]["reasons"] == ["a.h5 has a header that cannot be read"]


def test_6_a_checkpoint_that_is_a_link_to_a_directory_outside_is_followed(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "top = Path(sys.argv[1])\nfast = top.parent / 'fast'\nsave(fast / 'step_5/a.pt', x=1)\n"
    text += "top.mkdir(exist_ok=True); os.symlink(fast / 'step_5', top / 'step_5'); until(1)"
    options = ("--pattern", "step_{step}", "--quiet", "0.2s")
    assert start(tmp_path / "store", out, *options, trainer=[*script(text), out]).code() == 0
    assert names_of(tmp_path / "store") == {5: "step_5"}
    other = start(tmp_path / "other", out, *options, "--no-follow", "--once")
    assert other.code() != 0
    assert "step_5" in str(other.events("RunSummary")[0]["passed_over"])


def test_7_a_writer_that_outlives_the_trainer_is_asked_too(start: Start, tmp_path: Path) -> None:
    """In a session of its own it is nobody's child when the trainer has ended."""
    out = tmp_path / "out"
    writer = "import os, sys, time; f = open(sys.argv[1], 'wb', 0); f.write(b'a' * 9)\n"
    writer += "while not os.path.exists(sys.argv[1] + '.stop'): time.sleep(0.1)"
    text = "import subprocess\nPath(sys.argv[1]).mkdir(exist_ok=True)\n"
    text += (
        f"subprocess.Popen([sys.executable, '-c', {writer!r}, sys.argv[1] + '/mine_1.dat'], start_new_session=True)\n"
    )
    text += "while not (path := Path(sys.argv[1], 'mine_1.dat')).exists() or not path.stat().st_size: time.sleep(0.01)"
    agent = start(
        tmp_path / "store", out, "--pattern", "mine_{step}.dat", "--quiet", "0.3s", trainer=[*script(text), out]
    )
    assert agent.code() == 0
    assert agent.committed == []
    (out / "mine_1.dat.stop").touch()
    assert "open for writing" in agent.events("UnfinishedLeft")[0]["reasons"][0]


def test_9_once_is_right_after_a_copy_that_sets_times(start: Start, tmp_path: Path) -> None:
    """`aws s3 sync` gives each file the time of its object; a marker may have been uploaded before what it ends."""
    top = tmp_path / "out" / "checkpoint-7"
    top.mkdir(parents=True)
    for age, (name, data) in enumerate(
        [
            ("trainer_state.json", b'{"global_step": 7}'),
            ("rng_state.pth", torch_file(7, "")),
            ("optimizer.pt", torch_file(7, "")),
        ]
    ):
        (top / name).write_bytes(data)
        os.utime(top / name, (1_700_000_000 + 60 * age,) * 2)
    began = time.time()
    agent = start(tmp_path / "store", tmp_path / "out", "--once", "--quiet", "2s")
    assert agent.code() == 0, agent.output
    assert names_of(tmp_path / "store") == {7: "checkpoint-7"}
    committed = max(record.stat().st_mtime for record in (tmp_path / "store" / "log").iterdir())
    assert committed - began > 1.8, "it has waited until all was quiet"


@pytest.mark.parametrize(("code", "quiet", "committed"), [(0, "1s", [1]), (7, "1h", [])])
def test_9_what_outlives_the_trainer_keeps_no_finished_one_out(
    start: Start, tmp_path: Path, code: int, quiet: str, committed: list[int]
) -> None:
    """The processes of the job have not ended, so the quiet time counts; after a failure it counts for nothing."""
    out = tmp_path / "out"
    options = ("--pattern", "mine_{step}.dat", "--quiet", quiet, "--require-commit")
    trainer = ["sh", "-c", f"sleep 60 & mkdir -p {out}; echo a >{out}/mine_1.dat; sleep 0.3; exit {code}"]
    began = time.monotonic()
    agent = start(tmp_path / "store", out, *options, trainer=trainer)
    assert agent.code() == code, agent.output
    assert agent.committed == committed
    assert time.monotonic() - began < 60, "it does not wait for what has nothing to do with checkpoints"


def test_10_two_signals_end_it_always(start: Start, tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.mkdir(sys.argv[1] + '/mine_1.pt')\n"
    text += "os.mkfifo(sys.argv[1] + '/mine_1.pt/p.pt'); print('ready', flush=True); time.sleep(600)"
    (tmp_path / "out").mkdir()
    agent = start(
        tmp_path / "store", tmp_path / "out", "--pattern", "mine_*", trainer=[*script(text), tmp_path / "out"]
    )
    agent.saw("CheckpointsPassedOver")
    agent.process.send_signal(signal.SIGTERM)
    agent.saw("SignalHandedOn")
    began = time.monotonic()
    agent.process.send_signal(signal.SIGTERM)
    assert agent.code() == 128 + signal.SIGKILL
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("how", ["--output_dir", "writes"])
def test_the_folder_is_found_by_itself(tmp_path: Path, how: str) -> None:
    text = "place = sys.argv[2] if len(sys.argv) > 2 else 'made/here'\nbegin = 1\n"
    text += "begin += max([int(p.name[11:]) for p in Path(place).glob('checkpoint-*')], default=0)\n"
    text += "for n in (begin, begin + 1):\n save(f'{place}/checkpoint-{n}/rng_state.pth', n=n)\n"
    text += (
        " Path(f'{place}/checkpoint-{n}/trainer_state.json').write_text(json.dumps({'global_step': n})); time.sleep(1)"
    )
    command = [sys.executable, "-m", "ckptstore.tools.cli", "run", "--store", str(tmp_path / "store")]
    command += ["--interval", "0.2", "--", *map(str, script(text))]
    command += ["--output_dir", str(tmp_path / "work/out")] if how.startswith("--") else []
    (tmp_path / "work").mkdir()
    for steps in ({1, 2}, {1, 2, 3, 4}):
        env = {**os.environ, "STORE": str(tmp_path / "store"), "PYTHONPATH": os.getcwd()}
        done: Any = subprocess.run(command, cwd=tmp_path / "work", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "--folder is" in done.stderr
        assert set(names_of(tmp_path / "store")) == steps
        shutil.rmtree(tmp_path / "work/out", ignore_errors=True)
        shutil.rmtree(tmp_path / "work/made", ignore_errors=True)
