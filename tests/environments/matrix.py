"""The quick tests of states, ranks and DCP with other versions of Python and torch, each in an environment of its own.

`make matrix` runs all of `ROWS`; `python tests/environments/matrix.py 3.11 2.8.0` runs one. What is needed is fetched,
gigabytes for each torch, into `.matrix/`. Prints a row of docs/reference/versions.md for each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = (("3.11", "2.8.0"), ("3.12", "2.14.1"), ("3.13", "2.15.0"))
"""The lowest torch, one in between, and the newest, each with another Python. CI runs the one of constraints.txt."""
TESTS = ("tests/unit", "tests/state", "tests/states", "tests/dcp", "tests/flow")
TOOLS = ("fsspec", "filelock", "hypothesis", "jsonschema", "packaging", "psutil", "pytest", "pytest-timeout")
TOOLS += (
    "pytest-xdist",
    "safetensors",
    "torchao",
    "torchdata",
    "boto3",
    "pyyaml",
    "google-auth",
    "google-crc32c",
    "pandas",
    "requests",
)
ABOUT_THE_PINS = ("test_constraints", "test_makefile", "test_object_store_options", "test_the_installed_torch")
"""Tests of what is installed beside; they say nothing of a torch."""


def run(python: str, torch: str) -> bool:
    """Make the environment if it is not there, run the tests, print the row. Returns True if all passed."""
    interpreter = shutil.which(f"python{python}")
    if interpreter is None or subprocess.run([interpreter, "--version"], check=False).returncode:  # a shim of pyenv
        print(f"| {python} | {torch} | not run: there is no python{python} here | |")
        return False
    home = ROOT / ".matrix" / f"{python}-{torch}"
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet"]
    if not (home / ".made").exists():
        subprocess.run([interpreter, "-m", "venv", home], check=True)
        subprocess.run([*pip, f"torch=={torch}", *TOOLS], check=True)
        subprocess.run([*pip, "--editable", f"{ROOT}[torch]"], check=True)
        (home / ".made").touch()
    command = [home / "bin/python", "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += [
        "-m",
        "not slow and not long and not ceph",
        "-k",
        " and ".join(f"not {name}" for name in ABOUT_THE_PINS),
        *TESTS,
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHONPATH")}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    (home / "tests.log").write_text(done.stdout)
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.splitlines()[-1]))
    print(f"| {python} | {torch} | {counts} | {datetime.now(UTC).date()} |", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    chosen = [(sys.argv[1], sys.argv[2])] if len(sys.argv) > 2 else ROWS
    sys.exit(not all(list(starmap(run, chosen))))
