"""A process whose n-th system call that changes given directories ends it with SIGKILL, before the call.

`strace` counts by thread and by call, so "the 17th change of this process and its children" cannot be said to it; this
is a tracer that can. The process stops itself with SIGSTOP when it is ready; calls count from there, in it, in its
threads and in what it starts. The log has one line for each: its number, its name, its path, and whether it succeeded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

NOT_ALLOWED = 77

_CALLS = {
    # name: (number on x86_64, number on aarch64, what names the file: arguments of a path and of its directory)
    "write": (1, 64, ("fd", 0)),
    "pwrite64": (18, 68, ("fd", 0)),
    "writev": (20, 66, ("fd", 0)),
    "pwritev": (296, 70, ("fd", 0)),
    "pwritev2": (328, 287, ("fd", 0)),
    "fsync": (74, 82, ("fd", 0)),
    "fdatasync": (75, 83, ("fd", 0)),
    "fallocate": (285, 47, ("fd", 0)),
    "ftruncate": (77, 46, ("fd", 0)),
    "copy_file_range": (326, 285, ("fd", 2)),
    "sendfile": (40, 71, ("fd", 0)),
    "fchmod": (91, 52, ("fd", 0)),
    "ioctl": (16, 29, ("fd", 0)),
    "open": (2, None, ("path", 0)),
    "creat": (85, None, ("path", 0)),
    "truncate": (76, 45, ("path", 0)),
    "link": (86, None, ("path", 1)),
    "rename": (82, None, ("path", 1)),
    "unlink": (87, None, ("path", 0)),
    "rmdir": (84, None, ("path", 0)),
    "mkdir": (83, None, ("path", 0)),
    "chmod": (90, None, ("path", 0)),
    "symlink": (88, None, ("path", 1)),
    "openat": (257, 56, ("at", 0)),
    "linkat": (265, 37, ("at", 2)),
    "renameat": (264, 38, ("at", 2)),
    "renameat2": (316, 276, ("at", 2)),
    "unlinkat": (263, 35, ("at", 0)),
    "mkdirat": (258, 34, ("at", 0)),
    "fchmodat": (268, 53, ("at", 0)),
    "symlinkat": (266, 36, ("at", 1)),
}
_FLAGS_AT = {"open": 1, "openat": 2}
_FICLONE = 0x40049409

_SEIZE, _INTERRUPT, _SYSCALL, _SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
_OPTIONS = 1 | 2 | 4 | 8 | 16 | 0x100000  # syscall stops, fork, vfork, clone, exec; all end with the tracer
_WAIT_ALL = 0x40000000
_ENTRY, _EXIT = 1, 2
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Info(ctypes.Structure):
    """`struct ptrace_syscall_info` of Linux 5.3 and later."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),  # of the call at its entry, its result at its exit
        ("arguments", ctypes.c_uint64 * 6),
    )


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    """Raises OSError; of a thread that is gone already, ProcessLookupError."""
    result = _libc.ptrace(request, tid, address, data)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)


def _numbers() -> dict[int, str]:
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if sys.platform != "linux" or column is None:
        raise OSError(f"calls are not known on {sys.platform} {platform.machine()}")
    found = {calls[column]: name for name, calls in _CALLS.items()}
    return {number: name for number, name in found.items() if number is not None}  # type: ignore[misc]


@dataclass
class Tracer:
    """Counts, and kills once."""

    under: list[str]
    at: int | None
    log: TextIO
    names: dict[int, str] = field(default_factory=_numbers)
    count: int = 0
    _open: dict[int, tuple[int, str, str]] = field(default_factory=dict)
    """By thread the call that it is in, if that counts."""

    def run(self, pid: int) -> int:
        """Trace a child from its SIGSTOP on; its status as a shell has it."""
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return as_shell(status)
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        for tid in threads:
            _ptrace(_SEIZE, tid, 0, _OPTIONS)
            _ptrace(_INTERRUPT, tid)
        os.kill(pid, signal.SIGCONT)
        ended = None
        while True:
            try:
                tid, status = os.waitpid(-1, _WAIT_ALL)
            except ChildProcessError:
                return 1 if ended is None else ended
            if os.WIFSTOPPED(status):
                self._stopped(tid, status)
            elif tid == pid:
                ended = as_shell(status)

    def _stopped(self, tid: int, status: int) -> None:
        number, event = os.WSTOPSIG(status), status >> 16
        passed_on = 0
        try:
            if number == signal.SIGTRAP | 0x80:
                self._at_call(tid)
            elif not event and number != signal.SIGTRAP:
                passed_on = number
            _ptrace(_SYSCALL, tid, 0, passed_on)
        except ProcessLookupError:
            """It was killed meanwhile."""

    def _at_call(self, tid: int) -> None:
        info = _Info()
        _ptrace(_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == _EXIT:
            if tid in self._open:
                number, name, path = self._open.pop(tid)
                failed = ctypes.c_int64(info.number).value < 0
                print(number, name, path, "failed" if failed else "done", file=self.log, flush=True)
            return
        name = self.names.get(info.number) if info.op == _ENTRY else None
        path = self._changes(tid, name, list(info.arguments)) if name is not None else None
        if path is None or name is None:
            return
        self.count += 1
        self._open[tid] = self.count, name, path
        if self.count == self.at:
            print(self.count, name, path, "killed", file=self.log, flush=True)
            del self._open[tid]
            os.kill(_process_of(tid), signal.SIGKILL)

    def _changes(self, tid: int, name: str, arguments: list[int]) -> str | None:
        """The path that a call changes, None when it changes nothing below the directories."""
        if name in _FLAGS_AT and not arguments[_FLAGS_AT[name]] & os.O_CREAT:
            return None
        if name == "ioctl" and arguments[1] != _FICLONE:
            return None
        kind, first = _CALLS[name][2]
        try:
            if kind == "fd":
                path = os.readlink(f"/proc/{tid}/fd/{ctypes.c_int(arguments[first]).value}")
            elif kind == "path":
                path = _within(tid, _AT_FDCWD, _text_at(tid, arguments[first]))
            else:
                directory = ctypes.c_int(arguments[first]).value
                path = _within(tid, directory, _text_at(tid, arguments[first + 1]))
        except OSError:  # a call that fails by itself, or a thread that is gone
            return None
        return path if any(path == root or path.startswith(f"{root}/") for root in self.under) else None


def _text_at(tid: int, address: int) -> str:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(4096 - address % 4096)
        if b"\0" not in data:
            data += memory.read(4096)
    return os.fsdecode(data.partition(b"\0")[0])


def _within(tid: int, directory: int, path: str) -> str:
    if path.startswith("/"):
        return os.path.normpath(path)
    base = os.readlink(f"/proc/{tid}/cwd" if directory == _AT_FDCWD else f"/proc/{tid}/fd/{directory}")
    return os.path.normpath(f"{base}/{path}")


def _process_of(tid: int) -> int:
    status = Path(f"/proc/{tid}/status").read_text()
    return int(status.partition("\nTgid:")[2].split()[0])


def as_shell(status: int) -> int:
    """The status of a process as a shell has it: 128 and the signal when it was killed."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def trace(pid: int, under: list[str], at: int | None, log: str) -> int:
    """The status of a child when it has ended; NOT_ALLOWED where nothing can be traced."""
    try:
        with open(log, "w") as lines:
            return Tracer([os.path.realpath(root) for root in under], at, lines).run(pid)
    except PermissionError as error:
        print(f"nothing can be traced here: {error}", flush=True)
        os.kill(pid, signal.SIGKILL)
        return NOT_ALLOWED
