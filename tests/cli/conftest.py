"""A store with some history, and a way to run the command line inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from ckptstore import CheckpointStore, KeepLatest, open_store
from ckptstore.tools.cli import main

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/cli-schema.json").read_text())
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command and expect an exit code (0)."""

    def run(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code, f"exit code {result.exit_code}: {result.output}"
        return result

    return run


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Run a command with --json, hold what it printed to the documented schema, and give it back."""

    def run_json(*arguments: object, code: int = 0) -> Any:
        found = json.loads(run(*arguments, "--json", code=code).stdout)
        words = list(map(str, arguments[:2]))
        name = "error" if "error" in found else "-".join(words) if "-".join(words) in SCHEMA["$defs"] else words[0]
        jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{name}"}).validate(found)  # itself: see tests/docs
        return found

    return run_json


def add(store: CheckpointStore, step: int, directory: Path, **metrics: float) -> None:
    """Save two files as a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.pt").write_bytes(bytes([step % 256]) * 3000)
    (directory / "config.json").write_text("{}")
    store.save_directory(step, directory, metrics=metrics, metadata={"epoch": step, "nested": {"seed": 1}})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Steps 10, 20 and 30 were saved; retention has dropped step 10, step 20 is the best by loss."""
    root = tmp_path / "store"
    with open_store(root, retention=KeepLatest(2)) as opened:
        for step, loss in ((10, 0.5), (20, 0.25), (30, 0.75)):
            add(opened, step, tmp_path / "source", loss=loss)
    return root
