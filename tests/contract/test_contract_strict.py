"""The contract suite finds storages that break the contract: each of `broken_storages` fails, the sound one passes."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

BROKEN = Path(__file__).with_name("broken_storages.py")


def test_every_broken_storage_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", f"--junitxml={report}", f"--basetemp={tmp_path}/base"]
    ended = subprocess.run([*command, str(BROKEN)], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    failed: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2]
        failure = case.find("failure")
        failed[name] += [case.attrib["name"]] if failure is not None else []
        if name == "TestHasHalfOfAPower" and failure is not None:
            assert "has free_bytes, persist of Disk, and lacks link, local_path, make_d" in failure.attrib["message"]
        assert case.find("error") is None, (name, case.attrib["name"])
    assert len(failed) > 15
    assert failed.pop("TestSound") == []
    assert failed["TestHasHalfOfAPower"] == ["test_it_has_no_half_of_a_power"]
    assert [name for name, tests in failed.items() if not tests] == []
