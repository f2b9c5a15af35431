"""What `ckptstore` shows: sorted, complete, loaded on first use."""

from __future__ import annotations

import ast
import tomllib
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


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "ckptstore/__init__.py").read_text())
    seen = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(ckptstore.__all__) - {"__version__"}


def test_a_name_is_looked_up_once() -> None:
    first = ckptstore.StoreFenced
    assert vars(ckptstore)["StoreFenced"] is first


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sync'"):
        ckptstore.sync  # noqa: B018


def test_dir_lists_the_surface() -> None:
    assert set(ckptstore.__all__) | {"dcp", "ray", "state"} == set(dir(ckptstore))


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ckptstore.__version__ == project["version"]
