"""`ckptstore latest`: where the latest checkpoint lies, for scripts."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.short import Answer, short_command, where
from ckptstore.tools.cli.targets import LATEST, checkpoint_in, opened_store


@short_command(click.argument("store", type=STORE))
def command(store: str, storage_options: dict[str, Any]) -> Answer:
    """Print the URI of the latest checkpoint of STORE."""
    with opened_store(store, storage_options) as opened:
        return where(checkpoint_in(opened, LATEST))
