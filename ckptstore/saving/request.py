"""What the caller of a save asks for, checked before anything is written. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import InvalidInput, InvalidMetadata, InvalidStep
from ckptstore.format.encoding import dump_json
from ckptstore.format.layout import MAX_STEP
from ckptstore.format.manifest import Kind
from ckptstore.retention import as_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller of a save asks for, checked."""

    step: int
    kind: Kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """What must be the same on all ranks."""

    @staticmethod
    def of(
        *,
        step: Any,
        kind: Kind,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        exists: str,
        **options: Any,
    ) -> Request:
        """Check everything that can be checked without a storage."""
        if exists not in ("replace", "error"):
            raise InvalidInput(f"exists is {exists!r}, it is 'replace' or 'error'")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidMetadata(f"metadata is a {type(metadata).__name__}, not a mapping")
        dump_json(dict(metadata or {}))
        return Request(
            step=check_step(step),
            kind=kind,
            metrics=as_metrics(metrics),
            metadata=dict(metadata or {}),
            options={"kind": kind, "exists": exists, **options},
        )


def known_step(step: Any) -> int | None:
    """The step, None when it is none: `check_step` says so later, on all ranks."""
    try:
        return check_step(step)
    except InvalidStep:
        return None


def check_step(step: Any) -> int:
    """The step as an int; raises InvalidStep when it is not one, or negative."""
    try:
        value = operator.index(step)
    except TypeError:
        raise InvalidStep(f"the step is {step!r}, not an integer") from None
    if isinstance(step, bool) or not 0 <= value <= MAX_STEP:
        raise InvalidStep(f"the step is {step!r}, it must be an integer from 0 to {MAX_STEP}")
    return value
