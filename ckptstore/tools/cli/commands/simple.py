"""Commands with one short answer: `latest`, `best`, `annotate`, `pin`, `unpin`, `rollback` and `restore`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.format.layout import store_of
from ckptstore.tools.cli.kinds import METRIC, STORE, TARGET
from ckptstore.tools.cli.options import as_json, storage_option, together
from ckptstore.tools.cli.output import checkpoint_json, print_json, show_metrics
from ckptstore.tools.cli.targets import LATEST, Best, checkpoint_in, find_target, opened_step, opened_store

Answer = tuple[dict[str, Any], str]
"""The fields that --json prints, and the lines for people."""


def _command(*parameters: Callable[[Any], Any]) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command of a function that returns its answer, with these parameters and the options of all commands."""

    def decorate(answer: Callable[..., Answer]) -> click.Command:
        @wraps(answer)
        def command(*, as_json: bool, **options: Any) -> None:
            fields, lines = answer(**options)
            if as_json:
                print_json(**fields)
            else:
                click.echo(lines)

        return click.command()(together(*parameters, storage_option, as_json)(command))

    return decorate


@_command(click.argument("store", type=STORE))
def latest(store: str, storage_options: dict[str, Any]) -> Answer:
    """Print the URI of the latest checkpoint of STORE."""
    with opened_store(store, storage_options) as opened:
        checkpoint = checkpoint_in(opened, LATEST)
        return {"checkpoint": checkpoint_json(checkpoint)}, checkpoint.uri


@_command(
    click.argument("store", type=STORE),
    click.argument("metric", type=METRIC),
    click.option(
        "--mode",
        type=click.Choice(["min", "max"]),
        help="Whether lower or higher is better; names such as eval_loss and accuracy tell it.",
    ),
)
def best(store: str, metric: str, mode: Literal["min", "max"] | None, storage_options: dict[str, Any]) -> Answer:
    """Print the URI of the checkpoint with the best METRIC.

    NaN and infinity are never the best.
    """
    with opened_store(store, storage_options) as opened:
        checkpoint = checkpoint_in(opened, Best(metric, mode))
        return {"checkpoint": checkpoint_json(checkpoint)}, checkpoint.uri


@_command(
    click.argument("target", type=TARGET),
    click.argument("words", nargs=-1, required=True, metavar="NAME=VALUE..."),
)
def annotate(target: str, words: tuple[str, ...], storage_options: dict[str, Any]) -> Answer:
    """Add metrics to a checkpoint, such as those of an evaluation.

    TARGET is STORE@STEP, or the URI of a checkpoint in a store. A metric of the same name is replaced. The job that
    saves goes on: retention by this metric, `ls` and `best` see it from now on.
    """
    metrics = dict(_metric(word) for word in words)
    wanted = find_target(target, storage_options)
    store = store_of(wanted.uri) if wanted.step is None else wanted.uri
    if store is None:
        raise InvalidInput(f"{target} names no checkpoint in a store", hint="Write STORE@STEP, or what `latest` prints")
    with opened_store(store, storage_options) as opened:
        if isinstance(wanted.step, int):
            opened.annotate(wanted.step, metrics)  # which may be in the trash
        elif wanted.step is None:
            opened.annotate(Checkpoint.from_uri(wanted.uri, storage_options=storage_options), metrics)
        else:
            opened.annotate(checkpoint_in(opened, wanted.step), metrics)
    return {"target": target, "metrics": metrics}, f"annotated with {show_metrics(metrics)}"


def _metric(word: str) -> tuple[str, float]:
    name, _, value = word.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        """It is refused below."""
    raise click.UsageError(f"{word!r} is not like eval_loss=0.25")


@_command(click.argument("target", type=TARGET))
def pin(target: str, storage_options: dict[str, Any]) -> Answer:
    """Protect STORE@STEP from retention until it is unpinned."""
    with opened_step(target, storage_options) as (store, step):
        store.pin(step)
        return {"uri": store.uri, "step": step, "is_pinned": True}, f"step {step} is pinned"


@_command(click.argument("target", type=TARGET))
def unpin(target: str, storage_options: dict[str, Any]) -> Answer:
    """Let retention remove STORE@STEP again."""
    with opened_step(target, storage_options) as (store, step):
        store.unpin(step)
        return {"uri": store.uri, "step": step, "is_pinned": False}, f"step {step} is not pinned"


@_command(click.argument("target", type=TARGET))
def rollback(target: str, storage_options: dict[str, Any]) -> Answer:
    """Make STORE@STEP the latest; move newer ones to the trash."""
    with opened_step(target, storage_options) as (store, step):
        before = {item.number: item.step for item in store}
        checkpoint = store.roll_back(step)
        after = {item.number for item in store}
        trashed = [found for number, found in before.items() if number not in after]
        lines = [f"step {step} is the latest"]
        if trashed:
            lines.append(f"in the trash: {', '.join(map(str, trashed))}; `ckptstore restore` brings them back")
        return {"checkpoint": checkpoint_json(checkpoint), "trashed_steps": trashed}, "\n".join(lines)


@_command(
    click.argument("target", type=STORE),
    click.option(
        "--pin/--no-pin", default=True, show_default=True, help="Pin it, so that retention does not remove it again."
    ),
    click.option(
        "--number", type=int, metavar="N", help="Number in `ls --trash`, if the trash has the step more than once."
    ),
)
def restore(target: str, pin: bool, number: int | None, storage_options: dict[str, Any]) -> Answer:
    """Bring STORE@STEP back from the trash.

    It must still have all its files; `ckptstore ls --trash` lists what there is. It is pinned, because the rule that
    removed it would remove it again at the next save.
    """
    wanted = find_target(target, storage_options)
    if not isinstance(wanted.step, int):
        raise InvalidInput(f"{target} names no step", hint="Write STORE@STEP; `ls --trash` lists what is there")
    with opened_store(wanted.uri, storage_options) as store:
        checkpoint = store.restore(wanted.step, number=number, pin=pin)
        is_latest = checkpoint == store.latest()
        fields = {"checkpoint": checkpoint_json(checkpoint), "is_pinned": pin, "is_latest": is_latest}
    line = f"step {checkpoint.step} is live again{', and the latest' if is_latest else ''}\n"
    if pin:
        return fields, f"{line}it is pinned; `ckptstore unpin {target}` gives it back to retention"
    return fields, f"{line}it is not pinned: the next save drops it again if its retention does not keep it"
