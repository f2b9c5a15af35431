"""`ckptstore unpin`: give a checkpoint back to retention."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.short import Answer, short_command
from ckptstore.tools.cli.targets import opened_step


@short_command(click.argument("target", type=TARGET))
def command(target: str, storage_options: dict[str, Any]) -> Answer:
    """Give the checkpoint STORE@STEP back to retention."""
    with opened_step(target, storage_options) as (store, step):
        store.unpin(step)
        return {"uri": store.uri, "step": step, "is_pinned": False}, f"step {step} is not pinned"
