"""What the pages say about Ray Train is true: their blocks run one after another, on a Ray of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/how-to/ray-train.md"
COMING_FROM = ROOT / "docs/how-to/coming-from.md"
DOCS = ROOT / "tests/docs"
HERE = ROOT / "tests/ray"
ONE_IS_ENOUGH = ("ray-keeps", "ckptstore-keeps", "third", "ranked", "failing")
TWO_WORKERS, AS_MANY_AS_MATTER = "num_workers=2)", f"num_workers=1 if name in {ONE_IS_ENOUGH} else 2)"
"""What the page says, and what its `fit` runs with here: each worker is a process that imports for seconds."""
RUN = """
import json, sys, ray
from cluster import start_fewer_processes
from page_runner import run_blocks
start_fewer_processes()
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
for page, code in json.load(sys.stdin).items():
    run_blocks(page, code, sys.argv[1])
"""


def load_docs_tests() -> Any:
    """How the other pages are read and run."""
    sys.path.insert(0, str(DOCS))
    spec = importlib.util.spec_from_file_location("test_docs", DOCS / "test_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_docs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_every_block_runs(tmp_path: Path) -> None:
    docs = load_docs_tests()
    code = {}
    for page in (PAGE, COMING_FROM):
        first, *others = [block for block in docs.blocks(page) if block.language == "python"]
        code[page] = [first, *(block for block in others if "needs Ray" in block.rest)]
    assert (len(code[PAGE]) > 10, len(code[COMING_FROM])) == (True, 4)
    setup = code[PAGE][0]
    assert setup.text.count(TWO_WORKERS) == 1
    code[PAGE][0] = replace(setup, text=setup.text.replace(TWO_WORKERS, AS_MANY_AS_MATTER))
    given = {str(page): [(block.line, block.text) for block in blocks] for page, blocks in code.items()}
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(DOCS), str(HERE)])}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        input=json.dumps(given),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout + done.stderr  # with the logs of all workers
    assert done.returncode == 0, told[-12000:]
    assert "--- Logging error ---" not in told
