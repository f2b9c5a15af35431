"""`ckptstore verify`: what is stored against what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput
from ckptstore.format.entry import Thinning
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.loading.verify import Fault, Problem, VerifyReport, parse_sample
from ckptstore.runtime.shown import printable, show_size
from ckptstore.store import CheckpointStore
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, engine_option, opened_executor, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.ray_runs import checkpoints_of_ray
from ckptstore.tools.cli.targets import find_target, opened_checkpoint, opened_store
from ckptstore.tools.cli.terminal import progress


@click.command()
@click.argument("target", type=TARGET)
@click.option("--sample", metavar="SHARE", help="Read a random share of the files, such as 5%; check the size of all.")
@click.option("--all", "every", is_flag=True, help="Check all checkpoints of STORE, and its log.")
@engine_option
@storage_option
@as_json
def command(
    target: str, sample: str | None, every: bool, engine: str, storage_options: dict[str, Any], as_json: bool
) -> None:
    """Check every byte of a checkpoint against its digests.

    For a store without a step, that is its latest checkpoint. Files that are missing, truncated, flipped, swapped or
    extra are named, and the exit code is 3, that of checkpoint-damaged. With --sample the presence and size of every
    file are still checked. With --all one that is damaged keeps no other from being checked.
    """
    parse_sample(sample)
    reports: list[tuple[str, VerifyReport]] = []
    with opened_executor(engine) as executor, _chosen(target, every, storage_options, reports) as (checkpoints, store):
        log_problems = [] if store is None else store.verify_log()
        if not as_json:
            for uri, report in reports:
                _echo(uri, report)
        for checkpoint in checkpoints:
            total = checkpoint.size_bytes if sample is None else None
            try:
                with progress(f"step {checkpoint.step}", total_bytes=total, quiet=as_json):
                    report = checkpoint.verify(sample=sample, executor=executor)
            except CheckpointGone:
                if store is None:
                    raise
                if not _is_live(store, checkpoint):
                    click.echo(f"left out: step {checkpoint.step}: it was removed meanwhile", err=True)
                    continue
                report = _unopened(checkpoint.step, "missing", "nothing")
            reports.append((checkpoint.uri, report))
            if not as_json:
                _echo(f"step {checkpoint.step}", report, checkpoint.thinned)
    is_ok = not log_problems and all(report.ok for _, report in reports)
    if as_json:
        print_json(ok=is_ok, reports=[_to_json(uri, report) for uri, report in reports], log_problems=log_problems)
    else:
        if not reports:
            click.echo("no checkpoints")
        for problem in [] if store is None else log_problems or ["ok"]:
            click.echo(f"log: {printable(problem)}")
    if not is_ok:
        raise click.exceptions.Exit(CheckpointDamaged.exit_code)


@contextmanager
def _chosen(
    target: str, every: bool, storage_options: dict[str, Any], reports: list[tuple[str, VerifyReport]]
) -> Iterator[tuple[list[Checkpoint], CheckpointStore | None]]:
    """Yield the checkpoints to verify, and the store whose log is to be checked too, if there is one. Those of a run
    that Ray keeps which cannot be opened have their report already."""

    def report(uri: str, error: CheckpointDamaged) -> None:
        reports.append((uri, _unopened(error.step, "manifest", error.message)))

    if not every:
        with opened_checkpoint(target, storage_options) as checkpoint:
            yield [checkpoint], None
        return
    named = find_target(target, storage_options)
    if named.step is not None:
        raise InvalidInput(
            f"--all checks a whole store, and {target} names a checkpoint",
            hint=f"Write `ckptstore verify {target}`, or `ckptstore verify --all {named.uri}`",
        )
    with opened_store(target, storage_options) as store:
        of_ray = checkpoints_of_ray(store, storage_options, damaged=report)
        yield (_recorded(store), store) if of_ray is None else (of_ray, None)


def _recorded(store: CheckpointStore) -> list[Checkpoint]:
    """Return the live checkpoints whose records can be read: the faults of others are those of the log."""
    job = job_of(store)
    try:
        newest = job.log.newest()
    except CheckpointDamaged:
        return []
    found = job.log.found(newest.state.in_order()) if newest else []
    return [Checkpoint(files_of(job, record)) for record in found if isinstance(record, Record)]


def _is_live(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    newest = job_of(store).log.newest()
    return newest is not None and checkpoint.number in newest.state.live


def _unopened(step: int | None, fault: Fault, found: str) -> VerifyReport:
    """Return the report of a checkpoint whose manifest cannot be read."""
    problem = Problem(file=MANIFEST_NAME, fault=fault, rank=None, expected="the committed one", found=found)
    return VerifyReport(step=step, num_files=0, num_read=0, read_bytes=0, num_without_digest=0, problems=(problem,))


def _echo(name: str, report: VerifyReport, thinned: Thinning | None = None) -> None:
    read = f"{report.num_read} of {report.num_files} files read, {show_size(report.read_bytes)}"
    linked = f", {report.num_without_digest} linked without a digest" if report.num_without_digest else ""
    without = f", thinned: without {', '.join(thinned.dropped)}" if thinned else ""
    click.echo(printable(f"{name}: {'ok' if report.ok else 'DAMAGED'}, {read}{linked}{without}"))
    for problem in report.problems:
        click.echo(printable(f"  {problem}"))


def _to_json(uri: str, report: VerifyReport) -> dict[str, Any]:
    return {"uri": uri, "ok": report.ok, **asdict(report)}
