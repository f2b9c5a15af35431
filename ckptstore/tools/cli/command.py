"""Make commands of functions: each gets its options as one `Call`, and says one answer for people and for --json.

There is one form for what a command works on: URI for a store or for a checkpoint directory that lies on its own,
URI@STEP, URI@latest or URI@best:METRIC[:MODE] for a checkpoint of a store. Only digits or "latest" after the last "@",
and what begins with "@best:", are taken for one, so that "abfs://box@account..." stays a URI. Where something is called
"runs/try@3" itself, that is what is meant; if "runs/try" is a store as well, the text is refused. A command that takes
a store takes the whole text for its URI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import click

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput, NoUsableCheckpoint, StoreMissing
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.layout import MANIFEST_NAME, STORE_KEY
from ckptstore.integrations.ray.ray_snapshot import uris_in_run
from ckptstore.opening import open_store
from ckptstore.retention import Mode
from ckptstore.runtime.shown import printable
from ckptstore.storage.uri import parse_uri
from ckptstore.store import CheckpointStore
from ckptstore.tools.cli.options import AS_JSON, STORAGE_OPTION
from ckptstore.tools.cli.output import json_text
from ckptstore.tools.cli.terminal import progress
from ckptstore.transfer.executor import Executor, InProcess
from ckptstore.transfer.opened import open_place

_TARGET = re.compile(r"(.+)@(\d{1,1000}|latest)", re.DOTALL)  # Python makes no number of more than 4300 digits
_BEST = re.compile(r"(.+?)@best:(.+?)(?::(min|max))?", re.DOTALL)
LATEST = "latest"
T = TypeVar("T")
Answer = Generator[dict[str, Any] | str | list[str], None, None]
"""The parts of an answer in their order: the fields that --json prints, and for people a line, whose unprintable
characters are escaped, or lines that are printed as they are, such as a table."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint by a metric; without a mode the metric's name tells which way is better."""

    metric: str
    mode: Mode | None = None


