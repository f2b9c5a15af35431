"""`ckptstore bench`: ckptstore beside its peers and the limits of this machine or bucket."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.errors import InvalidInput
from ckptstore.runtime.extras import install_line
from ckptstore.tools.cli.kinds import SIZE
from ckptstore.tools.cli.options import storage_option
from ckptstore.tools.cli.output import echo_table, redacted_command_line
from ckptstore.tools.cli.terminal import counting

if TYPE_CHECKING:
    from ckptstore.tools.bench.figures.report import Options, Report, Workload

_WORKLOADS = ("save", "load", "async", "directory", "node-cache", "tier", "ranks", "ls", "gpu")
_SHAPES = ("tensors", "llama-1b", "llama-8b", "llama-70b", "llama-405b", "files")
_SIZE_BYTES = 2 << 30
_BELOW_FLOOR = 1


def _whole(_ctx: click.Context, _param: click.Parameter, size_bytes: float | None) -> int | None:
    return None if size_bytes is None else int(size_bytes)


@click.command()
@click.argument("what", type=click.Choice([*_WORKLOADS, "all", "readme", "compare"]), default="all")
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--to",
    metavar="PLACE",
    show_default="temporary directory",
    help="Where to write: a path, a URI, or S3 in memory: s3-test, s3-sink; with -tls at the end, over HTTPS.",
)
@click.option(
    "--size",
    type=SIZE,
    callback=_whole,
    metavar="SIZE",
    show_default="2GiB",
    help="Size of the state over all ranks.",
)
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of a Llama model to save, instead of --size.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of processes; of the workload tier, on each node.",
)
@click.option(
    "--shape", type=click.Choice(_SHAPES), default="llama-8b", show_default=True, help="Tensors or files to save."
)
@click.option(
    "--tensor-size",
    type=SIZE,
    callback=_whole,
    metavar="SIZE",
    show_default="16MiB",
    help="Size of each tensor of --shape tensors.",
)
@click.option(
    "--peers",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="Peers to measure: all, none, or names such as dcp,ray,torch.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Number of timed runs of each peer.",
)
@click.option("--durable/--no-durable", default=True, show_default=True, help="Let every peer call fsync, or none.")
@click.option("--drop-caches", is_flag=True, help="Load from the disk instead of the page cache; needs root.")
@click.option(
    "--pause-seconds",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    metavar="S",
    help="Seconds without work before each timed run, as in a training.",
)
@click.option(
    "--max-ranks",
    type=click.IntRange(64),
    default=16384,
    show_default=True,
    metavar="N",
    help="Largest number of simulated ranks.",
)
@click.option(
    "--latency-ms",
    type=click.FloatRange(0),
    metavar="MS",
    show_default="0, for tier 30, in simulations 5",
    help="Latency of the S3 test server and of simulated requests, in ms.",
)
@click.option(
    "--bandwidth-mb",
    type=click.FloatRange(0, min_open=True),
    metavar="MB",
    show_default="no limit, for tier 200",
    help="Bandwidth of the S3 test server each way, in MB/s.",
)
@click.option("--json", "json_path", metavar="FILE", help="Write the report to FILE, or to stdout if it is -.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    show_default="cuda",
    help="Device of the workload gpu; cpu is a rehearsal.",
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page with charts to FILE."
)
@click.option(
    "--floors",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Exit with 1 if a ratio is below its floor in FILE.",
)
@storage_option
def command(what: str, files: tuple[Path, ...], json_path: str | None, **given: Any) -> None:
    """Measure ckptstore, its peers and the limit of the hardware.

    WHAT is a workload, "all", "readme" for the table of the README, or "compare" with two FILES that --json wrote.
    Nothing that exists is touched: everything is written below a new prefix, and removed. Needs the extra "bench".
    The exit code is 1 if a ratio is below its floor.
    """
    if what == "compare":
        _refuse_settings(what, given)
        _check_writable(json_path)
        _compare(files, json_path)
        return
    if files:
        raise click.UsageError("FILES go with compare alone")
    html, floors = given.pop("html"), given.pop("floors")
    if what == "readme":
        _refuse_settings(what, given)
    _check_writable(json_path, html)  # what was measured for hours would be lost
    wanted = None if floors is None else _wanted(floors)
    report = _measure(what, given)
    if json_path != "-":
        _echo(report)
    _write(report, json_path, html)
    if wanted is not None:
        _check(report, wanted, quiet=json_path == "-")


def _refuse_settings(what: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for an option of a measurement: "compare" makes none, and that of "readme" is fixed."""
    context = click.get_current_context()
    for name in settings:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = name.removesuffix("s") if name == "storage_options" else name
            why = "whose settings are fixed" if what == "readme" else "which measures nothing"
            raise click.UsageError(f"--{option.replace('_', '-')} does not go with {what}, {why}")


