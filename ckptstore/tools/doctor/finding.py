"""Run one check of a place, and describe its finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ckptstore.errors import CkptstoreError, StorageError

Status = Literal["ok", "warning", "failed", "unknown"]
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""The file systems whose contents are lost when a machine restarts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one check."""

    status: Status
    detail: str
    hint: str = ""
    """Advice for a finding that is not ok."""
    code: str = ""
    """The code of the error that made it fail, see `errors`."""
    name: str = ""
    """The name of the check; `finding_of` fills it in."""


def finding_of(name: str, check: Callable[[], Finding | str]) -> Finding:
    """Run a check. A text that it returns is the detail of a finding "ok"; an error that it raises gives "failed"."""
    try:
        found = check()
        return (
            replace(found, name=name) if isinstance(found, Finding) else Finding(name=name, status="ok", detail=found)
        )
    except CkptstoreError as raised:
        error = raised
    except OSError as raised:
        error = StorageError(f"{raised.strerror}: {raised.filename}")
    return Finding("failed", error.message, error.hint or "", error.code, name)
