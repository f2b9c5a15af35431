"""One agent a folder on a node: a lock that the system gives back when its holders are gone, however they ended."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptstore.agent.trainer import ORPHAN_SECONDS
from ckptstore.errors import InvalidInput

_PATIENCE_SECONDS = ORPHAN_SECONDS + 10
_LOOK_SECONDS = 0.2


@contextmanager
def locked(folder: Path, *, waits: Callable[[str], object]) -> Iterator[int]:
    """Hold the folder against other agents of this node; gives the descriptor that holds it.

    The lock file lies in the system's directory for temporary files: a folder on a network file system is locked on
    this node alone. The trainer of an agent that was killed is waited for, and `waits` is told.

    Raises InvalidInput when another agent is at work there.
    """
    status = folder.stat()
    path = Path(tempfile.gettempdir()) / f"ckptstore-agent-{os.getuid()}-{status.st_dev:x}-{status.st_ino:x}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _acquire(descriptor, folder, waits)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, waits: Callable[[str], object]) -> None:
    until, is_told = time.monotonic() + _PATIENCE_SECONDS, False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace")
        if _is_alive(holder) or time.monotonic() > until:
            raise InvalidInput(
                f"Another agent works on {folder}, process {holder or 'unknown'}",
                hint="One agent a folder: end that one, or give another --folder",
            )
        if not is_told:
            waits(f"the trainer of an agent that was killed still runs; waiting up to {_PATIENCE_SECONDS:.0f} s for it")
            is_told = True
        time.sleep(_LOOK_SECONDS)


def _is_alive(holder: str) -> bool:
    if not holder.isdecimal():
        return False
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
