"""The command line. The module of a command is loaded when it is called; every error has its exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import keyword
import os
import re
import sys
from importlib import import_module
from typing import Any

import click

from ckptstore import __version__
from ckptstore.errors import CkptstoreError
from ckptstore.runtime.extras import not_installed
from ckptstore.runtime.near import meant, nearest
from ckptstore.runtime.shown import printable

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "Look": {
        "ls": ("looking", "list", "dir", "ll"),
        "show": ("looking", "info", "cat", "inspect", "describe"),
        "watch": ("watch", "status", "tail", "top", "monitor"),
        "latest": ("looking",),
        "best": ("looking",),
        "diff": ("looking", "compare", "cmp"),
        "report": ("report",),
        "serve": ("report",),
    },
    "Copy": {
        "cp": ("exchange", "copy", "mirror", "sync", "upload", "download"),
        "export": ("exchange", "convert", "save"),
        "import": ("exchange", "load", "add"),
        "merge": ("exchange", "average", "soup"),
        "publish": ("publication",),
        "pull": ("publication",),
        "restore-folder": ("agent",),
    },
    "Care": {
        "verify": ("checking", "check", "fsck", "validate"),
        "check-load": ("checking",),
        "doctor": ("checking",),
        "annotate": ("changing",),
        "pin": ("changing",),
        "unpin": ("changing",),
        "rollback": ("changing", "revert", "reset"),
        "restore": ("changing", "undelete", "undo"),
        "rm": ("changing", "delete", "remove", "del"),
        "thin": ("changing", "slim", "drop", "strip", "shrink"),
        "prune": ("changing", "clean"),
        "gc": ("changing",),
        "fast": ("fast",),
    },
    "Run": {
        "run": ("agent",),
        "watch-folder": ("agent",),
        "follow": ("agent", "each", "foreach", "evaluate", "on-commit"),
        "demo": ("trying",),
        "s3-test": ("trying",),
    },
    "Measure": {"bench": ("bench",)},
}
"""The commands, in the order of the help: the module of each, and words that people try for it. The command is a
function of its module, with an underscore for a hyphen and behind a word of Python."""

COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items()}

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""The errors of a write to stdout when it is a file on a full or broken disk."""


class Commands(click.Group):
    """Loads a command when it is called, and turns errors into messages and exit codes."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments. Raises UsageError, with a suggestion, for one that does not exist."""
        name = args[0].lower()
        if args[0] not in COMMANDS and not name.startswith("-"):
            other = next((command for command, (_, *words) in COMMANDS.items() if name in words), None)
            ctx.fail(f"There is no command {args[0]!r}{meant(other or nearest(name, COMMANDS))}")
        return super().resolve_command(ctx, [args[0], *_with_each_rule(args[1:])])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, by group."""
        width = max(map(len, COMMANDS))
        for group, names in GROUPS.items():
            with formatter.section(group):
                commands = [(name.ljust(width), self.get_command(ctx, name)) for name in names]
                formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in commands if command])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command, None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_") + "_" * keyword.iskeyword(cmd_name)
        module = import_module(f"ckptstore.tools.cli.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember whether errors are to be JSON, those of the words themselves included."""
        ctx.obj = {"as_json": "--json" in itertools.takewhile(lambda word: word != "--", args)}
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _echo_error(ctx, code="usage", message=error.format_message())
            raise

    def main(self, *args: Any, **options: Any) -> Any:
        """Run from the words of the command line. Output that finds no space is one error, not a traceback; a pipe that
        nobody reads is none."""
        _print_any_name()
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in UNWRITABLE or error.filename is not None or isinstance(error, CkptstoreError):
                raise
            _discard_stdout()
            click.echo(f"error: The output could not be written: {error.strerror}", err=True)
            sys.exit(CkptstoreError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was called."""
        try:
            return super().invoke(ctx)
        except (CkptstoreError, ModuleNotFoundError) as raised:
            error = raised if isinstance(raised, CkptstoreError) else not_installed(raised)
            if error is None:
                raise
            error = _with_flags(error, self.get_command(ctx, ctx.invoked_subcommand or ""))
            _echo_error(ctx, **error.to_wire())
            click.echo("\n".join(map(printable, f"error: {error}".split("\n"))), err=True)
            ctx.exit(error.exit_code)
        except click.UsageError as error:  # click says it on stderr, with the usage
            if isinstance(error, click.NoSuchOption) and error.option_name == "--step":
                said = f"{error.format_message()} A step is written behind the store: STORE@1"
                error = click.UsageError(said, error.ctx)
            _echo_error(ctx, code="usage", message=error.format_message())
            raise error from None
        except KeyboardInterrupt:
            _echo_error(ctx, code="interrupted", message="interrupted", committed=None)
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


def _with_each_rule(words: list[str]) -> list[str]:
    """Return the words with a `--keep` before each rule: one is enough for several that follow each other."""
    found: list[str] = []
    end = words.index("--") if "--" in words else len(words)
    for word in words[:end]:
        if _RULE.match(word) and (found[-2:-1] == ["--keep"] or (found[-1:] and found[-1].startswith("--keep="))):
            found.append("--keep")
        found.append(word)
    return found + words[end:]


def _print_any_name() -> None:
    """Let stdout take each name that a file may have, as its bytes; in an encoding that lacks a character, escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _discard_stdout() -> None:
    """Drop what is still buffered: Python would write it at exit and fail again, with a code of its own."""
    with contextlib.suppress(OSError, ValueError):  # it is no file of the system
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _echo_error(ctx: click.Context, **error: Any) -> None:
    """Print an error as JSON, if that is what the command is to print."""
    if ctx.obj["as_json"]:
        click.echo(json.dumps({"version": 1, "error": {"committed": False, **error}}, indent=2))


_RULE = re.compile(r"(?:weights:)?(?:latest|best|every|since|within)=")
_SAY_MODE = 'Say mode="min" or mode="max"'
_FLAGS = {
    r"exists=['\"]replace['\"]": "--replace",
    r"\ballow_pickle=True(?: \(--allow-pickle\))?": "--allow-pickle",
    r"\bstorage_options\b": "--storage-option",
    r"\bgrace_seconds\b": "--grace",
    r"\bshard_size_bytes\b": "--shard-size",
    r"\brename\b(?!=)": "--rename",
    r"\binclude\b(?!=)": "--include",
    r"\boverwrite it\b": "give --overwrite",
    _SAY_MODE: "Give --mode min or --mode max",
}
"""Names of arguments of Python in errors, each with its flag."""


def _with_flags(error: CkptstoreError, command: click.Command | None) -> CkptstoreError:
    """Return the error with flags in place of arguments, as far as the command has them."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    known = {flag for item in (command, *inner) if item is not None for param in item.params for flag in param.opts}
    for pattern, words in _FLAGS.items():
        if known & set(words.split()):
            error.message = re.sub(pattern, words, error.message)
            error.hint = error.hint and re.sub(pattern, words, error.hint)
    error.hint = error.hint and error.hint.replace(_SAY_MODE, "Write STORE@best:METRIC:min or STORE@best:METRIC:max")
    return error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ckptstore")
def main() -> None:
    """Look at checkpoints, copy them and take care of them.

    \b
    STORE   the directory or bucket prefix of one training run: runs/digits,
            s3://bucket/digits, gs://, az:// or any fsspec URL.
    TARGET  one checkpoint: STORE@12000 (a step), STORE@latest,
            STORE@best:eval_loss, or the URI that `latest` prints.
    """
