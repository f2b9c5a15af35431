"""A large job that is to run on Ray where there is none.

Ray looks for a cluster among all processes of the machine, and would find those of other people: here it finds none.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore import InvalidInput
from ckptstore.tools.cli import main


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_without_a_cluster_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(set))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ckptstore.open_store(tmp_path / "store") as store:
        store.save(1, {"epoch": 1})
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "store"), "--engine", "ray"])
    assert result.exit_code == InvalidInput.exit_code, result.output
    assert "There is no Ray cluster to work on" in result.stderr
    assert "ray start --head" in result.stderr
