"""The examples are whole programs: each runs as its first lines say, and goes on when it is run again.

That of Ray Train runs in tests/ray/test_example.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptstore import open_store

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MOST_LINES = 40


def run(directory: Path, *words: str) -> str:
    """Run a program, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(directory: Path, num_ranks: int, name: str) -> str:
    words = ("--standalone", "--nproc-per-node", str(num_ranks), str(EXAMPLES / name), "store")
    return run(directory, "-m", "torch.distributed.run", *words)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert f"examples/{path.name}" in text.split('"""')[1]


def test_one_process_goes_on(tmp_path: Path) -> None:
    example = str(EXAMPLES / "one_process.py")
    assert run(tmp_path, example, "store") == "began at the beginning\nsaved epochs up to 2\n"
    assert run(tmp_path, example, "store") == "resumed from epoch 2\nsaved epochs up to 5\n"


def test_ddp_under_torchrun(tmp_path: Path) -> None:
    assert torchrun(tmp_path, 2, "ddp.py") == "began with epoch 0, saved 1 with 2 ranks\n"


def test_fsdp2_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    assert torchrun(tmp_path, 2, "fsdp2.py") == ""
    assert torchrun(tmp_path, 1, "fsdp2.py") == "2 ranks saved epoch 0, 1 loaded it\n"
    with open_store(tmp_path / "store") as store:
        first, second = (checkpoint.metrics["loss"] for checkpoint in store)
    assert second < first


def test_any_trainer_goes_on_where_its_folder_is_lost(tmp_path: Path) -> None:
    words = ["-m", "ckptstore.tools.cli", "run", "--store", "store", "--folder", "out"]
    words += ["--pattern", "model-step{step}.pt", "--"]
    for first in (0, 3):
        (tmp_path / "out").mkdir()
        told = run(tmp_path, *words, sys.executable, str(EXAMPLES / "any_trainer.py"), "out")
        assert f"begins with step {first}\n" in told
        shutil.rmtree(tmp_path / "out")
    with open_store(tmp_path / "store") as store:
        assert [checkpoint.step for checkpoint in store] == [0, 1, 2, 3, 4, 5]
