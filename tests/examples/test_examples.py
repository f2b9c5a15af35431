"""The examples are whole programs: each runs as its first lines say, and goes on when it is run again. What one
run has shown is not started anew: torchrun, for another example, and python, for the second run of one.

That of Ray Train runs in tests/ray/test_example.py.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from forked_ranks import run_ranks

from ckptstore import open_store

pytestmark = pytest.mark.slow

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


def begun(name: str, directory: Path) -> str:
    """An example as the program of this process, which has imported torch already; what it printed."""
    os.chdir(directory)
    sys.argv = [name, "store"]
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert f"examples/{path.name}" in text.split('"""')[1]


def test_one_process_goes_on(tmp_path: Path) -> None:
    example = str(EXAMPLES / "one_process.py")
    assert run(tmp_path, example, "store") == "began at the beginning\nsaved epochs up to 2\n"
    assert run_ranks(1, begun, "one_process.py", tmp_path) == ["resumed from epoch 2\nsaved epochs up to 5\n"]


@pytest.mark.long
def test_ddp_under_torchrun(tmp_path: Path) -> None:
    assert torchrun(tmp_path, 2, "ddp.py") == "began with epoch 0, saved 1 with 2 ranks\n"


def test_fsdp2_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, begun, "fsdp2.py", tmp_path) == ["", ""]
    assert run_ranks(1, begun, "fsdp2.py", tmp_path) == ["2 ranks saved epoch 0, 1 loaded it\n"]
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
