"""A reader that is killed at one of its changes of the file system: run as a program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import ckptstore
from ckptstore.storage.disk import posix

CHANGES = ("rename", "replace", "unlink", "link", "mkdir", "pwrite", "posix_fallocate", "rmdir", "open")


def main(uri: str, model: str, at: int, free_bytes: int) -> int:
    """Apply the newest version; die before change number `at`. Print the number of changes at the end."""
    count = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal count
            if name != "open" or (args[1:2] and args[1] & os.O_CREAT):
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return run

    if free_bytes:
        posix.free_bytes = lambda _path: free_bytes
    with ckptstore.Subscription(uri, model) as subscription:
        for name in CHANGES:
            setattr(os, name, counted(name, getattr(os, name)))
        subscription.apply()
    print(count)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
