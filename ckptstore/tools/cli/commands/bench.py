"""`ckptstore bench`: ckptstore beside its peers and the limits of this machine or bucket."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ckptstore.errors import InvalidInput
from ckptstore.runtime.extras import install_line
from ckptstore.tools.cli.command import Call, command
from ckptstore.tools.cli.options import SIZE, STORAGE_OPTION, option
from ckptstore.tools.cli.output import Column, aligned, picked, redacted_command_line, table
from ckptstore.tools.cli.terminal import counting, sigterm

if TYPE_CHECKING:
    from ckptstore.tools.bench.figures.report import Options, Report, Workload

_WORKLOADS = ("save", "load", "async", "directory", "node-cache", "tier", "ranks", "ls", "gpu")
_SHAPES = ("tensors", "llama-1b", "llama-8b", "llama-70b", "llama-405b", "files")
_SIZE_BYTES = 2 << 30
_BELOW_FLOOR = 1
_FILE = click.Path(dir_okay=False, path_type=Path)


@command(
    click.Argument(["what"], type=click.Choice([*_WORKLOADS, "all", "readme", "compare"]), default="all"),
    click.Argument(["files"], nargs=-1, type=_FILE),
    option(
        "--to PLACE",
        "Where to write: a path, a URI, or S3 in memory: s3-test, s3-sink; with -tls at the end, over HTTPS.",
        show_default="temporary directory",
    ),
    option("--size SIZE", "Size of the state over all ranks.", type=SIZE, show_default="2GiB"),
    option(
        "--scale SHARE",
        "Share of a Llama model to save, instead of --size.",
        type=click.FloatRange(0, 1, min_open=True),
    ),
    option(
        "--ranks N", "Number of processes; of the workload tier, on each node.", type=click.IntRange(1, 256), default=1
    ),
    option("--shape", "Tensors or files to save.", type=click.Choice(_SHAPES), default="llama-8b"),
    option("--tensor-size SIZE", "Size of each tensor of --shape tensors.", type=SIZE, show_default="16MiB"),
    option("--peers NAMES", "Peers to measure: all, none, or names such as dcp,ray,torch.", default="all"),
    option("--repeat N", "Number of timed runs of each peer.", type=click.IntRange(1), default=5),
    option("--durable/--no-durable", "Let every peer call fsync, or none.", default=True),
    option("--drop-caches", "Load from the disk instead of the page cache; needs root."),
    option(
        "--pause-seconds S",
        "Seconds without work before each timed run, as in a training.",
        type=click.FloatRange(0),
        default=0.0,
    ),
    option("--max-ranks N", "Largest number of simulated ranks.", type=click.IntRange(64), default=16384),
    option(
        "--latency-ms MS",
        "Latency of the S3 test server and of simulated requests, in ms.",
        type=click.FloatRange(0),
        show_default="0, for tier 30, in simulations 5",
    ),
    option(
        "--bandwidth-mb MB",
        "Bandwidth of the S3 test server each way, in MB/s.",
        type=click.FloatRange(0, min_open=True),
        show_default="no limit, for tier 200",
    ),
    option("--json FILE", "Write the report to FILE, or to stdout if it is -."),
    option("--device [cuda|cpu]", "Device of the workload gpu; cpu is a rehearsal.", show_default="cuda"),
    option("--html FILE", "Write a page with charts to FILE.", type=_FILE),
    option(
        "--floors FILE",
        "Exit with 1 if a ratio is below its floor in FILE.",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
    ),
    common=[STORAGE_OPTION],
)
def bench(call: Call) -> None:
    """Measure ckptstore, its peers and the limit of the hardware.

    WHAT is a workload, "all", "readme" for the table of the README, or "compare" with two FILES that --json wrote.
    Nothing that exists is touched: everything is written below a new prefix, and removed. Needs the extra "bench".
    The exit code is 1 if a ratio is below its floor.
    """
    if call.what in ("compare", "readme"):
        _refuse_settings(call.what)
    _check_writable(call.json, None if call.what == "compare" else call.html)  # hours of measuring would be lost
    if call.what == "compare":
        _compare(call.files, call.json)
        return
    if call.files:
        raise click.UsageError("FILES go with compare alone")
    wanted = None if call.floors is None else _wanted(call.floors)
    report = _measure(call.what, call)
    if call.json != "-":
        _echo(report)
    if call.json is not None:
        _write_json(report.to_json(), call.json)
    if call.html is not None:
        from ckptstore.tools.bench.figures.page import page

        call.html.write_text(page(report))
    if wanted is not None:
        _check(report, wanted, quiet=call.json == "-")


def _refuse_settings(what: str) -> None:
    """Raise UsageError for an option of a measurement: "compare" makes none, and that of "readme" is fixed."""
    context = click.get_current_context()
    goes = {"what", "files", "json"} if what == "compare" else {"what", "files", "json", "html", "floors"}
    for name in context.params:
        if name not in goes and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = name.removesuffix("s") if name == "storage_options" else name
            why = "whose settings are fixed" if what == "readme" else "which measures nothing"
            raise click.UsageError(f"--{flag.replace('_', '-')} does not go with {what}, {why}")


def _check_writable(*paths: str | Path | None) -> None:
    """Raise InvalidInput for a file that cannot be written; "-" is the standard output."""
    for path in (Path(path) for path in paths if path not in (None, "-")):
        place = path if path.exists() else path.parent
        if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
            raise InvalidInput(f"{path} cannot be written", hint="Give a file in a directory that exists")


def _measure(what: str, settings: Any) -> Report:
    try:
        from ckptstore.tools.bench import claims
        from ckptstore.tools.bench.run import run
    except ImportError as error:
        raise InvalidInput(f"the benchmark needs {error.name}", hint=f"Install it{install_line('bench')}") from error

    def measured(options: Options) -> Report:
        line = redacted_command_line()
        return run(options, storage_options=settings.storage_options, command=line, show=show)

    with sigterm(), counting() as show:  # what was written is removed then too
        return claims.measure(options_of, measured) if what == "readme" else measured(_options(what, settings))


def options_of(words: Sequence[str]) -> Options:
    """Return what a command line requests, the words after `ckptstore bench`."""
    settings = SimpleNamespace(**bench.make_context("bench", [*words]).params)
    return _options(settings.what, settings)


def _options(what: str, settings: Any) -> Options:
    from ckptstore.tools.bench.destination import is_disk
    from ckptstore.tools.bench.figures.report import Options
    from ckptstore.tools.bench.peers.registry import FAMILIES

    peers = tuple(settings.peers.split(","))
    unknown = sorted({*peers} - {*FAMILIES, "all", "none"})
    if unknown:
        raise InvalidInput(f"--peers does not know {', '.join(unknown)}", hint=f"all, none, or {', '.join(FAMILIES)}")
    if len(peers) > 1 and {*peers} & {"all", "none"}:
        raise InvalidInput(f"--peers {settings.peers} contradicts itself", hint="Give all, none, or names")
    if settings.scale is not None and settings.size is not None:
        raise InvalidInput("--size has no effect beside --scale", hint="Give one of them")

    def possible(name: str) -> bool:
        return name != "gpu" and (name != "tier" or is_disk(settings.to))

    return Options(
        workloads=tuple(name for name in _WORKLOADS if what == name or (what == "all" and possible(name))),
        to=settings.to,
        size_bytes=_SIZE_BYTES if settings.size is None else settings.size,
        **picked(settings, "scale", "ranks", "shape", "repeat", "durable", "drop_caches", "pause_seconds", "max_ranks"),
        tensor_bytes=settings.tensor_size,
        peers=peers,
        device="cuda" if settings.device is None and what == "gpu" else settings.device,
        latency_seconds=None if settings.latency_ms is None else settings.latency_ms / 1000,
        bytes_per_second=None if settings.bandwidth_mb is None else settings.bandwidth_mb * 1e6,
    )


def _echo(report: Report) -> None:
    from ckptstore.tools.bench.figures import text

    if report.asked.get("device"):
        click.echo(text.markdown(report), nl=False)
        return
    click.echo("\n".join(text.report_lines(report)))
    for workload in report.workloads:
        echo_workload(workload)
    if "claims" in report.asked:
        claims = aligned(text.CLAIM_HEADERS, [text.claim(workload) for workload in report.workloads])
        click.echo("\n".join(["\nThe lines of the README", *claims]))
    lines = text.scaling_lines(report.scaling)
    if lines:
        click.echo("\n  ".join(["\nGrowth", *lines]))
    click.echo(f"\n{text.LEGEND}")


def echo_workload(workload: Workload) -> None:
    """Its table, its facts, and who is not in it."""
    from ckptstore.tools.bench.figures import text

    facts = [f"  {line}" for line in [*text.facts(workload), *text.absent(workload)]]
    rows = aligned(text.HEADERS, text.rows(workload))
    click.echo("\n".join([f"\n{text.heading(workload)}", *rows, *facts]))


def _write_json(value: dict[str, Any], path: str) -> None:
    with click.open_file(path, "w") as file:  # "-" is stdout
        file.write(json.dumps(value, indent=1) + "\n")


def _wanted(path: Path) -> list[dict[str, Any]]:
    """Return the floors of a file. Raises InvalidInput for one of a workload that no run measures."""
    from ckptstore.tools.bench.figures.floors import read_floors
    from ckptstore.tools.bench.run import has_ratios

    floors = read_floors(path)
    unknown = sorted({floor["workload"] for floor in floors if not has_ratios(floor["workload"])})
    if unknown:
        raise InvalidInput(f"{path} has floors of {', '.join(unknown)}, of which no run has ratios")
    return floors


def _check(report: Report, floors: Sequence[Mapping[str, Any]], *, quiet: bool) -> None:
    from ckptstore.tools.bench.figures.floors import check

    verdicts = check(report, floors)
    for verdict in verdicts:
        if not quiet or not verdict.holds:
            click.echo(str(verdict), err=not verdict.holds)
    if not verdicts:
        click.echo("BELOW: the file has no floor of what was measured", err=True)
    if not verdicts or not all(verdict.holds for verdict in verdicts):
        raise SystemExit(_BELOW_FLOOR)


def _compare(files: tuple[Path, ...], json_path: str | None) -> None:
    from ckptstore.tools.bench.figures.compare import compare
    from ckptstore.tools.bench.figures.report import Report

    if len(files) != 2:
        raise click.UsageError("compare takes two files")
    reports = []
    for path in files:
        try:
            reports.append(Report.from_json(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(f"{path} is no report of ckptstore bench: {error!r}") from error
    found = compare(*reports)
    if json_path is not None:
        _write_json(found.to_json(), json_path)
        if json_path == "-":
            return
    for line in found.differences:
        click.echo(f"differs: {line}")
    columns: list[Column] = ["workload", "contender", ("before", lambda change: f"{change.before_seconds:.4f}")]
    columns += [("after", lambda change: f"{change.after_seconds:.4f}")]
    columns += [("speed-up", lambda change: f"{change.speedup:.2f}"), ("p", lambda change: f"{change.p_value:.3f}")]
    nothing = ["the reports have nothing in common that was measured in both, of the same size and ranks"]
    click.echo("\n".join(table(found.changes, *columns, "verdict") or nothing))
