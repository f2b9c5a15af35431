"""From what is written on the command line to a store or a checkpoint.

There is one form: URI for a store or for a checkpoint directory that lies on its own, URI@STEP, URI@latest or
URI@best:METRIC[:MODE] for a checkpoint of a store. Only digits or "latest" after the last "@", and what begins with
"@best:", are taken for one, so that "abfs://box@account..." stays a URI. Where something is called "runs/try@3" itself,
that is what is meant; if "runs/try" is a store as well, the text is refused. A command that takes a store takes the
whole text for its URI.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput, NoUsableCheckpoint, StoreMissing
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.layout import MANIFEST_NAME, STORE_KEY
from ckptstore.opening import open_store
from ckptstore.retention import Mode
from ckptstore.store import CheckpointStore
from ckptstore.tools.cli.ray_runs import checkpoints_of_ray
from ckptstore.transfer.opened import open_place

_TARGET = re.compile(r"(.+)@(\d{1,1000}|latest)", re.DOTALL)  # Python makes no number of more than 4300 digits
_BEST = re.compile(r"(.+?)@best:(.+?)(?::(min|max))?", re.DOTALL)
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint by a metric; without a mode the metric's name tells which way is better."""

    metric: str
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The store or checkpoint that the command line names."""

    uri: str
    step: int | str | Best | None
    """A step, "latest", the best by a metric, or None for a URI alone."""


def parse_target(text: str) -> CommandTarget:
    """Read URI, URI@STEP, URI@latest, URI@best:METRIC or URI@best:METRIC:MODE."""
    best = _BEST.fullmatch(text)
    if best is not None:
        return CommandTarget(best[1], Best(best[2], "min" if best[3] == "min" else "max" if best[3] else None))
    match = _TARGET.fullmatch(text)
    if match is None:
        return CommandTarget(text, None)
    return CommandTarget(match[1], LATEST if match[2] == LATEST else int(match[2]))


@contextmanager
def opened_store(uri: str, storage_options: Mapping[str, Any], **keywords: Any) -> Iterator[CheckpointStore]:
    """Yield the store at a URI. Raises StoreMissing when there is none, InvalidInput where a checkpoint was meant."""
    with open_store(uri, storage_options=storage_options, **keywords) as store:
        if not store.exists():
            if parse_target(uri).step is not None:
                raise InvalidInput(f"There is no store called {store.uri}", hint="This command takes no step")
            raise StoreMissing(f"There is no store at {store.uri}", hint=_rule_of_targets(uri, storage_options))
        yield store


def _rule_of_targets(uri: str, storage_options: Mapping[str, Any]) -> str | None:
    """Return the rule for what follows the last "@", if a store stands before it."""
    before, at, after = uri.rpartition("@")
    try:
        if not at or not before or not _holds(before, storage_options, STORE_KEY):
            return None
    except InvalidInput:  # nothing can be called so
        return None
    if after == "best":
        return f"Write {before}@best:METRIC, such as {before}@best:eval_loss"
    return f"{before} is a store; after its @ comes a step, {LATEST} or best:METRIC, and {after!r} is none of these"


def find_target(text: str, storage_options: Mapping[str, Any]) -> CommandTarget:
    """Parse a target as `parse_target` does, but find what is called URI@STEP itself. Raises InvalidInput where both
    are there."""
    target = parse_target(text)
    try:
        if target.step is None or not _is_something(text, storage_options):
            return target
    except InvalidInput:  # nothing can be called so
        return target
    if _is_something(target.uri, storage_options):
        raise InvalidInput(
            f"{text} names a step of {target.uri}, and something that is called {text}",
            hint=f"Write {text}@latest or {text}@STEP for the store of that name. To reach the step, rename that store",
        )
    return CommandTarget(text, None)


@contextmanager
def opened_step(text: str, storage_options: Mapping[str, Any]) -> Iterator[tuple[CheckpointStore, int]]:
    """Yield the store and the step of URI@STEP. Raises InvalidInput for a URI without a step."""
    target = find_target(text, storage_options)
    if target.step is None:
        raise InvalidInput(f"{text} names no checkpoint", hint="Write STORE@STEP, STORE@latest or STORE@best:METRIC")
    with opened_store(target.uri, storage_options) as store:
        yield store, checkpoint_in(store, target.step).step


@contextmanager
def opened_checkpoint(
    text: str, storage_options: Mapping[str, Any], *, fast: FastTier | None = None
) -> Iterator[Checkpoint]:
    """Yield the checkpoint that TARGET names; of a store alone, or of a run that Ray keeps, its latest one. With `fast`
    it may lie on this node alone.

    Raises InvalidInput with `fast` if TARGET is the best one or a checkpoint directory.
    """
    target = find_target(text, storage_options)
    if target.step is None and is_checkpoint(target.uri, storage_options):
        if fast is not None:
            raise InvalidInput(f"{text} is a checkpoint, and fast ones belong to a store", hint="Leave --fast out")
        yield Checkpoint.from_uri(target.uri, storage_options=storage_options)
        return
    with opened_store(target.uri, storage_options, fast=fast) as store:
        if fast is not None:
            yield _any_checkpoint_in(store, target.step)
        elif of_ray := checkpoints_of_ray(store, storage_options):
            yield _checkpoint_of_run(store, of_ray, target.step)
        else:
            yield checkpoint_in(store, target.step)


def _checkpoint_of_run(
    store: CheckpointStore, of_ray: Sequence[Checkpoint], step: int | str | Best | None
) -> Checkpoint:
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


def is_checkpoint(uri: str, storage_options: Mapping[str, Any]) -> bool:
    """Return True if the URI is a checkpoint directory, and not a store."""
    return _holds(uri, storage_options, MANIFEST_NAME)


def _is_something(uri: str, storage_options: Mapping[str, Any]) -> bool:
    """Return True if a store or a checkpoint directory has that name."""
    return _holds(uri, storage_options, STORE_KEY, MANIFEST_NAME)


def _holds(uri: str, storage_options: Mapping[str, Any], *keys: str) -> bool:
    with closing(open_place(uri, storage_options=storage_options)) as place:
        return any(file.key == key for key in keys for file in place.storage.list(key))


def _any_checkpoint_in(store: CheckpointStore, step: int | str | Best | None) -> Checkpoint:
    """Return a checkpoint as `checkpoint_in` does, or one on this node: of a step the one that was saved last."""
    if isinstance(step, Best):
        raise InvalidInput("The best checkpoint is one of the store", hint="Leave --fast out, or name a step")
    if isinstance(step, int):
        found = [entry.checkpoint for entry in store.entries(fast=True) if entry.checkpoint.step == step]
        return found[-1] if found else store[step]
    return store.latest(fast=True) or checkpoint_in(store, step)


def checkpoint_in(store: CheckpointStore, step: int | str | Best | None) -> Checkpoint:
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
