"""What one check of a place found. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed", "unknown"]
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems that a machine loses when it starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    """What to do about it."""
    code: str = ""
    """The code of the error that made it fail, see `errors`."""
