"""Runs the Python blocks of a page, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_blocks(page: str, code: list[tuple[int, str]], directory: Path) -> None:
    """Run blocks, given with the numbers of their first lines, in one namespace; `directory` is the current one."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)  # a page is read outside of any launcher
    os.chdir(directory)
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, text in code:
        exec(compile("\n" * (line - 1) + text, page, "exec"), namespace)
