"""Without what an extra brings, each path that needs it says which extra that is, in Python and on the command line.

Each case is a process of its own in which those packages cannot be imported, as if they were not installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {hidden!r}:
            return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
BARE = ("torch", "numpy", "xxhash", "ray", "pyarrow", "s3fs", "gcsfs", "adlfs", "obstore", "botocore")
WITHOUT_EXTRA = ("numpy", "xxhash")
"""torch alone, without `ckptstore[torch]`."""

PATHS = {
    "save": "store.save(1, {'a': 1})",
    "save_async": "store.save_async(1, {'a': 1})",
    "load": "store.load({'a': 1})",
    "resume": "store.resume({'a': 1})",
    "checkpoint": "store[5].load({'a': 1})",
    "dcp": "from ckptstore.dcp import StoreWriter",
    "import": "cli(['import', 'x.pt', 'new', '--from', 'torch', '--step', '1'])",
    "export": "cli(['export', root, 'out'])",
}


def run_without(hidden: tuple[str, ...], code: str, root: Path) -> subprocess.CompletedProcess[str]:
    begin = (
        f"root = {str(root)!r}\nimport ckptstore\nfrom ckptstore.cli import main as cli\n"
        "store = ckptstore.open_store(root, durable=False)\n"
    )
    words = [sys.executable, "-c", HIDE.format(hidden=hidden) + begin + code]
    return subprocess.run(words, capture_output=True, text=True, cwd=root.parent)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that a bare installation made: directories need no extra."""
    root = tmp_path_factory.mktemp("extras") / "run"
    made = run_without(BARE, "store.save_directory(5, None)\nassert store.resume().step == 5\ncli(['ls', root])", root)
    assert made.returncode == 0, made.stderr
    return root


@pytest.mark.parametrize("hidden", [BARE, WITHOUT_EXTRA], ids=["bare", "torch alone"])
@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_needs_an_extra_names_it(root: Path, hidden: tuple[str, ...], path: str) -> None:
    done = run_without(hidden, PATHS[path], root)
    assert done.returncode != 0
    assert "pip install 'ckptstore[torch]'" in done.stderr, done.stderr


def test_a_marker_needs_torch_alone(root: Path) -> None:
    done = run_without(BARE, "from ckptstore.state import replicated", root)
    assert "pip install 'ckptstore[torch]'" in done.stderr
    assert run_without(WITHOUT_EXTRA, "from ckptstore.state import replicated", root).returncode == 0


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("az", "azure")])
def test_a_cloud_names_its_extra(root: Path, scheme: str, extra: str) -> None:
    done = run_without(BARE, f"cli(['ls', '{scheme}://bucket/run'])", root)
    assert done.returncode == 2
    assert f'pip install "ckptstore[{extra}]"' in done.stderr
