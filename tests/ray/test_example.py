"""The example of Ray Train runs as it stands, on a Ray of its own, and survives the failure that it plants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow

HERE = ROOT / "tests/ray"
RUN = """
import runpy, sys, ray
from cluster import start_fewer_processes
start_fewer_processes()
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_the_example_recovers(tmp_path: Path) -> None:
    example = str(ROOT / "examples/ray_train.py")
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); sys.argv = [{example!r}, 'runs']\n{RUN}"
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the last checkpoint is of epoch 3: " in done.stdout
