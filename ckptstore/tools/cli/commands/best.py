"""`ckptstore best`: where the best checkpoint by a metric lies, for scripts."""

from __future__ import annotations

from typing import Any, Literal

import click

from ckptstore.tools.cli.kinds import METRIC, STORE
from ckptstore.tools.cli.short import Answer, short_command, where
from ckptstore.tools.cli.targets import Best, checkpoint_in, opened_store

_MODE_HELP = "Which is better; names such as eval_loss and accuracy tell it."


@short_command(
    click.argument("store", type=STORE),
    click.argument("metric", type=METRIC),
    click.option("--mode", type=click.Choice(["min", "max"]), help=_MODE_HELP),
)
def command(store: str, metric: str, mode: Literal["min", "max"] | None, storage_options: dict[str, Any]) -> Answer:
    """Print the URI of the checkpoint of STORE with the best METRIC. NaN and infinities are never best."""
    with opened_store(store, storage_options) as opened:
        return where(checkpoint_in(opened, Best(metric, mode)))
