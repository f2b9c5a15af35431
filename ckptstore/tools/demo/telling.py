"""Print the lines of the demo, and report its failures."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptstore import InvalidInput
from ckptstore.storage.open import open_storage
from ckptstore.tools.demo.launch import Ended


class DemoFailed(Exception):
    """Something in the demo deviated from its story."""


def require_empty(root: str) -> None:
    """Raise InvalidInput if the place holds anything."""
    storage = open_storage(root)
    first = next(iter(storage.list("")), None)
    storage.close()
    if first is not None:
        raise InvalidInput(f"{root} is not empty: it holds {first.key}", hint="Give the demo a place of its own")


def require_success(ended: Ended) -> None:
    """Raise DemoFailed unless the job succeeded."""
    if ended.failed_rank is not None:
        how = "failed" if ended.signal is None else f"died by {ended.signal.name}"
        raise DemoFailed(f"rank {ended.failed_rank} {how}; what it printed is above")


def command(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command of ckptstore as a user would."""
    say(f"$ ckptstore {shlex.join(arguments)}")
    done = subprocess.run(
        [sys.executable, "-m", "ckptstore.tools.cli", *arguments],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in done.stdout.splitlines():
        say(line)
    if done.returncode:
        raise DemoFailed(f"ckptstore {arguments[0]} failed with exit code {done.returncode}")


def invite(*commands: Sequence[str], place: str) -> None:
    """Print commands to look at the stores with, as they can be run from here; the stores stay in `place`."""
    program = shutil.which("ckptstore") and "ckptstore"
    beside = Path(sys.executable).with_name("ckptstore")
    if program is None and beside.exists():
        program = os.path.relpath(beside)
    program = program or f"{sys.executable} -m ckptstore"
    shout("\nThe stores stay. Look for yourself:")
    for arguments in commands:
        say(f"{program} {shlex.join(arguments)}")
    if "://" not in place:
        say(f"rm -r {shlex.quote(place)}")


def head(text: str) -> None:
    """Begin a part of a scene."""
    shout(f"\n {text}")


def say(text: str) -> None:
    """Print one line of a part."""
    print(f"   {text}", flush=True)


def shout(text: str) -> None:
    """Print a line that stands out."""
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)
