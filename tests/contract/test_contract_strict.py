"""The contract suite finds storages that break the contract: a test fails for each of `broken_storages`, and passes for
the sound one."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import broken_storages
import pytest

pytestmark = pytest.mark.slow

BROKEN = {name: made.caught_by for name, made in vars(broken_storages).items() if getattr(made, "caught_by", "")}


def test_every_broken_storage_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", f"--junitxml={report}", f"--basetemp={tmp_path}/base"]
    expected = {*BROKEN.items(), *(("TestSound", test) for test in BROKEN.values())}
    run = [f"{broken_storages.__file__}::{name}::{test}" for name, test in sorted(expected)]
    ended = subprocess.run([*command, *run], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    outcomes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2]
        outcomes[name, case.attrib["name"].partition("[")[0]] |= {mark.tag for mark in case} or {"passed"}
        if name == "TestHasHalfOfAPower" and (failure := case.find("failure")) is not None:
            assert "has local_path of Disk, and lacks link, overwrite, read_steps, remov" in failure.attrib["message"]
    assert outcomes.keys() == expected
    for (name, test), seen in outcomes.items():
        assert seen <= {"passed"} if name == "TestSound" else "failure" in seen <= {"passed", "failure"}, (name, test)
    assert len(BROKEN) > 15
