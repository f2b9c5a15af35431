"""Options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.encoding import parse_json
from ckptstore.retention import RULES, parse_policy
from ckptstore.storage.uri import parse_uri
from ckptstore.transfer.executor import Executor, InProcess

F = TypeVar("F", bound=Callable[..., Any])


def together(*parameters: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds some parameters to a command, in this order."""

    def decorate(function: F) -> F:
        for parameter in reversed(parameters):
            function = parameter(function)
        return function

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object; an error too.")
dry_run = click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")


storage_option = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=lambda _ctx, _param, values: parse_storage_options(values),
    help="Option for the storage's client, by its fsspec name; never shown. Repeatable.",
)
keep_option = click.option(
    "--keep",
    multiple=True,
    metavar="RULE",
    callback=lambda _ctx, _param, rules: parse_policy(rules),
    show_default="all",
    help=f"Keep what any of these rules keeps, such as {RULES}.",
)
"""The policy; None without a rule."""
fast_option = click.option(
    "--fast",
    "fast_path",
    type=click.Path(),
    metavar="DIR",
    help="Include fast checkpoints on this node; DIR is the path of the job's FastTier.",
)
engine_option = click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Move bytes in this process, or in a task on each node of a Ray cluster.",
)
price_option = click.option(
    "--price",
    "prices",
    multiple=True,
    callback=lambda _ctx, parameter, texts: _parse_prices(parameter, texts),
    metavar="[PLACE=]N",
    help="Price of a TB for a month, for the sum. PLACE=N is for URIs that begin like that. Repeatable.",
)
"""The prices by the beginnings of the URIs that they are for."""
names_options = together(
    click.option(
        "--include", multiple=True, metavar="PATTERN", help='Take only keys that match, such as "model.*"; repeatable.'
    ),
    click.option("--strip-prefix", default="", metavar="PREFIX", help='Remove this from keys, such as "model.".'),
)
files_options = together(
    click.option(
        "--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest size of one safetensors file."
    ),
    click.option(
        "--with", "beside", metavar="DIR", help="Copy the other files in DIR too: a model's config and tokenizer."
    ),
    click.option("--overwrite", is_flag=True, help="Replace an earlier export there."),
)


def tier_at(path: str | None) -> FastTier | None:
    """Return the tier that `--fast` names. Raises InvalidInput for no directory: a name with a typing error must not
    look like an empty one."""
    if path is None:
        return None
    if os.path.islink(path) or not os.path.isdir(path):
        raise InvalidInput(f"{path} is no directory, or a symbolic link", hint="Give the directory itself")
    return FastTier(path)


@contextmanager
def opened_executor(engine: str) -> Iterator[Executor]:
    """Yield the executor that `--engine` names."""
    if engine == "local":
        yield InProcess()
        return
    from ckptstore.integrations.ray.tasks import ray_executor

    with ray_executor() as executor:
        yield executor


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


def options_by_place(options: dict[str, Any], *places: str) -> list[dict[str, Any]]:
    """Return the storage options of a command with several places: for each that is no path of this machine, all of
    them.

    Raises InvalidInput where there are options and no such place.
    """
    found = [options if parse_uri(place).scheme else {} for place in places]
    if options and not any(found):
        raise InvalidInput(f"--storage-option means nothing for {' and '.join(places)}", hint="Leave it out")
    return found


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
        inner[key] = _parse(name, value) if name.endswith(":") else value
    return options


def _parse(name: str, value: str) -> Any:
    try:
        return parse_json(value)
    except ValueError:
        raise InvalidInput(f"--storage-option {name}= takes JSON, and the value is not JSON") from None
