"""What `ckptstore` shows: sorted, complete, loaded on first use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import all_errors

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert ckptstore.__all__ == sorted(set(ckptstore.__all__))


@pytest.mark.parametrize("name", ckptstore.__all__)
def test_every_public_name_is_there_and_knows_its_home(name: str) -> None:
    value = getattr(ckptstore, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"


def test_every_error_is_public() -> None:
    assert {cls.__name__ for cls in all_errors().values()} <= set(ckptstore.__all__)


STUBS = sorted((ROOT / "ckptstore").rglob("__init__.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_type_checkers_and_python_read_the_same_names(stub: Path) -> None:
    seen = [ast.unparse(node) for node in ast.parse(stub.read_text()).body]
    package = import_module(".".join(stub.parent.relative_to(ROOT).parts))
    names = [line.split()[-1] for line in seen if line.startswith("from ")]
    assert sorted(names) == sorted({*dir(package)} - {"__version__"})
    assert all(re.fullmatch(r"from ckptstore\S* import (\w+) as \1|__version__: str", line) for line in seen)


def test_the_package_is_imported_from_a_zip_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as packed:
        for path in [*(ROOT / "ckptstore").rglob("*.py"), *(ROOT / "ckptstore").rglob("*.pyi")]:
            packed.write(path, path.relative_to(ROOT))
    code = """import sys
sys.path.insert(0, "one.zip")
import ckptstore
assert "one.zip" in ckptstore.__file__
with ckptstore.open_store("store") as store:
    store.save_directory(1, None)
    print(store.latest().step, "resume" in dir(ckptstore.ray))"""
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "1 True\n"


def test_ray_is_the_surface_of_its_integration() -> None:
    assert dir(ckptstore.ray) == dir(import_module("ckptstore.integrations.ray"))
    assert ckptstore.ray.resume is import_module("ckptstore.integrations.ray").resume
    with pytest.raises(AttributeError, match="has no attribute 'sync'"):
        ckptstore.ray.sync  # noqa: B018


def test_a_name_is_looked_up_once() -> None:
    first = ckptstore.StoreFenced
    assert vars(ckptstore)["StoreFenced"] is first


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sync'"):
        ckptstore.sync  # noqa: B018


def test_dir_lists_the_surface() -> None:
    assert set(ckptstore.__all__) | {"dcp", "interchange", "ray", "state"} == set(dir(ckptstore))


def test_windows_is_refused_in_a_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import ckptstore"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: ckptstore does not run on Windows")


def test_the_version_stands_once() -> None:
    """Where people and tools look for it, it is read from there."""
    names = ("pyproject.toml", "CITATION.cff", "README.md", "ckptstore/__init__.py")
    assert [name for name in names if f'"{ckptstore.__version__}"' in (ROOT / name).read_text()] == [
        "ckptstore/__init__.py"
    ]
    assert (ROOT / "CHANGELOG.md").read_text().count(f"## {ckptstore.__version__}") == 1
