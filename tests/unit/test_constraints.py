"""`constraints.txt` pins what `pyproject.toml` names, exactly, and nothing that only works on one machine."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

PINS = {
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
}


def direct_dependencies() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    lines += [line for items in extras.values() for line in items]
    return [item for item in map(Requirement, lines) if item.name != "ckptstore"]


def test_every_line_is_a_pin_that_works_anywhere() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line), f"{line!r} is not name==version"


@pytest.mark.parametrize("requirement", direct_dependencies(), ids=str)
def test_a_direct_dependency_is_pinned_to_a_version_that_fits(requirement: Requirement) -> None:
    pin = PINS.get(canonicalize_name(requirement.name))
    assert pin, f"{requirement.name} has no pin in constraints.txt"
    assert requirement.specifier.contains(pin)


@pytest.mark.parametrize("requirement", direct_dependencies(), ids=str)
def test_pyproject_pins_nothing(requirement: Requirement) -> None:
    assert requirement.url is None
    assert all(item.operator == ">=" for item in requirement.specifier)


def test_what_is_installed_is_what_is_pinned() -> None:
    for name, pin in PINS.items():
        try:
            installed = Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        assert installed.public == Version(pin).public, f"{name} {installed} is installed, constraints.txt has {pin}"


def test_the_extras_are_the_promised_ones() -> None:
    extras = ["torch", "s3", "gcs", "azure", "ray", "lightning", "transformers", "otel", "mlflow", "wandb"]
    extras += ["fsspec-clouds", "torchtitan", "torch-checkpointing", "serve", "demo", "bench", "publish", "pull", "dev"]
    assert set(PROJECT["project"]["optional-dependencies"]) == set(extras)
