"""Measure the rows of docs/performance.md by their own commands, and write what came into rows.json.

    python benchmarks/record.py                          # all rows, each twice; takes hours
    python benchmarks/record.py --only "S3 in memory" --runs 3

Medians are those of all rounds of all runs, ranges go over all of them. A row is written as soon as it is measured, and
keeps what it said before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ckptstore.tools.bench.figures.report import OURS, Report, Sample, Workload, WorkloadOutcome, rounded, summary

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs/performance/rows.json"
Aims = Sequence[Mapping[str, Any]]


def workload_of(value: Mapping[str, Any]) -> Workload:
    """What a command measured: the JSON of `ckptstore bench`, or that of a group of pytest-benchmark."""
    if value.get("kind") == "ckptstore-bench":
        (only,) = Report.from_json(value).workloads
        return only
    groups = {one["group"] for one in value["benchmarks"]}
    if len(groups) != 1:
        raise ValueError(f"a row is one group of benchmarks, and these are {sorted(groups)}")
    outcomes = []
    for one in value["benchmarks"]:
        info = one["extra_info"]
        cpu = info.get("cpu_seconds", 0.0)
        samples = [
            Sample(blocked_seconds=seconds, total_seconds=seconds, cpu_seconds=cpu, peak_bytes=None)
            for seconds in one["stats"]["data"]
        ]
        outcomes.append(WorkloadOutcome.of(info["contender"], samples, role=info["role"]))
    size_bytes = value["benchmarks"][0]["extra_info"]["size_bytes"]
    return Workload(name="", title=groups.pop(), size_bytes=size_bytes, ranks=1, outcomes=tuple(outcomes))


def joined(runs: Sequence[Workload]) -> Workload:
    """All samples of all runs. Raises ValueError if a contender failed: a row would not say that it lacks one."""
    failed = [f"{one.name}: {one.reason}" for run in runs for one in run.outcomes if one.status == "failed"]
    if failed:
        raise ValueError(f"{runs[0].title}: {'; '.join(failed)}")
    found = []
    for one in runs[0].outcomes:
        same = [run.measured(one.name) for run in runs]
        if None not in same:
            found.append(replace(one, samples=tuple(sample for each in same if each for sample in each.samples)))
    return replace(runs[0], outcomes=tuple(found))


def figures(workload: Workload, outcome: WorkloadOutcome) -> str:
    """Seconds with their range, and the processor's for each GiB."""
    seconds = workload.figures(outcome)
    cpu = (summary(outcome, workload.size_bytes) or {}).get("cpu_seconds_per_gib")
    text = f"{median(seconds):.3g} s ({min(seconds):.3g} to {max(seconds):.3g})"
    return text if cpu is None else f"{text}, {cpu:.2g} CPU s/GiB"


def cells(workload: Workload, aims: Aims) -> dict[str, str]:
    """The cells of a row. An aim is for a "contender" or for the best one of a "role", with the ratio "at_least"."""
    ours, peer, limit = workload.measured(OURS), workload.best("peer"), workload.best("limit")
    if ours is None:
        raise ValueError(f"{workload.title}: ckptstore was not measured")
    named = [one for aim in aims if (one := workload.measured(aim.get("contender", ""))) and one.role == "peer"]
    peers = dict.fromkeys(one.name for one in [*([peer] if peer else []), *named])
    verdicts = {}
    for one in [*filter(None, map(workload.measured, peers)), *([limit] if limit else [])]:
        ratio = rounded(workload.ratio(one), 3) or 0.0
        verdicts[one.name] = f"{ratio:g} of the limit" if one.role == "limit" else f"{ratio:g} times {one.name}"
    for aim in aims:
        against = workload.measured(aim["contender"]) if "contender" in aim else workload.best(aim["role"])
        if against is None:
            raise ValueError(f"{workload.title}: nothing was measured for the aim {aim}")
        is_met = (workload.ratio(against) or 0.0) >= aim["at_least"]
        said = verdicts.get(against.name, f"{rounded(workload.ratio(against), 3):g} times {against.name}")
        verdicts[against.name] = f"{said} where {aim['at_least']:g} was the aim: {'met' if is_met else '**missed**'}"
    return {
        "ours": figures(workload, ours),
        "peer": "; ".join(
            f"{one.name}: {figures(workload, one)}" for one in filter(None, map(workload.measured, peers))
        )
        or "not measured",
        "limit": f"{limit.name}: {figures(workload, limit)}" if limit else "not measured",
        "verdict": "; ".join(verdicts.values()),
    }


def measured(command: str) -> Workload:
    """Run the command of a row."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        option = "--benchmark-json" if "pytest" in command else "--json"
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # where `ckptstore` is
        done = subprocess.run(
            f"{command} {option} {path}",
            shell=True,
            cwd=ROOT,
            env={**os.environ, "PATH": beside},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return workload_of(json.loads(path.read_text()))


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="Rows whose name has this in it.")
    parser.add_argument("--runs", type=int, default=2, help="How often each command runs.")
    parser.add_argument("--machine", default="A", help="The letter of this machine in rows.json.")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page = json.loads(ROWS.read_text())
    chosen = [row for row in page["rows"] if options.only in row["workload"]]
    if not chosen or options.machine not in page["machines"]:
        parser.error("no such row" if not chosen else f"rows.json does not describe machine {options.machine}")
    for row in chosen:
        workload = joined([measured(row["command"]) for _ in range(options.runs)])
        now = {"date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(), "machine": options.machine}
        before = {name: row[name] for name in ("date", "commit", "ours", "verdict")}
        row["earlier"] = [*([before] if row["date"] else []), *row.get("earlier", [])]
        row.update(cells(workload, row.get("aims", ())) | now)
        ROWS.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")
        print(f"{row['workload']}: {row['ours']}; {row['verdict']}", flush=True)


if __name__ == "__main__":
    main()
