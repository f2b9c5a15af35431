"""What is written on the command line, as kinds of parameters: names that a shell completes, and durations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ckptstore.errors import CkptstoreError
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    _Kind = click.ParamType[Any]
else:  # the releases of click that we take have no types in it
    _Kind = click.ParamType

_UNITS_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)")


class Duration(_Kind):
    """A number of seconds, or a number with a unit: "90", "15m", "1h", "2d"."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        if isinstance(value, int | float):
            return float(value)
        match = _DURATION.fullmatch(str(value).strip().lower())
        if match is None or match[2] not in _UNITS_SECONDS:
            self.fail(f"{value!r} is no duration. Write seconds, or a unit: 90, 15m, 1h, 2d", param, ctx)
        return float(match[1]) * _UNITS_SECONDS[match[2]]


class StoreName(_Kind):
    """A store. A shell completes directories."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Directories; what lies elsewhere is not listed for a press of a key."""
        return [CompletionItem(incomplete, type="dir")]


class TargetName(StoreName):
    """A store, or STORE@STEP. After the @ a shell completes the steps that are live."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Directories, or the steps of a store."""
        uri, at, begun = incomplete.rpartition("@")
        if not at:
            return super().shell_complete(ctx, param, incomplete)
        steps: list[str] = []
        with _opened(uri) as store:
            steps = ["latest", *sorted({str(checkpoint.step) for checkpoint in store}, key=int)] if store else []
        return [CompletionItem(f"{uri}@{step}") for step in steps if step.startswith(begun)]


class MetricName(_Kind):
    """A metric of the store that stands before it."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The metrics of the live checkpoints."""
        names: set[str] = set()
        with _opened(str(ctx.params.get("store") or "")) as store:
            names = {name for checkpoint in store for name in checkpoint.metrics} if store else set()
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


@contextmanager
def _opened(uri: str) -> Iterator[CheckpointStore | None]:
    """A store, None where there is none: nobody wants to see an error for a press of a key."""
    try:
        with open_store(uri) as store:
            list(store)
            yield store
    except CkptstoreError:
        yield None


STORE, TARGET, METRIC, DURATION = StoreName(), TargetName(), MetricName(), Duration()
