"""Start the ranks of a training job as processes, as torchrun does: when one dies, all are ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a job."""

    failed_rank: int | None
    """The rank that failed first, None when all succeeded."""
    signal: signal.Signals | None
    """The signal that killed that rank, None when it exited by itself."""


class RunningJob:
    """The processes of a job, by rank."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def kill(self, ranks: Iterable[int]) -> None:
        """Send SIGKILL to ranks, as the loss of a machine would end them."""
        for rank in ranks:
            self.processes[rank].kill()

    def wait(self) -> Ended:
        """Wait until all ranks succeed or one fails."""
        while True:
            codes = [process.poll() for process in self.processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    assert code is not None
                    return Ended(rank, signal.Signals(-code) if code < 0 else None)
            if all(code == 0 for code in codes):
                return Ended(None, None)
            time.sleep(0.05)


def run_job(
    num_ranks: int,
    arguments: Sequence[str],
    tell: Callable[[str], None],
    *,
    module: str = "ckptstore.tools.demo.train",
    environment: Mapping[str, str] | None = None,
    job: RunningJob | None = None,
) -> Ended:
    """Run `python -m MODULE` on every rank to the end; `tell` gets each line that a rank prints, on a thread.

    `environment` extends this process's own. Pass a `job` to kill some ranks from `tell`. No process is left when this
    returns or raises.
    """
    job = job or RunningJob()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **(environment or {}),
    }
    readers: list[threading.Thread] = []
    interrupted = threading.Event()
    try:
        for rank in range(num_ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            job.processes.append(process)
        for process in job.processes:
            readers.append(threading.Thread(target=_read, args=(process, tell, interrupted), daemon=True))
            readers[-1].start()
        return job.wait()
    except KeyboardInterrupt:
        interrupted.set()  # a terminal interrupts the ranks too; what they print then is noise
        raise
    finally:
        for process in job.processes:
            _stop(process)
        for reader in readers:
            reader.join()


def _read(process: subprocess.Popen[str], tell: Callable[[str], None], interrupted: threading.Event) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if not interrupted.is_set():
                tell(line.rstrip())


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
