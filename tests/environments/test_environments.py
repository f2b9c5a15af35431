"""What is not installed is named with the extra that brings it, in Python and on the command line.

Real environments: bare, torch without our extra, `[torch]` and `[s3]`. A walk calls everything public in each of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from environments import PROJECT, ROOT, closure, make_environment
from packaging.utils import canonicalize_name

from ckptstore.runtime.extras import EXTRAS, install_command

pytestmark = pytest.mark.slow


def word(extras: str) -> str:
    """What pip is to install for an extra."""
    return install_command(extras).removeprefix("pip install ")


SHIPPED = {".py", ".typed", ".css", ".html", ".js"}

HERE = Path(__file__).parent
NOT_INSTALLED = {"torchtitan"}
"""Extras that do not fit beside the others; see `tests/servers/install.py`."""
NEED_TORCH = {
    "names": {
        *(f"ckptstore.dcp.{name}" for name in ("StoreReader", "StoreWriter", "translated")),
        *(f"ckptstore.integrations.loaders.{name}" for name in ("MapLoader", "StreamLoader")),
        *(f"ckptstore.interchange.{name}" for name in ("export", "import_state", "merge")),
        *(
            f"{room}.{name}"
            for room in ("ckptstore.ray", "ckptstore.integrations.ray")
            for name in ("RayStore", "Repair", "repair", "report", "resolve", "resume", "store", "wrap")
        ),
        "ckptstore.state.per_rank",
        "ckptstore.state.replicated",
        "ckptstore.testing.states",
    },
    "store": {"save", "save_async", "load", "resume", "warm_up", "dcp_target", "thin"},
    "checkpoint": {"keys", "load", "per_rank", "tensors", "to_dict"},
    "commands": {"show --tensors", "export", "export --json", "import", "merge", "check-load", "thin"},
}
"""Everything else works without torch: stores, directories, all the care of a store."""
NEED_MORE = {
    "names": {
        "ckptstore.integrations.lightning.CheckpointStoreCallback": word("lightning"),
        "ckptstore.integrations.otel.Telemetry": word("otel"),
        "ckptstore.integrations.otel.instrument": word("otel"),
        "ckptstore.integrations.torchtitan.CkptstoreCheckpointManager": word("torchtitan"),
        "ckptstore.integrations.torch_checkpointing.StoreStorageConfig": word("torch-checkpointing"),
        "ckptstore.integrations.transformers.CheckpointStoreCallback": word("transformers"),
        "ckptstore.ray.s3_filesystem": word("ray"),
        "ckptstore.integrations.ray.s3_filesystem": word("ray"),
        "ckptstore.testing.StorageContract": "pytest",
    },
    "store": {},
    "checkpoint": {},
    "commands": {
        "bench": word("bench"),
        "demo": word("demo"),
        "demo --engine ray": word("demo,ray"),
        "cp --engine ray": word("ray"),
        "serve": word("serve"),
        "publish": word("publish"),
        "pull": word("pull"),
        "s3": word("s3"),
        "gs": word("gcs"),
        "az": word("azure"),
    },
}
"""What is missing in `[torch]` too, and what to install."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the interpreter of a fresh environment with what some requirements bring; one for each set of them."""
    return cache(lambda *wanted: make_environment(tmp_path_factory.mktemp("environment") / "venv", *wanted))


def walk(python: Path, directory: Path, *skipped: str) -> dict[str, Any]:
    """What everything public said in an environment."""
    done = subprocess.run(
        [python, "-I", HERE / "walk.py", *skipped], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told.pop("not walked") == []
    return told


def to_install(told: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Of what did not work: what to give to pip. Anything but an error of one line that says so is a failure."""
    found: dict[str, dict[str, str]] = {}
    for part, answers in told.items():
        found[part] = {}
        for name, answer in answers.items():
            code, text = (answer["code"], answer["stderr"]) if part == "commands" else (2 * bool(answer), answer)
            if code != 0 or (text and not text.startswith("ckptstore: ")):  # the agent tells what it does
                match = re.fullmatch(r"(?:error|InvalidInput): .+ pip install (\S+?)\n?", text)
                assert match is not None, f"{name} said {text!r}"
                assert code == 2, f"{name} ended with {code}"
                found[part][name] = match[1]
    return found


def with_torch_missing() -> dict[str, dict[str, str]]:
    return {part: {**NEED_MORE[part], **dict.fromkeys(NEED_TORCH[part], word("torch"))} for part in NEED_TORCH}


def test_a_bare_installation_names_the_extra_for_everything_it_lacks(environment: Any, tmp_path: Path) -> None:
    assert to_install(walk(environment("ckptstore"), tmp_path)) == with_torch_missing()


@pytest.mark.long
def test_torch_without_the_extra_is_told_to_take_the_extra(environment: Any, tmp_path: Path) -> None:
    python = environment("ckptstore", "torch")
    assert to_install(walk(python, tmp_path)) == with_torch_missing()
    command = [python, "-I", "-m", "ckptstore.tools.cli", "export", "x", "y"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert done.stderr.count(b"\n") == 1, done.stderr


def test_with_the_torch_extra_all_that_it_is_for_works(environment: Any, tmp_path: Path) -> None:
    told = to_install(walk(environment("ckptstore[torch]"), tmp_path))
    assert told == NEED_MORE


ON_S3 = """
import ckptstore
from ckptstore.testing.s3_server import s3_server
with s3_server(buckets=["test"]) as server:
    with ckptstore.open_store("s3://test/run", storage_options=server.storage_options) as store:
        store.save_directory(1, "files")
        assert store.latest().verify().ok
        try:
            store.save(2, {"a": 1})
        except ckptstore.InvalidInput as error:
            print(error)
"""


def test_the_s3_extra_stores_directories_and_names_torch_for_a_state(environment: Any, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "weights").write_bytes(b"w")
    done = subprocess.run(
        [environment("ckptstore[s3]"), "-I", "-c", ON_S3], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{install_command('torch')}\n")


def test_the_wheel_has_all_that_a_bare_installation_needs(tmp_path: Path) -> None:
    """Built and installed by pip; the command that it brings is called."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "ckptstore", source / "ckptstore", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    python = make_environment(tmp_path / "venv", "ckptstore", package=None)
    install = ["--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    (site,) = python.parents[1].glob("lib/python3*/site-packages")
    ours = {path.relative_to(ROOT) for path in (ROOT / "ckptstore").rglob("*") if path.suffix in SHIPPED}
    assert {path for path in ours if not (site / path).exists()} == set()
    done = subprocess.run([python.parent / "ckptstore", "ls", tmp_path / "none"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (10, 1), done.stderr


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - NOT_INSTALLED))
def test_an_extra_brings_the_packages_that_it_is_named_for(extra: str) -> None:
    brought = closure(f"ckptstore[{extra}]")
    providers = importlib.metadata.packages_distributions()
    for package in EXTRAS[extra]:
        assert brought & {canonicalize_name(name) for name in providers[package.partition(".")[0]]}, (
            f"[{extra}] does not bring {package}"
        )


def test_every_extra_for_users_is_known() -> None:
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - {"dev"}
