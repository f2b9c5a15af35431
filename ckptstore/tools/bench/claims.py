"""The claims of the README, measured in less time: fewer rounds, and some with less data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckptstore.tools.bench.figures.report import Options, Report

CLAIMS: Mapping[str, str] = {
    "durable save, Llama, 1 rank": "save --shape llama-1b --size 600MiB --repeat 3 --peers dcp",
    "load from the page cache, Even, 1 rank": "load --shape tensors --size 512MiB --repeat 5 --peers dcp",
    "save of 20,000 tensors of 4 KiB": "save --shape tensors --tensor-size 4KiB --size 78MiB --repeat 3 --peers dcp",
    "save to S3 in memory, 1 GiB": (
        "save --to s3-sink --shape tensors --size 512MiB --repeat 5 --peers s3torchconnector"
    ),
}
"""By workload, as in the README: the words of a command that takes a minute or so."""


def measure(options_of: Callable[[Sequence[str]], Options], run: Callable[[Options], Report]) -> Report:
    """Measure all claims, one after another. The report has each by its name in the README."""
    reports = {name: run(options_of(words.split())) for name, words in CLAIMS.items()}
    first = next(iter(reports.values()))
    return replace(
        first,
        versions={name: version for one in reports.values() for name, version in one.versions.items()},
        asked={"claims": dict(CLAIMS)},
        workloads=tuple(replace(one.workloads[0], name=name) for name, one in reports.items()),
    )
