"""The trainer: a process that the agent starts, with the agent's own input, output and environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptstore.errors import InvalidInput
from ckptstore.tools.run import guard
from ckptstore.tools.run.folders import JobSeen, StartedJob

ORPHAN_SECONDS = 30.0
"""The time that a trainer whose agent was killed has to end after SIGTERM."""


def check_command(command: Sequence[str]) -> None:
    """Raise InvalidInput for a command that cannot be started, before anything else is done."""
    if not command:
        raise InvalidInput("There is no command to run", hint="Write it after --, as in -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise InvalidInput(
            f"The command {command[0]} is not found, or is not executable",
            hint="Give a program on the PATH or a path to one. What a shell would read goes into: sh -c '...'",
        )


class TrainerProcess:
    """A running trainer, and what it has started itself.

    Without a terminal it leads a session and a process group of its own, and a signal that is handed on reaches the
    whole group: a shell as the command would keep it to itself. On a terminal it stays in the agent's group, so that it
    may read from the terminal and Ctrl-C reaches it.

    It ends when the agent dies (`ckptstore.tools.run.guard`).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ended: Callable[[int], object],
        lock: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with the environment of this process and `variables`. `ended` is called with its exit code, on a
        thread; `lock` is held until nothing of it is left."""
        self.on_terminal = has_terminal()
        guarded = [sys.executable, "-I", "-S", str(Path(guard.__file__)), f"{ORPHAN_SECONDS:g}"]
        self._guard = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        try:
            environment = {**os.environ, **variables} if variables else None
            self._process = subprocess.Popen(command, start_new_session=not self.on_terminal, env=environment)
        except BaseException:
            self._tell_guard("\n")
            self._guard.wait()
            raise
        self._job = StartedJob(self._process.pid)
        self._target = self._process.pid if self.on_terminal else -self._process.pid
        self._tell_guard(f"{self._target}\n", more=True)
        threading.Thread(target=lambda: ended(self._wait()), name="ckptstore-trainer", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process that was started."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code as shells have it: 128 + N after signal N. None as long as it runs."""
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    def _wait(self) -> int:
        self._process.wait()
        code = self.code
        assert code is not None  # it has ended
        return code

    def seen(self) -> JobSeen:
        """Return what is known of its processes now.

        What it has left running may still write, so the job has not ended well before that has ended too. A trainer
        that has failed may have left half of something, whatever still runs.
        """
        code = self.code  # before the look: what was seen to be gone must not have been killed since
        seen = self._job.seen()
        if code is None:
            return replace(seen, is_alive=True)
        return replace(seen, is_alive=seen.is_alive and code == 0, ended_well=code == 0 and not seen.is_alive)

    def hand_on(self, number: int) -> None:
        """Send it a signal. On a terminal SIGINT and SIGQUIT are left out: the terminal has sent them already."""
        if self.on_terminal and number in (signal.SIGINT, signal.SIGQUIT):
            return
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._target, number)

    def release(self) -> None:
        """Leave alone what the trainer has left running: the agent ends in order."""
        self._tell_guard(".")
        self._guard.wait()

    def _tell_guard(self, text: str, *, more: bool = False) -> None:
        pipe = self._guard.stdin
        assert pipe is not None  # it was asked for
        with contextlib.suppress(BrokenPipeError, ValueError):
            pipe.write(text.encode())
            pipe.flush()
            if not more:
                pipe.close()


def has_terminal() -> bool:
    """Return True if this process reads from a terminal, and signals of the terminal come to it."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
