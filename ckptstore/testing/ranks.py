"""Run a function in several real processes, each with the environment of one rank.

    def hold(seconds): ...

    results = run_ranks(4, hold, 0.1)                       # in rank order
    results = run_ranks(2, save_and_die, expect_killed=[1]) # rank 1 must die by SIGKILL; its result is None

A process starts without torch in a tenth of a second, never by fork. The function is found again by its module, so it
stands at the top level of an importable module or of a test file; a file that imports little starts fast. Its
arguments and its result are pickled.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_CHILD = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    job = pickle.load(file)
sys.path[:] = job["sys_path"]
from ckptstore.testing.ranks import _be_rank
_be_rank(job, sys.argv[2])
"""
_SHOWN_BYTES = 8192
_PR_SET_PDEATHSIG = 1


class RanksFailed(AssertionError):
    """Raised when some ranks raised, died or hung.

    `errors` has each rank's exception, if it could be pickled, and `signals` the signal that a rank died by.
    """

    def __init__(self, message: str, errors: dict[int, BaseException], signals: dict[int, int]) -> None:
        super().__init__(message)
        self.errors = errors
        self.signals = signals


@dataclass(frozen=True, slots=True)
class _Ended:
    """The outcome of one rank."""

    rank: int
    exit_status: int | None
    """As in `subprocess`: negative for a signal, None when it had to be killed at the deadline."""
    returned: bool
    result: Any
    error: BaseException | None
    trace: str
    output: str

    def fault(self, *, kill_expected: bool) -> str | None:
        """Return the fault of a rank, None if there is none."""
        if self.exit_status is None:
            return "hung until the deadline"
        if kill_expected:
            return None if self.exit_status == -signal.SIGKILL else f"was to be killed, and {self._how()}"
        return None if self.exit_status == 0 and self.returned else self._how()

    def _how(self) -> str:
        if self.exit_status and self.exit_status < 0:
            return f"died by {signal.Signals(-self.exit_status).name}"
        if self.returned and self.exit_status == 0:
            return "returned"
        return "raised" if self.trace else f"exited with status {self.exit_status} and without a result"


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 120,
    env: Mapping[str, str] | None = None,
    expect_killed: Collection[int] = (),
) -> list[Any]:
    """Call `function(*args)` in n processes at once and return their results in rank order.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port) set, overridden
    by `env`; and a PYTHONHASHSEED of its own, unless that is set. A rank that fails does not stop the others: they run
    to their end or to the deadline. Raises RanksFailed with every fault, remote traceback and output when a rank
    raises, dies, hangs, or survives though it is in `expect_killed`. When it returns, none of these processes is left,
    nor any that they started.
    """
    if type(n) is not int or n < 1 or not set(expect_killed) <= set(range(n)):
        raise ValueError(f"{n!r} ranks, of which {sorted(expect_killed)} are to be killed: there are no such ranks")
    where = _find(function)
    with tempfile.TemporaryDirectory(prefix="ckptstore-ranks-") as name:
        directory = Path(name)
        job = {
            "sys_path": [os.path.abspath(path) for path in sys.path],
            "where": where,
            "args": pickle.dumps(args),  # on their own: their classes may stand in the function's module
            "timeout_seconds": timeout_seconds,
            "parent_id": os.getpid(),
        }
        (directory / "job").write_bytes(pickle.dumps(job))
        environment = {**os.environ, **_rank_environment(n), **(env or {})}
        started: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + timeout_seconds
        try:
            for rank in range(n):
                started.append(_start(directory, rank, environment))  # noqa: PERF401 - a failure must leave a list
            statuses = [_wait(process, deadline) for process in started]
        finally:
            for process in started:
                _end(process)
        return _settle([_read_end(directory, rank, status) for rank, status in enumerate(statuses)], expect_killed)


