"""`run_ranks` for functions that need torch: each rank is a process of its own, forked from one that has imported it.

To import torch and what belongs to it takes two to six seconds of a processor, for every rank of every test. The
process that is forked has imported modules and done nothing else. It has one thread, and no file or state of a test.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from ckptstore.testing import ranks

TORCH = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
LIGHTNING = (*TORCH, "lightning.pytorch", "torchmetrics")
TRANSFORMERS = (*TORCH, "transformers.trainer", "transformers.models.bert.modeling_bert")

_PR_SET_CHILD_SUBREAPER = 36
_READ_AT_START = ("PYTHON", "OMP_", "LD_", "MKL_", "TORCH_")
"""Of the environment what a process looks at once, when it starts or imports: it must be that of the first process."""
_STARTS = "import sys; sys.path[:] = {path!r}; import forked_ranks; forked_ranks.give_birth({fd}, {modules!r})"


class _Birth(NamedTuple):
    """What a new rank needs to know."""

    job: str
    end: str
    output: str
    directory: str
    environment: dict[str, str]


class _Forked:
    """What `run_ranks` uses of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class _Parent:
    """A process that has imported the modules, and forks a rank whenever one is asked for."""

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.fixed = _read_at_start(environment)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = _STARTS.format(path=sys.path, fd=theirs.fileno(), modules=modules)
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # else numpy starts threads when it is imported
                pass_fds=[theirs.fileno()],
            )
        self._has_imported = False
        atexit.register(self._end)

    def wait_until_imported(self) -> None:
        """Return when it can fork at once: ranks that start late look dead to others that are already there."""
        with self._lock:
            if not self._has_imported:
                self._answer()
                self._has_imported = True

    def _answer(self) -> bytes:
        answer = self._socket.recv(100)
        if not answer:
            raise RuntimeError(f"the process to fork from has ended with status {self._process.wait()}")
        return answer

    def fork(self, birth: _Birth) -> _Forked:
        with self._lock:
            _become_subreaper(True)  # the rank is left by its parent, and becomes a child of this process
            try:
                self._socket.send(pickle.dumps(birth))
                return _Forked(int(self._answer()))
            finally:
                _become_subreaper(False)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


def run_ranks(
    n: int, function: Callable[..., Any], *args: Any, modules: tuple[str, ...] = TORCH, **options: Any
) -> list[Any]:
    """`ckptstore.testing.run_ranks`, whose processes have imported these modules already. Not from several threads."""

    def start(directory: Path, rank: int, environment: Mapping[str, str]) -> _Forked:
        found = {**ranks.environment_of(rank, environment), "PYTHONHASHSEED": str(rank % 2)}
        parent = _first(modules, found)
        assert _read_at_start(found) == parent.fixed, "these variables count only when a process starts"
        files = (str(directory / name) for name in ("job", f"end-{rank}", f"output-{rank}"))
        return parent.fork(_Birth(*files, os.getcwd(), found))

    environment = {**os.environ, **ranks._rank_environment(n), **(options.get("env") or {})}
    parents = [_first(modules, {**environment, "PYTHONHASHSEED": str(seed)}) for seed in range(min(n, 2))]
    for parent in parents:  # before the time of the ranks begins: on a busy machine the imports take a minute
        parent.wait_until_imported()
    with patch.object(ranks, "_start", start):
        return ranks.run_ranks(n, function, *args, **options)


_parents: dict[tuple[tuple[str, ...], str], _Parent] = {}
"""Two for each set of modules: ranks with odd numbers have another hash seed than those with even ones."""


def _first(modules: tuple[str, ...], environment: Mapping[str, str]) -> _Parent:
    kind = modules, environment["PYTHONHASHSEED"]
    if kind not in _parents:
        _parents[kind] = _Parent(modules, environment)
    return _parents[kind]


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name != "PYTHONWARNINGS"  # which a rank can still heed
    }


def _become_subreaper(is_one: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def give_birth(fd: int, modules: tuple[str, ...]) -> None:
    """Import the modules, and fork a rank for each request until the socket is closed.

    It returns in each rank too, when that has done its work: an interpreter ends as it always does.
    """
    ranks._die_with_parent(os.getppid())
    for name in modules:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked"
    gc.collect()
    gc.freeze()  # else each rank copies the pages of all modules when it collects or ends
    asked = socket.socket(fileno=fd)
    asked.send(b"imported")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test that waits ends first, and then this
    while request := asked.recv(1 << 20):
        birth = pickle.loads(request)
        if (pid := _fork_orphan(asked)) == 0:
            return _be_rank(birth)
        asked.send(b"%d" % pid)
    return None


def _fork_orphan(asked: socket.socket) -> int:
    """Fork a process that leads its own session and is a child of the nearest subreaper; 0 in it, its id here."""
    readable, writable = os.pipe()
    between = os.fork()
    if between:
        os.close(writable)
        with open(readable, "rb") as file:
            pid = int(file.read())
        os.waitpid(between, 0)
        return pid
    left = os.getpid()
    if os.fork():
        os._exit(0)
    asked.close()
    os.setsid()
    while os.getppid() == left:
        time.sleep(0.0005)
    os.write(writable, b"%d" % os.getpid())
    os.close(writable)
    os.close(readable)
    return 0


def _be_rank(birth: _Birth) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing, open(birth.output, "wb") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()
    os.chdir(birth.directory)
    os.environ.clear()
    os.environ.update(birth.environment)
    for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(option)  # type: ignore[attr-defined]
    with open(birth.job, "rb") as file:
        job = pickle.load(file)
    sys.path[:] = job["sys_path"]
    ranks._be_rank(job, birth.end)
