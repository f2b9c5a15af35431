"""Reports with samples that are given, for what only reads reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from click.testing import CliRunner, Result

from ckptstore.tools.bench.figures.report import Report, Role, Sample, Workload, WorkloadOutcome
from ckptstore.tools.cli import main

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
    told: dict[str, Any] = {"timeline": tuple(RANKS), "facts": {"straggler": {"rank": 1, "seconds": 0.5}}}
    of: dict[str, Any] = {"name": "save", "title": "Save a state", "size_bytes": 1 << 30, "ranks": 1}
    workload = Workload(**of, **told, outcomes=(*outcomes, failed))
    where: dict[str, Any] = {"machine": {"cores": 2}, "versions": {"torch": "2.13.0"}, "asked": {"ranks": 1}}
    return Report(created_at=1.8e9, command="ckptstore bench save", **where, workloads=(workload,))


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


SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/bench-schema.json").read_text())


def valid(value: Any) -> Any:
    """The value, held to the schema of reports."""
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    return value


def bench(*arguments: object, code: int = 0) -> Result:
    """Run the command, and expect an exit code."""
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result
