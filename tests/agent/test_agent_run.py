"""`ckptstore run` on one node: every promise with real processes, and with kills."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agents import Start, live, small
from click.testing import CliRunner

from ckptstore import open_store
from ckptstore.testing.s3_server import Fault
from ckptstore.tools.cli import main


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_empty_folder_goes_on_where_the_store_is(start: Start, tmp_path: Path) -> None:
    store, first, second = tmp_path / "store", tmp_path / "first", tmp_path / "second"
    agent = start(store, first, "--keep", "latest=2", "--keep", "best=1:eval_loss:min", trainer=small(first, 5))
    assert agent.code() == 0
    assert agent.committed == [1, 2, 3, 4, 5]
    assert set(live(store)) == {3, 4, 5}
    with open_store(store) as opened:
        assert opened[5].metrics == {"eval_loss": 3.0}
    again = start(store, second, trainer=small(second, 2))
    assert again.code() == 0
    assert "begins at 5" in again.output
    assert again.committed == [6, 7]
    once_more = start(store, first, trainer=small(first, 0))
    assert once_more.code() == 0
    assert "begins at 7" in once_more.output
    assert once_more.committed == []


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_the_trainers(start: Start, tmp_path: Path, code: int) -> None:
    agent = start(tmp_path / "store", tmp_path / "out", trainer=small(tmp_path / "out", 1, "--code", code))
    assert agent.code() == code
    assert agent.committed == [1]


SLOW_THREAD = """
import sys, threading, time
from ckptstore.tools.cli import main
run = threading.Thread.run
threading.Thread.run = lambda thread: (run(thread), time.sleep(0.5))
main(["watch-folder", sys.argv[1], sys.argv[2], "--once", "--interval", "0.1"], standalone_mode=False)
print("went on")
"""


@pytest.mark.slow
def test_whoever_calls_it_in_a_process_goes_on(tmp_path: Path) -> None:
    """On a busy machine its thread ends a moment after it has told that it is through."""
    command = [sys.executable, "-c", SLOW_THREAD, str(tmp_path / "folder"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["went on"]), done.stderr


@pytest.mark.slow
def test_a_signal_reaches_what_a_shell_has_started(start: Start, tmp_path: Path) -> None:
    """With an interval that is never over: the newest is committed because of the signal, whichever was seen first."""
    out = tmp_path / "out"
    words = " ".join(map(str, small(out, 3, "--stay")))
    agent = start(tmp_path / "store", out, "--interval", "1h", trainer=["sh", "-c", f"{words}; true"])
    while "is through" not in agent.output:
        time.sleep(0.05)
    pid = int(agent.output.partition("pid ")[2].split()[0])
    agent.process.send_signal(signal.SIGTERM)
    assert agent.code() == 128 + signal.SIGTERM
    assert not is_alive(pid)
    assert agent.committed[-1] == 3
    passed = [step for told in agent.events("CheckpointsPassedOver") for step in told["steps"]]
    assert sorted([*passed, *agent.committed]) == [1, 2, 3]
    assert passed


@pytest.mark.slow
def test_a_killed_trainer_leaves_the_newest_committed(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    agent = start(tmp_path / "store", out, "--interval", "1h", trainer=small(out, 3, "--stay"))
    while "is through" not in agent.output:
        time.sleep(0.05)
    (out / "checkpoint-4").mkdir()
    (out / "checkpoint-4/model.bin").write_bytes(b"half")
    os.kill(agent.events("TrainerStarted")[0]["pid"], signal.SIGKILL)
    assert agent.code() == 128 + signal.SIGKILL
    assert agent.committed == [1, 2, 3]
    again = start(tmp_path / "store", tmp_path / "new", trainer=small(tmp_path / "new", 1))
    assert again.code() == 0
    assert "begins at 3" in again.output


@pytest.mark.slow
def test_what_the_folder_has_finished_is_newer_than_the_store(start: Start, tmp_path: Path, s3_env: Any) -> None:
    """The agent is killed while the storage is away: the job goes on from the folder, and then the store has it all."""
    server, env = s3_env
    out = tmp_path / "out"
    assert start("s3://test/run", out, trainer=small(out, 1), env=env).code() == 0
    agent = start("s3://test/run", out, trainer=small(out, 3, "--stay", "--pause", 1), env=env)
    agent.saw("TrainerStarted")
    server.faults.add(Fault(action="status", match=".", times=10**6))
    until = time.monotonic() + 60
    while not any(told["steps"][-1] == 4 for told in agent.events("FolderAhead")):
        assert agent.process.poll() is None, agent.output
        assert time.monotonic() < until, agent.output
        time.sleep(0.05)
    agent.process.kill()
    agent.code()
    server.faults.replace([])
    (out / "checkpoint-5").mkdir()
    (out / "checkpoint-5/model.bin").write_bytes(b"half")
    again = start("s3://test/run", out, trainer=small(out, 1), env=env)
    assert again.code() == 0
    assert "begins at 4" in again.output
    assert again.committed[-2:] == [4, 5]


@pytest.mark.slow
def test_a_killed_agent_leaves_no_trainer_and_nothing_twice(start: Start, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    words = " ".join(map(str, small(out, 100, "--pause", "0.1", "--limit", 6)))  # what is left to commit stays little
    committed: list[int] = []
    for seconds in (0.5, 0.9):
        agent = start(store, out, trainer=["sh", "-c", f"{words}; true"])
        agent.saw("CheckpointCommitted")
        time.sleep(seconds)
        agent.process.kill()
        agent.code()
        committed += agent.committed
    pid = agent.events("TrainerStarted")[0]["pid"]
    last = start(store, out, trainer=small(out, 1))
    assert last.code() == 0
    assert not is_alive(pid)
    committed += last.committed
    assert committed == sorted(set(committed))
    steps = live(store)
    assert set(committed) <= set(steps)
    assert max(steps) == committed[-1]


@pytest.mark.slow
def test_what_the_trainer_deletes_is_no_error(start: Start, tmp_path: Path) -> None:
    """It writes faster than the agent looks, and keeps one."""
    store, out = tmp_path / "store", tmp_path / "out"
    agent = start(store, out, trainer=small(out, 40, "--pause", "0.03", "--limit", 1))
    assert agent.code() == 0
    assert agent.committed[-1] == 40
    assert agent.committed == sorted(set(agent.committed))
    assert agent.events("CheckpointsLeft") == []
    live(store)
    assert not any((tmp_path / ".ckptstore-out/held").iterdir())


@pytest.mark.slow
def test_a_checkpoint_that_is_written_anew_is_replaced(start: Start, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    assert start(store, out, trainer=small(out, 4)).code() == 0
    assert start(store, out, trainer=small(out, 2, "--begin", 2, "--mark", 9)).code() == 0
    assert live(store) == {1: b"\1\0", 2: b"\2\0", 3: b"\3\t", 4: b"\4\t"}


@pytest.mark.slow
def test_only_what_is_committed_is_deleted_from_the_folder(start: Start, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    out.mkdir()
    (out / "notes-7").mkdir()
    (out / "checkpoint-99").mkdir()
    (out / "checkpoint-99/model.bin").write_bytes(b"half")
    agent = start(store, out, "--delete-local", trainer=small(out, 5, "--begin", 0))
    assert agent.code() == 0
    assert set(live(store)) == {1, 2, 3, 4, 5}
    assert {path.name for path in out.iterdir()} == {
        *("notes-7", "checkpoint-4", "checkpoint-5", "checkpoint-99"),
    }


@pytest.mark.slow
def test_a_newer_run_fences_the_older_one(start: Start, tmp_path: Path) -> None:
    store, old, new = tmp_path / "store", tmp_path / "old", tmp_path / "new"
    zombie = start(store, old, "--require-commit", trainer=small(old, 30, "--pause", "0.1"))
    zombie.saw("CheckpointCommitted", step=2)
    assert start(store, new, trainer=small(new, 1)).code() == 0
    assert "fenced" not in zombie.output
    assert zombie.code() == 11
    assert len(zombie.events("CommitsStopped")) == 1
    assert "is through" in zombie.output
    (left,) = zombie.events("CheckpointsLeft")
    assert left["steps"][-1] == 30
    assert max(zombie.committed) < 30


@pytest.mark.slow
def test_a_storage_that_is_away_is_no_matter_of_the_training(start: Start, tmp_path: Path, s3_env: Any) -> None:
    """503 for everything, until the trainer has written its last checkpoint; then all is committed, in order."""
    server, env = s3_env
    out, is_back = tmp_path / "out", tmp_path / "is back"
    words = " ".join(map(str, small(out, 8)))
    trainer = ["sh", "-c", f"{words}; while [ ! -e '{is_back}' ]; do sleep 0.05; done"]
    agent = start("s3://test/run", out, trainer=trainer, env=env)
    agent.saw("CheckpointCommitted", step=2)
    server.faults.add(Fault(action="status", match=".", times=10**6))
    agent.saw("CommitsDelayed")
    while "is through" not in agent.output:
        time.sleep(0.05)
    server.faults.replace([])
    is_back.touch()  # after the trainer's end there is one more try, not many
    assert agent.code() == 0
    assert agent.committed == list(range(1, 9))
    assert agent.saw("TrainerEnded")["seconds"] < 30


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_what_is_not_committed_is_named(start: Start, tmp_path: Path, s3_env: Any, required: bool) -> None:
    server, env = s3_env
    out, flags, is_away = tmp_path / "out", ["--require-commit"] if required else [], tmp_path / "away"
    trainer = small(out, 3, "--wait", is_away)
    agent = start("s3://test/run", out, "--grace", "0.5", *flags, trainer=trainer, env=env)
    agent.saw("CheckpointCommitted", step=1)
    server.faults.add(Fault(action="status", match=".", times=10**6))
    is_away.touch()
    assert (agent.code() != 0) == required
    (left,) = agent.events("CheckpointsLeft")
    assert left["steps"][-1] == 3
    server.faults.replace([])
    again = start("s3://test/run", out, trainer=[sys.executable, "-c", ""], env=env)
    assert again.code() == 0
    assert again.committed[-1] == 3


def test_nothing_is_started_with_bad_input(tmp_path: Path) -> None:
    out, made = tmp_path / "out", tmp_path / "made"
    base = ("run", "--store", tmp_path / "store", "--folder", out)
    (tmp_path / "file").write_text("")
    for words, said in [
        ((*base, "--", "no-such-program"), "is not found"),
        ((*base, "--keep", "lates=2", "--", "touch", made), "'lates=2' is no rule of what to keep"),
        ((*base, "--beside", "../x", "--", "touch", made), "--beside '../x' cannot be followed"),
        ((*base, "--nodes", "2", "--", "touch", made), "--node-rank is missing"),
        ((*base, "--pattern", "m{stp}.pt", "--", "touch", made), "'m{stp}.pt' has {stp}"),
        (("run", "--store", out, "--folder", out, "--", "touch", made), "is the store"),
        (("run", "--store", out, "--folder", out / "checkpoints/x", "--", "touch", made), "of its checkpoints"),
        ((*base, "--interval", "0", "--", "touch", made), "at least"),
        (("run", "--store", "no://x", "--folder", out, "--", "touch", made), "cannot be opened"),
        (
            ("run", "--store", tmp_path / "store", "--folder", tmp_path / "file/x", "--", "touch", made),
            "cannot be made",
        ),
    ]:
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert not made.exists()
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_store_in_the_folder_is_none_of_its_checkpoints(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    agent = start(out / "store", out, "--require-commit", trainer=small(out, 2))
    assert (agent.code(), agent.committed[-1]) == (0, 2)
    assert not agent.events("CheckpointsPassedOver")
    for path in out.iterdir():
        if path.name != "store":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = start(out / "store", out, trainer=[sys.executable, "-c", ""])
    assert again.code() == 0
    assert "step 2 is restored" in again.output


@pytest.mark.slow
def test_a_metric_that_no_checkpoint_has_is_named(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    agent = start(tmp_path / "store", out, "--keep", "best=1:evl_loss", trainer=small(out, 2))
    assert agent.code() == 0
    (notice,) = [event["text"] for event in agent.events("FolderNotice") if "ranks" in event["text"]]
    assert "has no evl_loss, by which retention ranks" in notice


@pytest.mark.slow
def test_a_folder_has_one_agent(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    agent = start(tmp_path / "store", out, trainer=small(out, 1, "--stay"))
    agent.saw("TrainerStarted")
    other = start(tmp_path / "other", out, trainer=small(out, 1))
    assert other.code() == 2
    assert "Another agent works on" in other.output
    agent.process.send_signal(signal.SIGINT)
    assert agent.code() == 128 + signal.SIGINT


@pytest.mark.slow
def test_each_signal_is_handed_on(start: Start, tmp_path: Path) -> None:
    """A shell that ends with the second SIGTERM, and hears SIGUSR1 too."""
    script = "n=0; trap 'n=$((n+1)); [ $n = 2 ] && exit 9' TERM; trap 'echo heard' USR1; echo up"
    script += "; while :; do sleep 0.1; done"
    agent = start(tmp_path / "store", tmp_path / "out", trainer=["bash", "-c", script])
    while "up" not in agent.output:
        time.sleep(0.05)
    agent.process.send_signal(signal.SIGUSR1)
    agent.process.send_signal(signal.SIGTERM)
    while "heard" not in agent.output or len(agent.events("SignalHandedOn")) < 2:
        time.sleep(0.05)
    time.sleep(0.3)
    assert agent.process.poll() is None
    agent.process.send_signal(signal.SIGTERM)
    assert agent.code() == 9


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_reaches_the_trainer_once(tmp_path: Path) -> None:
    """The terminal gives it to both; the trainer may read from the terminal too."""
    script = (
        "import signal, sys, time\n"
        "heard = []\n"
        "signal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "print('hello', sys.stdin.readline().strip(), flush=True)\n"
        "while not heard: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "sys.exit(40 + len(heard))\n"
    )
    words = ["run", "--store", tmp_path / "store", "--folder", tmp_path / "out", "--", sys.executable, "-c", script]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "ckptstore.tools.cli", *map(str, words)])
    said = b""
    os.write(terminal, b"world\n")
    while b"hello world" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 41
