"""Agents as real processes, with a small trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptstore import open_store

TRAINER = Path(__file__).with_name("small_trainer.py")
LONG_SECONDS = 300
"""A bound for what hangs: on a busy machine everything takes its time."""


class Agent:
    """`ckptstore run` or `watch-folder`, running."""

    def __init__(
        self,
        words: list[str],
        *,
        events: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        below: tuple[str, ...] = (),
    ) -> None:
        self.events_file = events
        command = [*below, sys.executable, "-m", "ckptstore.tools.cli", *words]
        with open(events.with_suffix(".out"), "ab") as out:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.getcwd(), **(env or {})},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """What it told so far."""
        text = self.events_file.read_text() if self.events_file.exists() else ""
        told = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [event for event in told if name in (None, event["event"])]

    def saw(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event."""
        until = time.monotonic() + LONG_SECONDS
        while time.monotonic() < until:
            for event in self.events(name):
                if fields.items() <= event.items():
                    return event
            assert self.process.poll() is None or self.events(name), f"it ended without {name}: {self.output}"
            time.sleep(0.05)
        raise AssertionError(f"no {name} {fields}: {self.output}")

    @property
    def output(self) -> str:
        """Its output and the trainer's."""
        return self.events_file.with_suffix(".out").read_text()

    def code(self) -> int:
        """Its exit code, when it has ended."""
        return self.process.wait(LONG_SECONDS)

    @property
    def committed(self) -> list[int]:
        """The steps that it committed, in order."""
        return [event["step"] for event in self.events("CheckpointCommitted")]


Start = Callable[..., Agent]


def small(folder: object, steps: int, *more: object) -> list[object]:
    """The command line of the small trainer."""
    return [sys.executable, TRAINER, folder, steps, *more]


def live(store: object, **options: Any) -> dict[int, bytes]:
    """The live steps of a store, verified, each with the first bytes of its weights."""
    found = {}
    with open_store(str(store), group="solo", **options) as opened:
        for checkpoint in opened:
            assert checkpoint.verify().ok
            with checkpoint.as_directory() as directory:
                weights = {(directory / name).read_bytes() for name in ("model.bin", "more.bin")}
            assert len(weights) == 1, f"step {checkpoint.step} is a mixture"
            found[checkpoint.step] = weights.pop()[:2]
    return found
