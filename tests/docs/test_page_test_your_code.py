"""Each block of the page on testing is a test file that passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/how-to/test-your-code.md"


def test_every_block_is_a_test_file_that_passes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (test_\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == PAGE.read_text().count("```python") == 3
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (passed,) = re.findall(r"(\d+) passed", ended.stdout)
    assert int(passed) > 80
