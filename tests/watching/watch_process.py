"""`ckptstore watch` as a process, read line by line."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

DEADLINE_SECONDS = 120.0


class Watching:
    """The process, and the lines that it has printed."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def look(self, fits: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first look from here on that fits."""
        while (line := self._lines.get(timeout=DEADLINE_SECONDS)) is not None:
            if fits(look := json.loads(line)):
                return dict(look)
        raise AssertionError(f"it ended: {self.errors()}")

    def errors(self) -> str:
        """What it printed to stderr, once it has ended."""
        return str(self.process.stderr.read())

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return int(self.process.wait(DEADLINE_SECONDS))


@contextmanager
def watching(*arguments: object, env: Mapping[str, str] | None = None) -> Iterator[Watching]:
    """Run the command until the context ends."""
    command = [sys.executable, "-m", "ckptstore.tools.cli", "watch", *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield Watching(process)
        finally:
            process.kill()
