"""`ckptstore pin`: protect a checkpoint from retention."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.short import Answer, short_command
from ckptstore.tools.cli.targets import opened_step


@short_command(click.argument("target", type=TARGET))
def command(target: str, storage_options: dict[str, Any]) -> Answer:
    """Protect the checkpoint STORE@STEP from retention, until it is unpinned."""
    with opened_step(target, storage_options) as (store, step):
        store.pin(step)
        return {"uri": store.uri, "step": step, "is_pinned": True}, f"step {step} is pinned"
