"""Commands of the pages that name a bucket run as they stand, against a server, with stores where they look for them.

What such a page stands around is replaced: the trainer by one that writes a checkpoint and ends, `curl` by a program
that tells that it ran, and directories of other machines by some of this test. `watch-folder` waits for a second of
quiet where a reader's waits for thirty.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from forked_ranks import TORCH, run_ranks
from page_runner import run_command
from test_docs import COMMAND, NAMES, ROOT, SHELLS, blocks

import ckptstore
from ckptstore.testing.s3_server import S3Server, s3_server

pytestmark = pytest.mark.slow

NOT_HERE = {
    r"^bench\b": "it measures for minutes",
    r"\b(gs|ftp)://": "it needs a server of another kind",
    r"--engine ray": "it needs a cluster; tests/ray has one",
}
PLACES = {
    "/mnt/nvme/ckpt": "nvme",
    "/models/policy": "models/policy",
    "/local/out": "local/out",
    "--port 8000": "--port 0",
}
STORES = [f"runs/{one}" for one in ("a", "llama", "digits", "export")]
STORES += [f"s3://bucket/{one}" for one in ("b", "digits", "run", "runs/llama")]
RUNS = r"^(run|watch-folder|restore-folder)\b"
GOES_ON = r"^(watch|follow|serve)\b|--follow\b"
WRITES = r"^(cp|publish)\b"
DEADLINE_SECONDS = 120


def bucket_commands(page: Path) -> list[str]:
    """Return the commands of a page that name a bucket, each once."""
    lines = [line for block in blocks(page) if block.language in SHELLS for line in block.text.splitlines()]
    found = [match[1] for line in lines if (match := COMMAND.search(line)) and "s3://" in match[1]]
    return [*dict.fromkeys(one for one in found if not any(re.search(pattern, one) for pattern in NOT_HERE))]


COMMANDS = {name: commands for name in NAMES if (commands := bucket_commands(ROOT / name))}


def test_they_are_found() -> None:
    assert sum(map(len, COMMANDS.values())) > 25
    assert {"README.md", "docs/how-to/run.md", "docs/how-to/watch.md"} <= COMMANDS.keys()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The current directory, with what pages speak of, and a server; both are in the environment."""
    monkeypatch.chdir(tmp_path)
    for directory in ("base-model", "bin", "local", "models"):
        Path(directory).mkdir()
    Path("base-model/config.json").write_text('{"model_type": "llama"}')
    trainer = Path("bin/bucket_trainer.py")
    trainer.write_text(Path(__file__).with_name("bucket_trainer.py").read_text())
    for name in ("torchrun", "python", "python3", "curl"):
        program = Path("bin", name)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {trainer.absolute()} {name} "$@"\n')
        program.chmod(0o755)
    tools = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tools}:{os.environ['PATH']}")
    with s3_server(buckets=["bucket"]) as server:
        given = {"ENDPOINT_URL": server.endpoint_url, "ACCESS_KEY_ID": "t", "SECRET_ACCESS_KEY": "t", "REGION": "eu-1"}
        for name, value in given.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield server


class Started:
    """A command line of ckptstore as a process, whose output goes to a file."""

    def __init__(self, line: str, output: Path) -> None:
        self.line, self._output = line, output
        with output.open("w") as opened:
            words = ["bash", "-c", f"exec ckptstore {line}"]
            self._process = subprocess.Popen(words, stdout=opened, stderr=subprocess.STDOUT, start_new_session=True)

    def shown(self) -> str:
        return self._output.read_text()

    def check_end(self, code: int = 0) -> None:
        assert self._process.wait(DEADLINE_SECONDS) == code, (self.line, self.shown())

    def end_when(self, is_done: Callable[[], bool], by: signal.Signals) -> None:
        """Send a signal once it has done what it is for; the exit code is then that of the signal."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (self.shown() and is_done()):
            assert self._process.poll() is None, (self.line, self.shown())
            assert time.monotonic() < deadline, (self.line, self.shown())
            time.sleep(0.05)
        self._process.send_signal(by)
        self.check_end(128 + by)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


Start = Callable[[str], Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command line of ckptstore, which ends with the test."""
    agents: list[Started] = []

    def start(line: str) -> Started:
        agents.append(Started(line, tmp_path / f"shown-{len(agents)}"))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()


