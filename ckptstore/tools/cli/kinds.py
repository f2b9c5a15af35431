"""Define kinds of parameters of the command line: names that a shell completes, and quantities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.opening import open_store
from ckptstore.runtime.shown import read_duration, read_size
from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    _Kind = click.ParamType[Any]
else:  # the releases of click that we take have no types in it
    _Kind = click.ParamType


class Quantity(_Kind):
    """A number, or text of which a function makes one, such as "15m" or "1.5TiB"."""

    def __init__(self, name: str, read: Callable[[str], float]) -> None:
        """`read` raises InvalidInput."""
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        if isinstance(value, int | float):
            return float(value)
        try:
            return self._read(str(value))
        except InvalidInput as error:
            self.fail(error.message, param, ctx)


class StoreName(_Kind):
    """A store. A shell completes directories."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete directories; what lies elsewhere is not listed for a press of a key."""
        return [CompletionItem(incomplete, type="dir")]


class TargetName(StoreName):
    """A store, or STORE@STEP. After the @ a shell completes the steps that are live."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete directories, or the steps of a store."""
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
        """Return the metrics of the live checkpoints."""
        names: set[str] = set()
        with _opened(str(ctx.params.get("store") or "")) as store:
            names = {name for checkpoint in store for name in checkpoint.metrics} if store else set()
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


@contextmanager
def _opened(uri: str) -> Iterator[CheckpointStore | None]:
    """Yield a store, None where there is none: nobody wants to see an error for a press of a key."""
    try:
        with open_store(uri) as store:
            list(store)
            yield store
    except CkptstoreError:
        yield None


STORE, TARGET, METRIC = StoreName(), TargetName(), MetricName()
DURATION, SIZE = Quantity("duration", read_duration), Quantity("size", read_size)
