"""`ckptstore check-load`: would the code of today load this checkpoint. Reads the index, and no tensor."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any, Literal

import click

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.loading.load_report import LoadCheck
from ckptstore.runtime.extras import needs
from ckptstore.runtime.near import meant, nearest
from ckptstore.runtime.shown import printable
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import opened_checkpoint

DIFFERS = 1
"""The exit code if it does not fit."""
_MOST_SHOWN = 20


@click.command()
@click.argument("function", metavar="MODULE:FUNCTION")
@click.argument("target", type=TARGET)
@click.option(
    "--name", default="model", show_default=True, metavar="NAME", help="Name in the state of a module that is returned."
)
@click.option("--include", multiple=True, metavar="PATTERN", help='Look only at keys like "model.*"; repeatable.')
@click.option("--no-strict", is_flag=True, help="Allow keys that one side lacks, as a load with strict=False.")
@click.option(
    "--dtype",
    type=click.Choice(["same", "state"]),
    default="same",
    show_default=True,
    help="With state, floating-point tensors are cast, as in a load.",
)
@storage_option
@as_json
def command(
    function: str,
    target: str,
    name: str,
    include: tuple[str, ...],
    no_strict: bool,
    dtype: Literal["same", "state"],
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Find out if the checkpoint TARGET fits what FUNCTION builds.

    FUNCTION is called without arguments, with the meta device as torch's default, so that its tensors take no memory;
    it is imported from MODULE, in this directory or installed. It returns a module, or the state as it is given to
    save. What a load would miss, leave out, cast or refuse is listed, with keys that may have been renamed. No tensor
    is read.

    Exit codes: 0 if a load would succeed, 1 if not.
    """
    needs("torch")
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        build = _function(function)
        with opened_checkpoint(target, storage_options) as checkpoint:
            from ckptstore.state.live.module_load import on_meta

            state = on_meta(build, name)
            check = checkpoint.check_load(state, include=include or None, strict=not no_strict, dtype=dtype)
            uri = checkpoint.uri
    if as_json:
        print_json(uri=uri, fits=check.fits, **asdict(check))
    else:
        _print(check)
    click.get_current_context().exit(0 if check.fits else DIFFERS)


def _function(text: str) -> Callable[[], Any]:
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise click.UsageError(f"{text!r} is not like package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except CkptstoreError:
        raise
    except (Exception, SystemExit) as error:  # which would end the command, perhaps with 0
        raise InvalidInput(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        inner = getattr(found, part, None)
        if inner is None:
            raise InvalidInput(f"{module} has no {name}{meant(nearest(part, dir(found)))}")
        found = inner
    if not callable(found):
        raise InvalidInput(f"{text} is a {type(found).__name__}, not a function")
    build: Callable[[], Any] = found
    return build


def _print(check: LoadCheck) -> None:
    click.echo(f"step {check.step} {'fits' if check.fits else 'does not fit'}")
    renamed = {key: f"{key}, perhaps {other} in the checkpoint" for key, other in check.renamed.items()}
    parts = {
        "differ": [f"{key} {how}" for key, how in check.differing.items()],
        "missing in the checkpoint": [renamed.get(key, key) for key in check.missing],
        "without a place in the state": list(check.unexpected),
        "cast": [f"{key} from {how}" for key, how in check.cast.items()],
        "of the checkpoint not named by the state": list(check.left_out),
    }
    for title, lines in parts.items():
        if lines:
            click.echo(f"{len(lines)} {title}:")
        for line in lines[:_MOST_SHOWN]:
            click.echo(f"  {printable(line)}")
        if len(lines) > _MOST_SHOWN:
            click.echo(f"  and {len(lines) - _MOST_SHOWN} more, which --json lists")
    if check.num_tied:
        click.echo(f"{check.num_tied} tied tensors are stored apart: a load compares them, this command does not")
