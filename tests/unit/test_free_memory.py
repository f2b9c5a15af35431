"""How much memory is left: the tightest of the machine and the control groups around this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.runtime import free_memory
from ckptstore.runtime.free_memory import Room, tightest_room

MACHINE = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    800 kB\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, path in (("_MACHINE", "meminfo"), ("_OWN_GROUPS", "cgroup"), ("_GROUPS", "groups")):
        monkeypatch.setattr(free_memory, name, tmp_path / path)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_system_that_does_not_tell(root: Path) -> None:
    assert tightest_room() is None


def test_without_a_limit_it_is_the_machine(root: Path) -> None:
    write(root, {"meminfo": MACHINE, "cgroup": "0::/job\n", "groups/job/memory.max": "max\n"})
    assert tightest_room() == Room(800 << 10, 1000 << 10)


def test_a_group_around_this_one_has_the_limit_and_pages_of_files_are_free(root: Path) -> None:
    write(
        root,
        {
            "meminfo": MACHINE,
            "cgroup": "0::/pod/job\n",
            "groups/pod/memory.max": "1000\n",
            "groups/pod/memory.current": "900\n",
            "groups/pod/memory.stat": "anon 1\ninactive_file 300\n",
            "groups/pod/job/memory.max": "max\n",
            "groups/pod/job/memory.current": "900\n",
        },
    )
    assert tightest_room() == Room(400, 1000)


def test_version_1_inside_a_container_that_sees_the_path_of_the_host(root: Path) -> None:
    write(
        root,
        {
            "meminfo": MACHINE,
            "cgroup": "9:cpu:/\n4:memory:/kubepods/abc\n0::/\n",
            "groups/memory/memory.limit_in_bytes": "2000\n",
            "groups/memory/memory.usage_in_bytes": "1900\n",
            "groups/memory/memory.stat": "cache 5\ntotal_inactive_file 100\n",
        },
    )
    assert tightest_room() == Room(200, 2000)
