"""A meeting as one call with two functions: what a test of meetings has most of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptstore.group import Group


def exchange(
    group: Group,
    tag: str,
    work: Callable[[], Any],
    join: Callable[[list[Any]], Any],
    *,
    step: int | None = None,
) -> Any:
    """Meet: every rank brings what `work` returns, and returns what `join` makes of it on the leader."""
    with group.meeting(tag, step=step) as meeting:
        values = meeting.gather(work())
        return meeting.tell(lambda: join(values))
