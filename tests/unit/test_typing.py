"""What a type checker sees of the package, also where it is installed from a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFIG = """
[mypy]
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,numpy.*,ray.*,fsspec.*,rich.*,pyarrow.*]
follow_imports = skip
"""

CODE = """
import ckptstore
import ckptstore.ray
from ckptstore.ray import store as ray_store

reveal_type(ckptstore.ray.report)
reveal_type(ray_store)


def use(store: ckptstore.CheckpointStore, report: ckptstore.LoadReport, entry: ckptstore.Entry) -> None:
    for trashed in store.trash():
        one: ckptstore.Trashed = trashed
    files: tuple[ckptstore.Receipt, ...] = entry.checkpoint.files
    store.save(1, {}, exists="error")
    store.save(1, {}, exists="never")
    store.save_async(1, {}, on_busy="drop")
    store.load({}, read_once="nodes")
    store.resume({}, per_rank="last")
"""


def test_names_and_literals_are_typed(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(CODE)
    (tmp_path / "mypy.ini").write_text(CONFIG)  # ours is followed as far as the names lead, what is heavy is not
    command = [sys.executable, "-m", "mypy", f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={tmp_path}"]
    done = subprocess.run([*command, str(tmp_path / "use.py")], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    revealed = [line for line in lines if "Revealed type" in line]
    assert len(revealed) == 2
    assert all("def (" in line for line in revealed), revealed
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == 4, done.stdout
    for line, name in zip(errors, ["exists", "on_busy", "read_once", "per_rank"], strict=True):
        assert f'"{name}"' in line


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
