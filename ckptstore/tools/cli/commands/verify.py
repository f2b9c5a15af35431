"""`ckptstore verify`: what is stored against what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointDamaged
from ckptstore.loading.verify import VerifyReport, parse_sample
from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, engine_option, opened_executor, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.ray_runs import checkpoints_of_ray
from ckptstore.tools.cli.targets import opened_checkpoint, opened_store
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
    file are still checked.
    """
    parse_sample(sample)
    reports = []
    with opened_executor(engine) as executor, _chosen(target, every, storage_options) as (checkpoints, log_problems):
        for checkpoint in checkpoints:
            total = checkpoint.size_bytes if sample is None else None
            with progress(f"step {checkpoint.step}", total_bytes=total, quiet=as_json):
                report = checkpoint.verify(sample=sample, executor=executor)
            reports.append((checkpoint, report))
            if not as_json:
                _echo(checkpoint, report)
    is_ok = not log_problems and all(report.ok for _, report in reports)
    if as_json:
        whole = [_to_json(checkpoint, report) for checkpoint, report in reports]
        print_json(ok=is_ok, reports=whole, log_problems=log_problems)
    else:
        for problem in log_problems:
            click.echo(f"log: {problem}")
    if not is_ok:
        raise click.exceptions.Exit(CheckpointDamaged.exit_code)


@contextmanager
def _chosen(target: str, every: bool, storage_options: dict[str, Any]) -> Iterator[tuple[list[Checkpoint], list[str]]]:
    """Yield the checkpoints to verify, and what is wrong with the log if it is to be checked too."""
    if every:
        with opened_store(target, storage_options) as store:
            yield list(store) or checkpoints_of_ray(store, storage_options), store.verify_log()
    else:
        with opened_checkpoint(target, storage_options) as checkpoint:
            yield [checkpoint], []


def _echo(checkpoint: Checkpoint, report: VerifyReport) -> None:
    read = f"{report.num_read} of {report.num_files} files read, {show_size(report.read_bytes)}"
    linked = f", {report.num_without_digest} linked without a digest" if report.num_without_digest else ""
    thinned = f", thinned: without {', '.join(checkpoint.thinned.dropped)}" if checkpoint.thinned else ""
    click.echo(f"step {checkpoint.step}: {'ok' if report.ok else 'DAMAGED'}, {read}{linked}{thinned}")
    for problem in report.problems:
        click.echo(f"  {problem}")


def _to_json(checkpoint: Checkpoint, report: VerifyReport) -> dict[str, Any]:
    return {"uri": checkpoint.uri, "ok": report.ok, **asdict(report)}
