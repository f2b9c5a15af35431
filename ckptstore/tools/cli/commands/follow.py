"""`ckptstore follow`: a command for each checkpoint, once it is committed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.events import emit
from ckptstore.opening import open_store
from ckptstore.runtime.near import nearest
from ckptstore.tools.cli.agent_options import logged_events
from ckptstore.tools.cli.kinds import DURATION, STORE
from ckptstore.tools.cli.options import storage_option
from ckptstore.tools.cli.output import checkpoint_json, print_json_line
from ckptstore.tools.run.notices import CommandEnded
from ckptstore.tools.run.signals import ENDING, Signals
from ckptstore.tools.run.trainer import TrainerProcess, check_command

_TICK_SECONDS = 0.25
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
FIELDS = ("uri", "step", "number", "store")


@click.command()
@click.argument("store", type=STORE)
@click.option(
    "--after",
    metavar="STEP|latest",
    show_default="all that are live",
    help="Begin after this step, or with what comes from now on.",
)
@click.option("--latest-only", is_flag=True, help="Leave out checkpoints that have a later one when it is their turn.")
@click.option("--cursor", metavar="NAME|./FILE", help="Keep the place over restarts, in STORE or in a file.")
@click.option("--timeout", type=DURATION, metavar="TIME", help="End after so long without a new checkpoint.")
@click.option("--keep-going", is_flag=True, help="Go on with the next checkpoint after COMMAND has failed.")
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each checkpoint.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    store: str,
    after: str | None,
    latest_only: bool,
    cursor: str | None,
    timeout: float | None,
    keep_going: bool,
    storage_options: dict[str, Any],
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND for each checkpoint of STORE, in their order.

    Each checkpoint has its turn once, in the order of the commits, first those that are live, and none is deleted while
    COMMAND works on it. In its words {uri}, {step}, {number} and {store} are replaced; it finds the same in
    CKPTSTORE_FOLLOW_URI, ..._STEP, ..._NUMBER and ..._STORE. No shell reads them. Without COMMAND the URI of each
    checkpoint is printed.

    When COMMAND fails, its exit code is returned, and the cursor stays before this checkpoint; with --keep-going both
    go on. A storage that is away is waited for, and so is a store that does not exist yet.
    """
    if keep_going and not words:
        raise InvalidInput("--keep-going means nothing without a command", hint="Write the command after --")
    if words:
        check_command(words)
        _check_placeholders(words)
    options: dict[str, Any] = {"latest_only": latest_only, "cursor": cursor, "timeout_seconds": timeout}
    with (
        logged_events(as_json=as_json and bool(words), events_file=None),
        Signals() as signals,
        open_store(store, storage_options=storage_options, group="solo") as opened,
        closing(opened.follow(after=_after(after), **options)) as checkpoints,
    ):
        code = _run_each(checkpoints, words, opened.uri, signals, keep_going) if words else 0
        for checkpoint in checkpoints if not words else ():
            if as_json:
                print_json_line(checkpoint=checkpoint_json(checkpoint))
            else:
                click.echo(checkpoint.uri)
    click.get_current_context().exit(code)


def _after(text: str | None) -> Any:
    if text is None or text == "latest":
        return text
    if not text.isdecimal():
        raise click.UsageError(f"--after is {text!r}, it is a step or latest")
    return int(text)


def _check_placeholders(words: Sequence[str]) -> None:
    """Raise InvalidInput for a placeholder with a typing error; other braces belong to the command."""
    for name in {name for word in words for name in _PLACEHOLDER.findall(word)} - set(FIELDS):
        if (meant := nearest(name, FIELDS)) is not None:
            raise InvalidInput(f"{{{name}}} is no placeholder", hint=f"Did you mean {{{meant}}}?")


def _run_each(
    checkpoints: Iterator[Checkpoint], words: Sequence[str], store: str, signals: Signals, keep_going: bool
) -> int:
    """Run the command for each checkpoint, and return the exit code: that of the first failure, or 0."""
    for checkpoint in checkpoints:
        values = dict(zip(FIELDS, (checkpoint.uri, checkpoint.step, checkpoint.number, store), strict=True))
        started = time.monotonic()
        code, taken = _run(words, {name: str(value) for name, value in values.items()}, signals)
        seconds = time.monotonic() - started
        emit(CommandEnded(step=checkpoint.step, number=checkpoint.number, code=code, seconds=seconds))
        if taken is not None:
            return 128 + taken
        if code and not keep_going:
            return code
    return 0


def _run(words: Sequence[str], values: Mapping[str, str], signals: Signals) -> tuple[int, int | None]:
    """Run the command once. Return its exit code, and the signal that came meanwhile, which it got too."""
    filled = [_PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word) for word in words]
    variables = {f"CKPTSTORE_FOLLOW_{name.upper()}": value for name, value in values.items()}
    ended, taken = threading.Event(), list[int]()
    process = TrainerProcess(filled, ended=lambda _: ended.set(), variables=variables)

    def hand_on(number: int) -> None:
        taken.append(number)
        process.hand_on(number)

    signals.taken = hand_on
    try:
        while not ended.wait(_TICK_SECONDS):
            continue
    finally:
        signals.taken = None
        process.release()
    code = process.code
    assert code is not None  # it has ended
    return code, next((number for number in taken if number in ENDING), None)
