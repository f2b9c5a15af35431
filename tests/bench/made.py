"""Reports with samples that are given, for what only reads reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.tools.bench.figures.report import Report, Role, Sample, Workload, WorkloadOutcome

ROLES: Mapping[str, Role] = {"ckptstore": "ckptstore", "DCP FileSystemWriter": "peer", "raw disk": "limit"}


def outcome(name: str, seconds: Sequence[float], **fields: Any) -> WorkloadOutcome:
    """A contender that took so many seconds."""
    samples = [
        Sample(blocked_seconds=value, total_seconds=value, cpu_seconds=2 * value, peak_bytes=1 << 20)
        for value in seconds
    ]
    return WorkloadOutcome(name=name, family="x", role=ROLES[name], status="measured", samples=tuple(samples), **fields)


def report(**seconds_of: Sequence[float]) -> Report:
    """One save by ckptstore (`ours`), a peer (`peer`) and the limit (`limit`), and a peer that failed."""
    names = {"ours": "ckptstore", "peer": "DCP FileSystemWriter", "limit": "raw disk"}
    outcomes = [outcome(names[name], seconds) for name, seconds in seconds_of.items()]
    failed = WorkloadOutcome(name="<b>broken</b>", family="x", role="peer", status="failed", reason="rank 1: no <luck>")
    workload = Workload(
        name="save",
        title="Save a state",
        size_bytes=1 << 30,
        ranks=1,
        outcomes=(*outcomes, failed),
        timeline=tuple(RANKS),
        facts={"straggler": {"rank": 1, "seconds": 0.5}},
    )
    return Report(
        created_at=1.8e9,
        command="ckptstore bench save",
        machine={"cores": 2},
        versions={"torch": "2.13.0"},
        asked={"ranks": 1},
        workloads=(workload,),
    )


RANKS: list[dict[str, Any]] = [
    {
        "rank": rank,
        "start": 0.0,
        "stored": stored,
        "end": 1.0,
        "spans": [
            {"phase": "agree", "lane": 0, "start": 0.0, "end": 0.1, "what": "who writes what", "size_bytes": 0},
            {"phase": "upload", "lane": 0, "start": 0.1, "end": stored, "what": "state", "size_bytes": 10},
            {"phase": "wait", "lane": 0, "start": stored, "end": 1.0, "what": "the others", "size_bytes": 0},
        ],
    }
    for rank, stored in enumerate((0.4, 0.9))
]
