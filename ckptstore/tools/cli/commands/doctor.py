"""`ckptstore doctor`: whether a place is fit for a store."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.doctor.examination import Examination, examine


@click.command()
@click.argument("uri")
@click.option("--engine", type=click.Choice(["obstore", "fsspec"]), help="Use this engine, or fail.")
@click.option("--fast", "fast_path", metavar="DIR", help="Examine DIR for fast checkpoints on this node too.")
@storage_option
@as_json
def command(
    uri: str, engine: str | None, fast_path: str | None, storage_options: dict[str, Any], as_json: bool
) -> None:
    """Try everything that a store at URI needs: permissions, conditional creates, clocks, speed, locks, the log.

    Of a run of Ray Train it says too whether Ray's own list of checkpoints is whole.

    With --fast: whether DIR is private, its file system, room, locks and speed, what lies there, and how far the store
    is behind it.

    Writes some 30 MiB below probe/, and 32 MiB below DIR, and removes them again. The exit code is 0, also with
    warnings, or that of the first thing that failed.
    """
    found = examine(uri, storage_options=storage_options, engine=engine, fast_directory=fast_path)
    if as_json:
        fields = ("name", "status", "detail", "hint", "code")
        findings = [{name: getattr(finding, name) for name in fields} for finding in found.findings]
        print_json(uri=found.uri, engine=found.engine, ok=found.ok, findings=findings)
    else:
        _echo(found)
    raise SystemExit(found.exit_code)


def _echo(found: Examination) -> None:
    width = max(len(finding.name) for finding in found.findings)
    for finding in found.findings:
        click.echo(f"{finding.status:8} {finding.name.ljust(width)}  {finding.detail}")
        if finding.hint and finding.status != "ok":
            click.echo(f"{'':8} {'':{width}}  {finding.hint}")