def fill(roots: Sequence[str], steps: Sequence[int] = (1000, 1200, 12000)) -> None:
    """Make stores, each with the steps that pages name; one with a fast tier."""
    for root in roots:
        tier = ckptstore.FastTier("nvme") if root == "s3://bucket/runs/llama" else None
        with ckptstore.open_store(root, fast=tier) as store:
            for step in steps:
                state = {"model": {"a.weight": torch.full((4, 4), float(step))}, "optimizer": {"m": torch.zeros(4)}}
                store.save(step, state, metrics={"loss": 1 / step, "eval_loss": 1 / step})


@pytest.mark.parametrize("page", list(COMMANDS))
def test_a_page_works_with_a_bucket(page: str, place: S3Server, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = sorted(COMMANDS[page], key=lambda command: not re.search(WRITES, command))
    lines = []
    for command in commands:
        lines.append(command)
        for there, here in {**PLACES, "https://s3.hf.co/OWNER": place.endpoint_url}.items():
            lines[-1] = lines[-1].replace(there, here)
    if not any(re.search(RUNS, line) for line in lines):
        written = {line.split()[-1] for line in lines if line.startswith("cp ")}
        run_ranks(1, fill, [root for root in STORES if root not in written], modules=TORCH)
    for line in lines:
        if re.search(RUNS, line):
            monkeypatch.setenv("TRAINER_FOLDER", line.partition("--folder ")[2].partition(" ")[0] or "out")
            check_run(start, line, place)
        elif re.search(GOES_ON, line):
            check_goes_on(start, line)
        else:
            run_ranks(1, run_command, shlex.split(line, comments=True), page, modules=TORCH)


def check_run(start: Start, command: str, server: S3Server) -> None:
    """Run an agent, with one more for the other node if there is one: what the trainer wrote is in the store.

    It finds an empty bucket, and no folder, but for a restore: that finds the bucket as the command before left it.
    """
    words = shlex.split(command)
    (store,) = (word for word in words if word.startswith("s3://"))
    shutil.rmtree(os.environ["TRAINER_FOLDER"], ignore_errors=True)
    if words[0] != "restore-folder":
        server.objects.buckets["bucket"].clear()
    if words[0] == "watch-folder":
        subprocess.run(["python", "train.py"], check=True)
        command += " --quiet 1s"
    agents = [start(command)]
    if "--node-rank 0 " in command:
        agents.append(start(command.replace("--node-rank 0 ", "--node-rank 1 ")))
    for agent in agents:
        if words[0] == "watch-folder" and "--once" not in words:
            agent.end_when(lambda: commits_of(store) == [1], signal.SIGTERM)
        else:
            agent.check_end()
    assert commits_of(store) == [1], command
    if words[0] == "restore-folder":
        assert Path(words[-1], "checkpoint-1/model.bin").read_bytes() == b"x" * 1000


def check_goes_on(start: Start, command: str) -> None:
    """Start a command that goes on, and end it when it has done what it is for."""
    agent, ran = start(command), Path("bin/ran")
    if command.startswith(("watch", "serve")):
        agent.end_when(lambda: any(word in agent.shown() for word in ('"step": 12000', "http://")), signal.SIGINT)
    elif command.startswith("publish"):
        fill(["runs/llama"], steps=[13000])
        agent.end_when(lambda: commits_of("s3://bucket/policy")[-1:] == [13000], signal.SIGINT)
    else:
        agent.end_when(ran.exists, signal.SIGINT)
        ran.unlink()


def commits_of(root: str) -> list[int]:
    with ckptstore.open_store(root) as store:
        return [checkpoint.step for checkpoint in store]
