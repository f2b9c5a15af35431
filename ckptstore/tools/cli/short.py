"""Commands that give one short answer: fields with --json, else a few lines for people."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import checkpoint_json, print_json

Answer = tuple[dict[str, Any], str]
"""The fields, and the lines."""


def short_command(*parameters: Callable[[Any], Any]) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command, with these parameters and the options of all commands, of a function that returns its answer."""

    def decorate(answer: Callable[..., Answer]) -> click.Command:
        @wraps(answer)
        def command(*, as_json: bool, **given: Any) -> None:
            fields, lines = answer(**given)
            if as_json:
                print_json(**fields)
            else:
                click.echo(lines)

        decorated: Any = command
        for decorator in reversed((*parameters, storage_option, as_json)):
            decorated = decorator(decorated)
        return click.command()(decorated)

    return decorate


def where(checkpoint: Checkpoint) -> Answer:
    """The answer that is a checkpoint."""
    return {"checkpoint": checkpoint_json(checkpoint)}, checkpoint.uri
