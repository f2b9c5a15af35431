"""Parameters of commands: how one is written, how a shell completes it, and those that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.format.encoding import parse_json
from ckptstore.opening import open_store
from ckptstore.retention import RULES, parse_policy
from ckptstore.runtime.shown import read_duration, read_size

if TYPE_CHECKING:
    _Kind = click.ParamType[Any]
else:  # the releases of click that we take have no types in it
    _Kind = click.ParamType


def option(words: str, help: str, *names: str, **settings: Any) -> click.Option:
    """Return an option, written as the help shows it: "--step N" takes a value, "--metric NAME ..." may be repeated,
    "--to [torch|dcp]" takes one of these words, "--all" is a flag. A default is shown."""
    flags, _, value = words.partition(" ")
    if value.startswith("[") and "|" in value:
        settings["type"] = click.Choice(value[1:-1].split("|"))
    elif value:
        settings = {"metavar": value.removesuffix(" ..."), "multiple": value.endswith(" ..."), **settings}
    elif "type" not in settings:
        settings["is_flag"] = True
    return click.Option([flags, *names], help=help, **{"show_default": "default" in settings, **settings})


class Quantity(_Kind):
    """A number, or text of which a function makes one, such as "15m" or "1.5TiB"."""

    def __init__(self, name: str, read: Callable[[str], float]) -> None:
        """`read` raises InvalidInput."""
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        try:
            return value if isinstance(value, int | float) else self._read(str(value))
        except InvalidInput as error:
            self.fail(error.message, param, ctx)


DURATION, SIZE = Quantity("duration", read_duration), Quantity("size", lambda text: int(read_size(text)))


def complete_store(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete directories; what lies elsewhere is not listed for a press of a key."""
    return [CompletionItem(incomplete, type="dir")]


def complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete directories, and after the @ the steps of a store that are live."""
    uri, at, begun = incomplete.rpartition("@")
    if not at:
        return complete_store(ctx, param, incomplete)
    steps = sorted({checkpoint.step for checkpoint in _live(uri)})
    return [CompletionItem(f"{uri}@{step}") for step in ("latest", *steps) if steps and str(step).startswith(begun)]


def complete_metric(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the metrics of the live checkpoints of the store that stands before."""
    names = {name for checkpoint in _live(str(ctx.params.get("store") or "")) for name in checkpoint.metrics}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _live(uri: str) -> list[Any]:
    """Return the live checkpoints, none where there is no store: nobody wants to see an error for a press of a key."""
    try:
        with open_store(uri) as store:
            return list(store)
    except CkptstoreError:
        return []


STORE = click.Argument(["store"], shell_complete=complete_store)
STORES = click.Argument(["stores"], nargs=-1, required=True, metavar="STORE...", shell_complete=complete_store)
TARGET = click.Argument(["target"], shell_complete=complete_target)

AS_JSON = option("--json", "Print one JSON object; an error too.", "as_json")
DRY_RUN = option("--dry-run", "Print what would be done; change nothing.")
STORAGE_OPTION = option(
    "--storage-option KEY=VALUE ...",
    "Option for the storage's client, by its fsspec name; never shown. Repeatable.",
    "storage_options",
    callback=lambda _ctx, _param, values: parse_storage_options(values),
)
KEEP = option(
    "--keep RULE ...",
    f"Keep what any of these rules keeps, such as {RULES}.",
    callback=lambda _ctx, _param, rules: parse_policy(rules),
    show_default="all",
)
"""The policy; None without a rule."""
FAST = option(
    "--fast DIR", "Include fast checkpoints on this node; DIR is the path of the job's FastTier.", type=click.Path()
)
ENGINE = option(
    "--engine [local|ray]", "Move bytes in this process, or in a task on each node of a Ray cluster.", default="local"
)
PRICE = option(
    "--price [PLACE=]N ...",
    "Price of a TB for a month, for the sum. PLACE=N is for URIs that begin like that. Repeatable.",
    "prices",
    callback=lambda _ctx, parameter, texts: _parse_prices(parameter, texts),
)
"""The prices by the beginnings of the URIs that they are for."""
NAMES = (
    option("--include PATTERN ...", 'Take only keys that match, such as "model.*"; repeatable.'),
    option("--strip-prefix PREFIX", 'Remove this from keys, such as "model.".', default="", show_default=False),
)
FILES = (
    option("--shard-size SIZE", "Largest size of one safetensors file.", default="5GB"),
    option("--with DIR", "Copy the other files in DIR too: a model's config and tokenizer.", "beside"),
    option("--overwrite", "Replace an earlier export there."),
)


def _parse_prices(parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        place, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0 <= price < math.inf:
            raise click.BadParameter(f"{text!r} is no price like 23 or s3://=23", param=parameter)
        if place in found:
            raise click.BadParameter(f"two prices are for {place or 'all places'}", param=parameter)
        found[place] = price
    return found


def prices_of(prices: Mapping[str, float], *uris: str) -> list[float | None]:
    """Return the price for each URI, by the longest place that it begins with; None where none fits. Raises
    InvalidInput if there are prices, and all are for other places."""
    fitting = [max((place for place in prices if uri.startswith(place)), key=len, default=None) for uri in uris]
    if prices and not any(place is not None for place in fitting):
        raise InvalidInput(f"--price is for {', '.join(sorted(prices))}, and not for {', '.join(uris)}")
    return [None if place is None else prices[place] for place in fitting]


def parse_storage_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the options as a nested dict. Raises InvalidInput, which names the key and never the value."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.rstrip(":"):
            raise InvalidInput("--storage-option takes KEY=VALUE")
        *outer, key = name.rstrip(":").split(".")
        inner = options
        for part in outer:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InvalidInput(f"--storage-option {name} is inside {part}, which is text")
        try:
            inner[key] = parse_json(value) if name.endswith(":") else value
        except ValueError:
            raise InvalidInput(f"--storage-option {name}= takes JSON, and the value is not JSON") from None
    return options
