"""The command line. A command is a module of this package, loaded when it is called; every error has its exit code."""

from __future__ import annotations

import json
import keyword
from importlib import import_module
from typing import Any

import click

from ckptstore import __version__
from ckptstore.errors import CkptstoreError

COMMANDS = (
    "ls",
    "show",
    "latest",
    "best",
    "verify",
    "diff",
    "cp",
    "export",
    "import",
    "pin",
    "unpin",
    "rollback",
    "prune",
    "gc",
    "doctor",
    "bench",
    "demo",
)
"""In the order of the help. The module of a command has its name, with an underscore behind words of Python, and
`command` in it."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


class Commands(click.Group):
    """Loads a command when it is asked for, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command, None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ckptstore.cli.commands.{_module_name(cmd_name)}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except CkptstoreError as error:
            if ctx.ensure_object(dict).get("as_json"):
                click.echo(json.dumps({"version": 1, "error": error.to_wire()}, indent=2))
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


def _module_name(command: str) -> str:
    return f"{command}_" if keyword.iskeyword(command) else command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ckptstore")
def main() -> None:
    """Look at stores of checkpoints, and take care of them.

    STORE is the root of a training run: a path, s3://, gs://, az:// or any fsspec URL. TARGET is STORE@12000 for the
    checkpoint of a step, STORE@latest, or the URI of a checkpoint directory that lies on its own.
    """
