"""A small process beside the agent: when the agent dies, by kill -9 too, it ends what the agent has started.

It is run as a file of its own and imports nothing of ckptstore. Its standard input is a pipe that the agent holds open:
a line with the target as `os.kill` takes it, then silence, and a full stop when the agent ends in order. The end of the
pipe without that full stop is the death of the agent. `prctl(PR_SET_PDEATHSIG)` would reach the direct child alone, and
a shell as that child hands nothing on.

It holds the lock on the folder (an inherited descriptor) until the target is gone, so that an agent that is started
again does not work beside a trainer that still writes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_LOOK_SECONDS = 0.2


def main() -> None:
    """Wait for the agent's end; the argument says how many seconds after SIGTERM SIGKILL comes."""
    target = sys.stdin.readline()
    if not target.strip() or sys.stdin.read():
        return
    end(int(target), float(sys.argv[1]))


def end(target: int, patience_seconds: float) -> None:
    """Send SIGTERM, and SIGKILL to what is still there after that time. Return when nothing is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, signal.SIGTERM)
        until = time.monotonic() + patience_seconds
        while _is_alive(target):
            if time.monotonic() > until:
                os.kill(target, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)


def _is_alive(target: int) -> bool:
    """Return True if a process of the target runs. One that has ended counts as gone, also where nobody asks for its
    code, as in a container whose first process does not."""
    os.kill(target, 0)
    if not os.path.isdir("/proc/self"):
        return True
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            state, _parent, group = file.read().rpartition(")")[2].split()[:3]
            if target in (int(name), -int(group)) and state not in "ZX":
                return True
    return False


if __name__ == "__main__":
    main()
