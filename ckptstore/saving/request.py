"""The request of a save, checked before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptstore.errors import InvalidInput, InvalidMetadata
from ckptstore.format.encoding import dump_json, load_json
from ckptstore.format.layout import check_step
from ckptstore.format.manifest import Kind
from ckptstore.retention import as_metrics

Exists = Literal["replace", "error"]
"""The treatment of an earlier checkpoint of the same step: it goes to the trash, or the save is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request of a save."""

    step: int
    kind: Kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that must be the same on all ranks."""

    @staticmethod
    def of(
        *,
        step: Any,
        kind: Kind,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        exists: Exists,
        **options: Any,
    ) -> Request:
        """Check everything that can be checked without a storage."""
        if exists not in ("replace", "error"):
            raise InvalidInput(f"exists is {exists!r}, it is 'replace' or 'error'")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidMetadata(f"metadata is a {type(metadata).__name__}, not a mapping")
        numbers = as_metrics(metrics)
        dump_json(numbers, what="metrics")  # names that JSON or the format lacks
        # A copy down to its last list: the caller of an asynchronous save may go on changing what it gave.
        copied = load_json(dump_json(dict(metadata or {})), file="metadata")
        return Request(
            step=check_step(step),
            kind=kind,
            metrics=numbers,
            metadata=copied,
            options={"kind": kind, "exists": exists, **options},
        )
