"""One agent a folder on a node: a lock that the system gives back when its holders are gone, however they ended."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptstore.errors import InvalidInput
from ckptstore.events import emit
from ckptstore.runtime.file_locks import NO_LOCKS, lock_open_file
from ckptstore.tools.run.folders.own_directory import own_directory
from ckptstore.tools.run.notices import FolderNotice
from ckptstore.tools.run.trainer import ORPHAN_SECONDS

_PATIENCE_SECONDS = ORPHAN_SECONDS + 10
_LOOK_SECONDS = 0.2


@contextmanager
def locked(folder: Path, *, node_rank: int) -> Iterator[int]:
    """Lock the folder against other agents of this node; yield the descriptor that holds the lock.

    The lock has the names of the host and of the node: the agents of several nodes may share a folder. The trainer of
    an agent that was killed is waited for. A file system without locks is taken as it is.

    Raises InvalidInput when another agent is at work in the folder.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    path = own_directory(Path(os.path.realpath(folder))) / f"agent-{host}-{node_rank}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _acquire(descriptor, folder)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path) -> None:
    until, has_warned = time.monotonic() + _PATIENCE_SECONDS, False
    while True:
        try:
            if lock_open_file(descriptor, shared=False):
                return
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            raise
        holder = os.pread(descriptor, 20, 0).decode(errors="replace")
        if _is_alive(holder) or time.monotonic() > until:
            raise InvalidInput(
                f"Another agent works on {folder}, process {holder or 'unknown'}",
                hint="One agent a folder: end that one, or give another --folder",
            )
        if not has_warned:
            text = "the trainer of an agent that was killed still runs; waiting up to"
            emit(FolderNotice(text=f"{text} {_PATIENCE_SECONDS:.0f} s for it"))
            has_warned = True
        time.sleep(_LOOK_SECONDS)


def _is_alive(holder: str) -> bool:
    if not holder.isdecimal():
        return False
    try:
        os.kill(int(holder), 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # another user's
    return True
