"""The Makefile and `.ci/run`: every installation is pinned, torch comes first, CI runs everything."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands_of(target: str, tmp_path: Path) -> list[str]:
    """What `make target` would run on a fresh machine."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_every_installation_is_pinned_and_torch_comes_first(tmp_path: Path) -> None:
    installs = [line for line in commands_of("install", tmp_path) if " pip " in line]
    assert len(installs) == 3
    assert all("-c constraints.txt" in line for line in installs)
    assert [line.split()[-1] for line in installs[:2]] == ["setuptools", "torch"]
    assert "--no-build-isolation" in installs[2]


def test_what_python_compiles_is_kept(tmp_path: Path) -> None:
    """Nothing is compiled when it is installed, so else every process of a test would compile torch for itself."""
    assert all("--no-compile" in line for line in commands_of("install", tmp_path) if " pip " in line)
    (tmp_path / "more.mk").write_text("include Makefile\nvariables:\n\t@env\n")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["make", "-f", "more.mk", "variables"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "PATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_every_target_does_its_own_set_up(tmp_path: Path) -> None:
    for target in ("demo", "demo-ray", "test", "test-all", "soak", "check", "bench", "docs"):
        lines = commands_of(target, tmp_path)
        assert any("-m venv" in line for line in lines), f"make {target} does not make the environment"


def test_a_demo_installs_what_it_needs_alone(tmp_path: Path) -> None:
    for target, extras in (("demo", "demo"), ("demo-ray", "demo,ray")):
        lines = commands_of(target, tmp_path)
        installs = [line for line in lines if " pip " in line]
        assert all("-c constraints.txt" in line and line.startswith(".venv-demo/") for line in installs)
        assert [line.split()[-1] for line in installs] == ["setuptools", "torch", f'".[{extras}]"']
        assert lines[-1].startswith(".venv-demo/bin/ckptstore demo")


def test_each_test_belongs_to_a_target(tmp_path: Path) -> None:
    quick, others, long = (
        [line.partition(" -m pytest ")[2] for line in commands_of(target, tmp_path) if " -m pytest " in line][1:]
        for target in ("test", "test-all", "test-long")  # first comes what the install compiles
    )
    rest = " and not long and not ceph"
    assert [line.split(" -m ")[1] for line in quick] == [f'"not slow{rest}"'], "one run, as conftest.py expects it"
    assert [line.split(" -m ")[1] for line in others] == [f'"(slow or hypothesis){rest}"', '"not long"']
    assert [line.split(" -m ")[1] for line in long] == ["long", "long"], "and before a release"
    assert " benchmarks " in others[1]
    assert " benchmarks " in long[1]


def test_ci_runs_everything() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert "export CI=true" in text
    assert re.findall(r"^make (.+)$", text, re.MULTILINE) == ["-j3 install servers check", "test", "test-all"]


def test_the_hooks_are_those_of_make_check() -> None:
    (recipe,) = re.findall(r"^check: install\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    hooks = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert [hook.replace(" --force-exclude", "") for hook in hooks] == checks