Step = int | str | Best | None
"""A step, "latest", the best by a metric, or None for a URI alone."""


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The store or checkpoint that the command line names."""

    uri: str
    step: Step


def parse_target(text: str) -> CommandTarget:
    """Read URI, URI@STEP, URI@latest, URI@best:METRIC or URI@best:METRIC:MODE."""
    best = _BEST.fullmatch(text)
    if best is not None:
        return CommandTarget(best[1], Best(best[2], "min" if best[3] == "min" else "max" if best[3] else None))
    match = _TARGET.fullmatch(text)
    if match is None:
        return CommandTarget(text, None)
    return CommandTarget(match[1], LATEST if match[2] == LATEST else int(match[2]))


def _rule_of_targets(uri: str, storage_options: Mapping[str, Any]) -> str | None:
    """Return the rule for what follows the last "@", if a store stands before it."""
    before, _, after = uri.rpartition("@")
    if not before or not holds(before, storage_options, STORE_KEY):
        return None
    if after == "best":
        return f"Write {before}@best:METRIC, such as {before}@best:eval_loss"
    return f"{before} is a store; after its @ comes a step, {LATEST} or best:METRIC, and {after!r} is none of these"


def find_target(text: str, storage_options: Mapping[str, Any]) -> CommandTarget:
    """Parse a target as `parse_target` does, but find what is called URI@STEP itself. Raises InvalidInput where both
    are there."""
    target = parse_target(text)
    if target.step is None or not holds(text, storage_options, STORE_KEY, MANIFEST_NAME):
        return target
    if holds(target.uri, storage_options, STORE_KEY, MANIFEST_NAME):
        raise InvalidInput(
            f"{text} names a step of {target.uri}, and something that is called {text}",
            hint=f"Write {text}@latest or {text}@STEP for the store of that name. To reach the step, rename that store",
        )
    return CommandTarget(text, None)


def _checkpoint_of_run(store: CheckpointStore, of_ray: Sequence[Checkpoint], step: Step) -> Checkpoint:
    """Return a checkpoint of a run that Ray keeps: of a step the one that was stored last, else the latest."""
    if isinstance(step, Best):
        raise InvalidInput(
            f"Ray keeps the checkpoints at {store.uri}, and ranks them",
            hint="Take result.get_best_checkpoint(metric, mode), or name a step",
        )
    found = [checkpoint for checkpoint in of_ray if checkpoint.step == step] if isinstance(step, int) else of_ray
    if not found:
        steps = ", ".join(str(checkpoint.step) for checkpoint in of_ray[-10:])
        raise NoUsableCheckpoint(f"Step {step} is not in the run at {store.uri}, which Ray keeps; there are: {steps}")
    return found[-1]


def holds(uri: str, storage_options: Mapping[str, Any], *keys: str) -> bool:
    """Return True if one of these files is at the URI, such as the manifest in a checkpoint directory."""
    try:
        with closing(open_place(uri, storage_options=storage_options)) as place:
            return any(file.key == key for key in keys for file in place.storage.list(key))
    except InvalidInput:  # nothing can be called so
        return False


def _any_checkpoint_in(store: CheckpointStore, step: Step) -> Checkpoint:
    """Return a checkpoint as `checkpoint_in` does, or one on this node: of a step the one that was saved last."""
    if isinstance(step, Best):
        raise InvalidInput("The best checkpoint is one of the store", hint="Leave --fast out, or name a step")
    if isinstance(step, int):
        found = [entry.checkpoint for entry in store.entries(fast=True) if entry.checkpoint.step == step]
        return found[-1] if found else store[step]
    return store.latest(fast=True) or checkpoint_in(store, step)


def checkpoint_in(store: CheckpointStore, step: Step) -> Checkpoint:
    """Return the checkpoint of a step, the best one, or else the latest. Raises NoUsableCheckpoint where there is
    none."""
    if isinstance(step, int):
        return store[step]
    checkpoint = store.best(step.metric, step.mode) if isinstance(step, Best) else store.latest()
    if checkpoint is None and isinstance(step, Best):
        raise NoUsableCheckpoint(f"No checkpoint in {store.uri} has a finite metric {step.metric!r}")
    if checkpoint is None:
        raise NoUsableCheckpoint(f"There is no checkpoint in {store.uri}")
    return checkpoint


def checkpoints_of_ray(
    store: CheckpointStore, storage_options: Mapping[str, Any], *, damaged: dict[str, CheckpointDamaged] | None = None
) -> list[Checkpoint] | None:
    """Return the checkpoints of a run of Ray Train whose files Ray keeps, oldest first: its directory has an identity,
    and no log. Return None for a store with a log of its own.

    One that is not whole is left out: it is added to `damaged` by its URI, or else named on stderr.
    """
    uris = uris_in_run(job_of(store).storage)
    if uris is None:
        return None
    found = []
    for uri in uris:
        try:
            found.append(Checkpoint.from_uri(uri, storage_options=storage_options))
        except CheckpointDamaged as error:
            if damaged is None:
                click.echo(printable(f"left out: {uri}: {error.message}"), err=True)
            else:
                damaged[uri] = error
        except CheckpointGone:  # Ray has deleted it meanwhile
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.created_at)


class Call(SimpleNamespace):
    """One call of a command: its options by their names, and what is open until it ends."""

    storage_options: dict[str, Any]
    as_json = False
    exit_code = 0

    def __init__(self, stack: ExitStack, options: dict[str, Any]) -> None:
        """`stack` is left when the command has ended."""
        super().__init__(**options)
        self._stack = stack

    def open(self, context: AbstractContextManager[T]) -> T:
        """Enter a context until the command ends."""
        return self._stack.enter_context(context)

    def open_store(self, uri: str | None = None, options: dict[str, Any] | None = None, **more: Any) -> CheckpointStore:
        """Return the store at a URI, STORE by default. Raises StoreMissing when there is none, InvalidInput where a
        checkpoint was meant."""
        uri, options = self.store if uri is None else uri, self.storage_options if options is None else options
        store = self.open(open_store(uri, storage_options=options, **more))
        if not store.exists():
            if parse_target(uri).step is not None:
                raise InvalidInput(f"There is no store called {store.uri}", hint="This command takes no step")
            raise StoreMissing(f"There is no store at {store.uri}", hint=_rule_of_targets(uri, options))
        return store

    def find_target(self) -> CommandTarget:
        """Return what TARGET names. Raises InvalidInput where it names two things."""
        return find_target(self.target, self.storage_options)

    def open_step(self) -> tuple[CheckpointStore, int]:
        """Return the store and the step of TARGET. Raises InvalidInput if it has none."""
        target = self.find_target()
        if target.step is None:
            message = f"{self.target} names no checkpoint"
            raise InvalidInput(message, hint="Write STORE@STEP, STORE@latest or STORE@best:METRIC")
        store = self.open_store(target.uri)
        return store, checkpoint_in(store, target.step).step

    def open_checkpoint(
        self, text: str, options: dict[str, Any] | None = None, fast: FastTier | None = None
    ) -> Checkpoint:
        """Return the checkpoint that a target names; of a store alone, or of a run that Ray keeps, its latest one. With
        `fast` it may lie on this node alone.

        Raises InvalidInput with `fast` if it is the best one or a checkpoint directory.
        """
        options = self.storage_options if options is None else options
        target = find_target(text, options)
        if target.step is None and holds(target.uri, options, MANIFEST_NAME):
            if fast is not None:
                raise InvalidInput(f"{text} is a checkpoint, and fast ones belong to a store", hint="Leave --fast out")
            return Checkpoint.from_uri(target.uri, storage_options=options)
        store = self.open_store(target.uri, options, fast=fast)
        if fast is not None:
            return _any_checkpoint_in(store, target.step)
        of_ray = checkpoints_of_ray(store, options)
        return _checkpoint_of_run(store, of_ray, target.step) if of_ray else checkpoint_in(store, target.step)

    def fast_tier(self) -> FastTier | None:
        """Return the tier that --fast names. Raises InvalidInput for no directory: a name with a typing error must not
        look like an empty one."""
        if self.fast is None:
            return None
        if os.path.islink(self.fast) or not os.path.isdir(self.fast):
            raise InvalidInput(f"{self.fast} is no directory, or a symbolic link", hint="Give the directory itself")
        return FastTier(self.fast)

    def open_executor(self) -> Executor:
        """Return the executor that --engine names."""
        if self.engine == "local":
            return InProcess()
        from ckptstore.integrations.ray.tasks import ray_executor

        return self.open(ray_executor())

    def options_by_place(self, *places: str) -> list[dict[str, Any]]:
        """Return the storage options for several places or targets: for each that is no path of this machine, all of
        them. Raises InvalidInput where there are options and no such place."""
        uris = [parse_target(place).uri for place in places]
        found = [self.storage_options if parse_uri(uri).scheme else {} for uri in uris]
        if self.storage_options and not any(found):
            raise InvalidInput(f"--storage-option means nothing for {' and '.join(uris)}", hint="Leave it out")
        return found

    def progress(self, description: str, total_bytes: int | None = None) -> AbstractContextManager[None]:
        """Show the bytes that move while the context lasts, unless JSON is printed."""
        return progress(description, total_bytes=total_bytes, quiet=self.as_json)


def command(
    *parameters: click.Parameter,
    common: Iterable[click.Parameter] = (STORAGE_OPTION, AS_JSON),
    indent: int | None = 2,
    group: click.Group | None = None,
    **settings: Any,
) -> Callable[[Callable[[Call], Answer | None]], click.Command]:
    """Make a command of a function, with these parameters and the `common` ones behind them.

    `indent` is that of its JSON: None where each answer is a line. `group` is the command that it is part of.
    """

    def decorate(function: Callable[[Call], Answer | None]) -> click.Command:
        @wraps(function)
        def run(**options: Any) -> None:
            with ExitStack() as stack:
                call = Call(stack, options)
                answer = function(call)
                for part in () if answer is None else stack.enter_context(closing(answer)):
                    if isinstance(part, dict):
                        if call.as_json:
                            click.echo(json_text(part, indent=indent))
                    elif not call.as_json:
                        for line in [printable(part)] if isinstance(part, str) else part:
                            click.echo(line)
            if call.exit_code:
                raise click.exceptions.Exit(call.exit_code)

        return (group or click).command(params=[*parameters, *common], **settings)(run)

    return decorate
