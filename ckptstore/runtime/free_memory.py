"""Measure the memory left to this process on Linux: on the machine, and in the control group that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MACHINE = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """The most memory there can be, and the part of it that is free or can be freed at once."""

    available_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        """The available part, from 0 to 1."""
        return self.available_bytes / self.limit_bytes


def tightest_room() -> Room | None:
    """Return the room that ends first; None where the system does not report any.

    A control group counts the pages of files that its processes read and write; unused ones count as free. Knows
    versions 1 and 2 of control groups: https://docs.kernel.org/admin-guide/cgroup-v2.html.
    """
    return min(_rooms(), key=lambda room: room.share, default=None)


def _rooms() -> Iterator[Room]:
    machine = _fields(_MACHINE)
    if {"MemTotal:", "MemAvailable:"} <= machine.keys():
        yield Room(machine["MemAvailable:"] << 10, machine["MemTotal:"] << 10)
    for directory, limit, used, idle in _own_groups():
        limit_bytes, used_bytes = _number(directory / limit), _number(directory / used)
        if limit_bytes and used_bytes is not None:
            used_bytes -= _fields(directory / "memory.stat").get(idle, 0)
            yield Room(max(0, limit_bytes - used_bytes), limit_bytes)


def _own_groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield the directory, and the names of limit, use and idle pages, of this process's groups and of those around
    them. Inside a container the path may be that of the host; then the root is the group."""
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif controllers == "memory":
            root, names = (
                _GROUPS / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        own = root / path.strip("/")
        yield from ((directory, *names) for directory in {root, own, *own.parents} if directory.is_relative_to(root))


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdigit() else None  # "max" is no limit


def _fields(path: Path) -> dict[str, int]:
    """Return the lines of the form "name number" as a dictionary."""
    words = [line.split() for line in _lines(path)]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
