"""`ckptstore rollback`: make an earlier checkpoint the latest."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.output import checkpoint_json
from ckptstore.tools.cli.short import Answer, short_command
from ckptstore.tools.cli.targets import opened_step


@short_command(click.argument("target", type=TARGET))
def command(target: str, storage_options: dict[str, Any]) -> Answer:
    """Make STORE@STEP the latest checkpoint: what was committed after it goes to the trash."""
    with opened_step(target, storage_options) as (store, step):
        before = {item.number: item.step for item in store}
        checkpoint = store.roll_back(step)
        after = {item.number for item in store}
        trashed = [found for number, found in before.items() if number not in after]
        lines = [f"step {step} is the latest"]
        if trashed:
            lines.append(f"in the trash: {', '.join(map(str, trashed))}; `ckptstore restore` brings them back")
        return {"checkpoint": checkpoint_json(checkpoint), "trashed_steps": trashed}, "\n".join(lines)
