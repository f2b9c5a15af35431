"""`ckptstore doctor`: whether a place is fit for a store."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

import click

from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.terminal import is_terminal
from ckptstore.tools.doctor.examination import Examination, examine


@click.command()
@click.argument("uri")
@click.option("--engine", type=click.Choice(["obstore", "sdk", "fsspec"]), help="Use this storage engine, or fail.")
@click.option("--fast", "fast_path", metavar="DIR", help="Check DIR for fast checkpoints on this node, too.")
@storage_option
@as_json
def command(
    uri: str, engine: str | None, fast_path: str | None, storage_options: dict[str, Any], as_json: bool
) -> None:
    """Check whether a store can be used at URI, and is intact.

    Tries what a store needs: permissions, conditional creates, clocks, speed, locks. Of a store that is there, checks
    the log, and that all files of the live checkpoints exist with their sizes; the bytes are read by `ckptstore verify
    --all`. For a run of Ray Train, also checks Ray's own list of checkpoints.

    With --fast, also checks whether DIR is private, its file system, free space, locks and speed, its checkpoints, and
    how far the store is behind them.

    Writes about 30 MiB below probe/, and 32 MiB below DIR, and removes them again. The exit code is 0 if nothing
    failed, even with warnings, else that of the first failure.
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
    columns = max(60, shutil.get_terminal_size().columns) if is_terminal(sys.stdout) else 10**6
    below = " " * (width + 11)
    for finding in found.findings:
        text = f"{finding.status:8} {finding.name.ljust(width)}  {finding.detail}"
        for line in text.splitlines():
            click.echo(textwrap.fill(line, columns, subsequent_indent=below, break_long_words=False))
        if finding.hint and finding.status != "ok":
            click.echo(f"{below}{finding.hint}")  # not folded: it may be a command to copy
