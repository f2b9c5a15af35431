"""Runs the Python blocks and the commands of a page, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_blocks(page: str, code: list[tuple[int, str | list[str]]], directory: Path) -> None:
    """Run blocks in one namespace, and between them commands of ckptstore, which are lists of words; each with the
    number of its first line. `directory` is the current one."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)  # a page is read outside of any launcher
    os.chdir(directory)
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, part in code:
        if isinstance(part, str):
            exec(compile("\n" * (line - 1) + part, page, "exec"), namespace)
        else:
            run_command(part, f"{page}:{line}")


def run_command(words: list[str], where: str) -> None:
    """Run a command of ckptstore in this process, which has imported what it needs."""
    from ckptstore.tools.cli import main

    code: Any = 0
    try:
        main(words, prog_name="ckptstore")
    except SystemExit as ended:
        code = ended.code
    assert not code, f"{where}: ckptstore {' '.join(words)} ended with {code}"
