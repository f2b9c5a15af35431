"""`ckptstore report` inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from seeing import checked

from ckptstore.tools.cli import main

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command and expect an exit code (0)."""

    def run(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code, f"exit code {result.exit_code}: {result.output}"
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def report(run: Run) -> Callable[..., Any]:
    """The document of `ckptstore report --json`."""

    def report(*arguments: object, code: int = 0) -> Any:
        return checked(json.loads(run("report", *arguments, "--json", code=code).stdout))

    return report
