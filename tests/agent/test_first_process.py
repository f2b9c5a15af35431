"""An agent that is the first process of a container."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agents import Start

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TRAINER = """
import glob, os, signal, subprocess, sys, time
assert os.getppid() != 1
def states():
    return [open(name).read().rpartition(")")[2].split()[:2] for name in glob.glob("/proc/[0-9]*/stat")]
for _ in range(5):
    subprocess.run(["sh", "-c", "true & exec true"], check=True)  # the first one loses its parent
subprocess.run(["sh", "-c", "sleep 0.1 & exit"], check=True)
time.sleep(0.2)
until = time.monotonic() + 30
while ["Z", "1"] in states():
    assert time.monotonic() < until, states()
    time.sleep(0.05)
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
os.kill(1, signal.SIGTERM)  # as the container's end does
while not heard:
    time.sleep(0.05)
print("heard", flush=True)
sys.exit(7)
"""


@pytest.mark.skipif(
    subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode != 0,
    reason="no namespace of processes may be made here",
)
def test_the_first_process_hands_signals_on_and_lets_orphans_go(start: Start, tmp_path: Path) -> None:
    agent = start(tmp_path / "store", tmp_path / "out", trainer=[sys.executable, "-c", TRAINER], below=CONTAINER)
    assert agent.code() == 7, agent.output
    assert "heard" in agent.output
    assert [told["name"] for told in agent.events("SignalHandedOn")] == ["SIGTERM"]