def _check_writable(*paths: str | Path | None) -> None:
    """Raise InvalidInput for a file that cannot be written; "-" is the standard output."""
    for path in (Path(path) for path in paths if path not in (None, "-")):
        place = path if path.exists() else path.parent
        if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
            raise InvalidInput(f"{path} cannot be written", hint="Give a file in a directory that exists")


def _measure(what: str, given: dict[str, Any]) -> Report:
    try:
        from ckptstore.tools.bench import claims
        from ckptstore.tools.bench.run import run
    except ImportError as error:
        raise InvalidInput(f"the benchmark needs {error.name}", hint=f"Install it{install_line('bench')}") from error

    def measured(options: Options) -> Report:
        storage_options, line = given["storage_options"], redacted_command_line()
        return run(options, storage_options=storage_options, command=line, show=show)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was written is removed then too
    try:
        with counting() as show:
            return claims.measure(options_of, measured) if what == "readme" else measured(_options(what, given))
    finally:
        signal.signal(signal.SIGTERM, before)


def options_of(words: Sequence[str]) -> Options:
    """Return what a command line requests, the words after `ckptstore bench`."""
    settings = dict(command.make_context("bench", [*words]).params)
    return _options(settings.pop("what"), settings)


def _options(what: str, settings: Mapping[str, Any]) -> Options:
    from ckptstore.tools.bench.destination import is_disk
    from ckptstore.tools.bench.figures.report import Options
    from ckptstore.tools.bench.peers.registry import FAMILIES

    peers = tuple(settings["peers"].split(","))
    unknown = sorted({*peers} - {*FAMILIES, "all", "none"})
    if unknown:
        raise InvalidInput(f"--peers does not know {', '.join(unknown)}", hint=f"all, none, or {', '.join(FAMILIES)}")
    if len(peers) > 1 and {*peers} & {"all", "none"}:
        raise InvalidInput(f"--peers {settings['peers']} contradicts itself", hint="Give all, none, or names")
    if settings["scale"] is not None and settings["size"] is not None:
        raise InvalidInput("--size has no effect beside --scale", hint="Give one of them")

    def possible(name: str) -> bool:
        return name != "gpu" and (name != "tier" or is_disk(settings["to"]))

    return Options(
        workloads=tuple(name for name in _WORKLOADS if what == name or (what == "all" and possible(name))),
        to=settings["to"],
        size_bytes=_SIZE_BYTES if settings["size"] is None else settings["size"],
        scale=settings["scale"],
        ranks=settings["ranks"],
        shape=settings["shape"],
        tensor_bytes=settings["tensor_size"],
        peers=peers,
        repeat=settings["repeat"],
        durable=settings["durable"],
        drop_caches=settings["drop_caches"],
        pause_seconds=settings["pause_seconds"],
        max_ranks=settings["max_ranks"],
        device="cuda" if settings["device"] is None and what == "gpu" else settings["device"],
        latency_seconds=None if settings["latency_ms"] is None else settings["latency_ms"] / 1000,
        bytes_per_second=None if settings["bandwidth_mb"] is None else settings["bandwidth_mb"] * 1e6,
    )


def _echo(report: Report) -> None:
    from ckptstore.tools.bench.figures import text

    if report.asked.get("device"):
        click.echo(text.markdown(report), nl=False)
        return
    for line in text.report_lines(report):
        click.echo(line)
    for workload in report.workloads:
        echo_workload(workload)
    if "claims" in report.asked:
        click.echo("\nThe lines of the README")
        echo_table(text.CLAIM_HEADERS, [text.claim(workload) for workload in report.workloads])
    lines = text.scaling_lines(report.scaling)
    if lines:
        click.echo("\nGrowth")
    for line in lines:
        click.echo(f"  {line}")
    click.echo(f"\n{text.LEGEND}")


def echo_workload(workload: Workload) -> None:
    """Its table, its facts, and who is not in it."""
    from ckptstore.tools.bench.figures import text

    click.echo(f"\n{text.heading(workload)}")
    found = text.rows(workload)
    if found:
        echo_table(text.HEADERS, found)
    for line in [*text.facts(workload), *text.absent(workload)]:
        click.echo(f"  {line}")


def _write(report: Report, json_path: str | None, html: Path | None) -> None:
    if json_path is not None:
        _write_json(report.to_json(), json_path)
    if html is not None:
        from ckptstore.tools.bench.figures.page import page

        html.write_text(page(report))


def _write_json(value: dict[str, Any], path: str) -> None:
    text = json.dumps(value, indent=1)
    if path == "-":
        click.echo(text)
    else:
        Path(path).write_text(text + "\n")


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
    shown = [
        [
            change.workload,
            change.contender,
            f"{change.before_seconds:.4f}",
            f"{change.after_seconds:.4f}",
            f"{change.speedup:.2f}",
            f"{change.p_value:.3f}",
            change.verdict,
        ]
        for change in found.changes
    ]
    if shown:
        echo_table(("workload", "contender", "before", "after", "speed-up", "p", "verdict"), shown)
    else:
        click.echo("the reports have nothing in common that was measured in both, of the same size and ranks")
