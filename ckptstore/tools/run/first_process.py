"""The first process of a container, whose number is 1: it adopts what loses its parent, and nobody else asks for the
exit codes of that. Signals without a handler do not reach it."""

from __future__ import annotations

import os
import signal

from ckptstore.tools.run.signals import HANDED_ON
from ckptstore.tools.run.trainer import has_terminal


def stay_behind() -> None:
    """If this is the first process of a container, go on as its child. What stays behind hands signals on, lets the
    orphans go, and ends with the child's exit code. Call it before there are threads.

    The child knows what it has started itself, and waits for that alone.
    """
    if os.getpid() != 1:
        return
    of_terminal = {signal.SIGINT, signal.SIGQUIT} if has_terminal() else set()  # both get them from the terminal
    wanted = {signal.SIGCHLD, *HANDED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while (status := _ended(child)) is None:
        number = signal.sigwait(wanted)
        if number != signal.SIGCHLD and number not in of_terminal:
            os.kill(child, number)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _ended(child: int) -> int | None:
    """Let all go that have ended. Return the status of the child if it is one of them."""
    found = None
    while found is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        found = status if pid == child else None
    return found
