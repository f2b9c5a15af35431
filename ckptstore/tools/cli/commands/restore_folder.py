"""`ckptstore restore-folder`: bring a checkpoint back to the folder that it was saved from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import opened_store
from ckptstore.tools.run.folders import Folder, RestoreReport, Rules, newest_first, restore_folder


@click.command(name="restore-folder")
@click.argument("store", type=STORE)
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--step", type=int, metavar="N", help="Restore this step, and no other one if it is damaged.")
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="GLOB",
    help="Names of checkpoints of an unknown project, as for `run`; repeatable.",
)
@click.option("--marker", metavar="NAME", help="Name of the file that is written last, as for `run`.")
@storage_option
@as_json
def command(
    store: str,
    folder: str,
    step: int | None,
    patterns: tuple[str, ...],
    marker: str | None,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Put the newest intact checkpoint of STORE into FOLDER.

    For checkpoints that `run` or `watch-folder` has stored: they return to where the trainer wrote them. Nothing is
    restored if FOLDER has a newer checkpoint that is finished; with --step, newer ones are moved out of FOLDER instead.
    Files that are there already are not downloaded again. No trainer may write to FOLDER meanwhile.
    """
    rules = Rules(patterns=patterns, marker=marker)
    with opened_store(store, storage_options) as opened:
        report = restore_folder(Folder(folder, rules), newest_first(opened, step), keeps_newer=step is None)
    if as_json:
        print_json(restored=None if report is None else asdict(report))
        return
    for line in report_lines(report):
        click.echo(line)


def report_lines(report: RestoreReport | None) -> list[str]:
    """Return a report in words."""
    if report is None:
        return ["the store has no checkpoint: nothing is restored"]
    lines = [f"passed over: {why}" for why in report.skipped]
    lines += [f"moved aside: {what}" for what in report.moved_aside]
    if not report.is_restored:
        return [*lines, f"step {report.step} is not restored: {report.why_not}"]
    sizes = f"{report.fetched_bytes:,} bytes fetched, {report.kept_bytes:,} were there"
    name = report.name if report.best is None else f"{report.name}, with {report.best}"
    return [*lines, f"step {report.step} is restored as {name}: {sizes}"]