def _rank_environment(n: int) -> dict[str, str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def environment_of(rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one rank."""
    # Hash seeds differ but are fixed: otherwise sets of text would have the same order on all ranks in some runs only.
    return {"PYTHONHASHSEED": str(rank), **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _start(directory: Path, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(directory / f"output-{rank}", "wb") as output:
        return subprocess.Popen(
            [
                sys.executable,
                "-X",
                "faulthandler",
                "-c",
                _CHILD,
                str(directory / "job"),
                str(directory / f"end-{rank}"),
            ],
            env=environment_of(rank, environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that what a rank started can be ended with it
        )


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status, or None at the deadline. The process stays a zombie, so that its id is not used again."""
    pause_seconds = 0.002
    while True:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if time.monotonic() > deadline:
            return None
        time.sleep(pause_seconds)
        pause_seconds = min(0.05, pause_seconds * 1.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, if it still runs, and everything that it started; then reap it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_end(directory: Path, rank: int, exit_status: int | None) -> _Ended:
    try:
        result, error, trace = pickle.loads((directory / f"end-{rank}").read_bytes())
        returned = not trace
    except FileNotFoundError:
        returned, result, error, trace = False, None, None, ""
    output = (directory / f"output-{rank}").read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
    return _Ended(rank, exit_status, returned, result, error, trace, output)


def _settle(ends: list[_Ended], expect_killed: Collection[int]) -> list[Any]:
    for end in ends:
        if end.output.strip():
            print(f"--- output of rank {end.rank} ---\n{end.output.rstrip()}")
    faults = {end.rank: end.fault(kill_expected=end.rank in expect_killed) for end in ends}
    failed = [end for end in ends if faults[end.rank]]
    if not failed:
        return [end.result for end in ends]
    lines = [f"{len(failed)} of {len(ends)} ranks failed"]
    for end in failed:
        lines += [f"rank {end.rank} {faults[end.rank]}", end.trace.rstrip(), end.output.rstrip()]
    raise RanksFailed(
        "\n".join(line for line in lines if line),
        {end.rank: end.error for end in ends if end.error is not None},
        {end.rank: -end.exit_status for end in ends if end.exit_status is not None and end.exit_status < 0},
    )


def _find(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module, file and name, by which another process finds the function."""
    module, name = sys.modules.get(function.__module__), function.__qualname__
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if found is not function or file is None:
        raise TypeError(f"{name} of {function.__module__} is not at the top level of a module with a file")
    return function.__module__, os.path.abspath(file), name


def _be_rank(job: dict[str, Any], end_path: str) -> None:
    """Run in the process of a rank."""
    _die_with_parent(job["parent_id"])
    faulthandler.dump_traceback_later(max(0.1, job["timeout_seconds"] - 1), exit=False)
    try:
        module_name, file_name, function_name = job["where"]
        function: Any = _load(module_name, file_name)
        for part in function_name.split("."):
            function = getattr(function, part)
        end = pickle.dumps((function(*pickle.loads(job["args"])), None, ""))
    except BaseException as error:
        end = _pickle_error(error, traceback.format_exc())
    temporary = f"{end_path}.part"
    with open(temporary, "wb") as file:
        file.write(end)
    os.rename(temporary, end_path)
    faulthandler.cancel_dump_traceback_later()


def _pickle_error(error: BaseException, trace: str) -> bytes:
    try:
        data = pickle.dumps((None, error, trace))
        pickle.loads(data)
    except Exception:  # an exception of any class may refuse, in any way
        return pickle.dumps((None, None, trace))
    return data


def _load(name: str, file: str) -> ModuleType:
    if name == "__main__":
        name = "__mp_main__"  # as multiprocessing calls it: the guard of a script does not run again
    else:
        try:
            module = importlib.import_module(name)
            if os.path.samefile(module.__file__ or "", file):
                return module
        except (ImportError, OSError):
            """A test file that is not importable by name is found by its path."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name == "__mp_main__":
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


def _die_with_parent(parent_id: int) -> None:
    """Have the kernel kill this rank when the process that started it ends, in whatever way."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_id:
        os._exit(1)
