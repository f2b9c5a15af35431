"""Divide the files of a checkpoint that a framework wrote between ranks that see some of the same files.

The names of frameworks are made for one shared directory: a name stands for one file, whichever ranks see it. So every
file is stored once, by a rank that sees it: on one node or a shared disk the ranks divide the files, on disks of their
own each node brings what it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Seen = Mapping[str, tuple[int, int]]
"""The files that a rank sees, by name: time of the last change in nanoseconds, and size in bytes."""


def divide(seen: Sequence[Seen]) -> list[set[str]]:
    """Return the names for each rank. A file goes to the rank that has least so far among those that see its newest
    version.

    All ranks that know what all see come to the same result.
    """
    newest: dict[str, tuple[int, int]] = {}
    for files in seen:
        for name, version in files.items():
            newest[name] = max(version, newest.get(name, version))
    shares: list[set[str]] = [set() for _ in seen]
    loads = [0] * len(seen)
    for name, version in sorted(newest.items(), key=lambda item: (-item[1][1], item[0])):
        rank = min(
            (rank for rank, files in enumerate(seen) if files.get(name) == version), key=lambda rank: loads[rank]
        )
        shares[rank].add(name)
        loads[rank] += version[1]
    return shares
