"""What type checkers see of the package: mypy of all that users call, pyright of what needs no framework, which would
take it a minute. Also where the package is installed from a clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYRIGHT = ROOT / ".servers/node_modules/.bin/pyright"

MYPY = """
[mypy]
strict = True
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,numpy.*,ray.*,fsspec.*,rich.*,pyarrow.*,lightning.*,pytorch_lightning.*,transformers.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch._tensor,torch.nn,torch.nn.modules.*,torch.nn.parameter,torch.optim.*]
follow_imports = silent
"""
"""What is heavy is not followed; of torch, what a loop touches is."""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A folder with the code of users: README's loop, and the calls of this folder."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "use_readme.py").write_text(found[1])
    for path in HERE.glob("use_*.py"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_mypy_knows_what_users_call(users: Path) -> None:
    (users / "mypy.ini").write_text(MYPY)
    options = [f"--config-file={users / 'mypy.ini'}", f"--cache-dir={users / 'cache'}"]
    files = map(str, users.glob("use_*.py"))
    done = subprocess.run([sys.executable, "-m", "mypy", *options, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_pyright_knows_what_users_call(users: Path) -> None:
    if not PYRIGHT.exists():
        message = f"{PYRIGHT} is missing: run `make servers`"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    environment = Path(sys.prefix)
    config = {
        "include": ["use_readme.py", "use_store.py", "use_dcp.py"],
        "extraPaths": [str(ROOT)],
        "venvPath": str(environment.parent),
        "venv": environment.name,
        "pythonVersion": "3.11",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (users / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run([PYRIGHT, "-p", users], cwd=users, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, clone)
    (clone / "ckptstore").mkdir()
    shutil.copy(ROOT / "ckptstore/__init__.py", clone / "ckptstore")
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert archive.read(path).decode().strip() == str(clone)
