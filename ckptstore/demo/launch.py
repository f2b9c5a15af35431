"""Starts the ranks of a training job as processes, as torchrun does: when one dies, all are ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    failed_rank: int | None
    """The rank that failed first, None when all ended well."""
    signal: signal.Signals | None
    """What killed that rank, None when it ended by itself."""


def run_job(num_ranks: int, arguments: Sequence[str], tell: Callable[[str], None]) -> Ended:
    """Run `python -m ckptstore.demo.train` on every rank to the end; `tell` gets each line that a rank prints.

    No process is left when this returns or raises.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "ckptstore.demo.train", *arguments]
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for rank in range(num_ranks):
            process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
            readers.append(threading.Thread(target=_read, args=(process, tell), daemon=True))
            readers[-1].start()
        return _wait(processes)
    finally:
        for process in processes:
            _stop(process)
        for reader in readers:
            reader.join()


def _read(process: subprocess.Popen[str], tell: Callable[[str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            tell(line.rstrip())


def _wait(processes: Sequence[subprocess.Popen[str]]) -> Ended:
    """Until all have ended well, or one has not."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                assert code is not None
                return Ended(rank, signal.Signals(-code) if code < 0 else None)
        if all(code == 0 for code in codes):
            return Ended(None, None)
        time.sleep(0.05)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
