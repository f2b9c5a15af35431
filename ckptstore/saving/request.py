"""The request of a save, checked before anything is written. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptstore.errors import InvalidInput, InvalidMetadata, InvalidStep
from ckptstore.format.encoding import dump_json, load_json
from ckptstore.format.layout import check_step
from ckptstore.format.manifest import Kind
from ckptstore.retention import as_metrics

logger = logging.getLogger("ckptstore")

Exists = Literal["replace", "error"]
"""The treatment of an earlier checkpoint of the same step: it goes to the trash, or the save is refused."""


_surprises: set[tuple[str, ...]] = set()


def is_new(*surprise: str) -> bool:
    """Return True the first time that this process asks: a line on a store is logged once, not with each save."""
    found = surprise not in _surprises
    _surprises.add(surprise)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request of a save."""

    step: int
    kind: Kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that must be the same on all ranks."""
    retention: str | None = None
    """The retention of this rank, None for none; that of rank 0 counts."""
    unlike: Mapping[str, str] = field(default_factory=dict)
    """The metrics and metadata of which ranks gave unlike values, each with a text that says which; see `joined`."""

    @staticmethod
    def of(
        *,
        step: Any,
        kind: Kind,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        exists: Exists,
        retention: str | None = None,
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
            retention=retention,
        )

    def offer(self) -> dict[str, Any]:
        """Return what this rank contributes to `joined`, as JSON."""
        found = {"step": self.step, "options": self.options, "metrics": self.metrics, "metadata": self.metadata}
        return {**found, "retention": self.retention}

    def joined(self, offers: Sequence[Mapping[str, Any]]) -> Request:
        """Return the one request of all ranks, from what each of them offers.

        A metric or an entry of metadata counts whichever rank gives it; of unlike values that of the lowest rank.
        Raises InvalidStep or InvalidInput, with both ranks, unless step and options are the same on all.
        """
        first = offers[0]
        for rank, other in enumerate(offers):
            if other["step"] != first["step"]:
                text = f"rank {rank} saves step {other['step']}, rank 0 step {first['step']}"
                raise InvalidStep(text, ranks=(0, rank))
            if other["options"] != first["options"]:
                text = f"rank {rank} asks for {other['options']}, rank 0 for {first['options']}"
                raise InvalidInput(text, ranks=(0, rank))
            if other["retention"] not in (None, first["retention"]):
                text = f"rank {rank} opened the store with {other['retention']}, rank 0 with {first['retention']}"
                raise InvalidInput(text, ranks=(0, rank), hint="Give the same on all ranks, or on rank 0 alone")
        unlike: dict[str, str] = {}
        metrics: dict[str, float] = {}
        metadata: dict[str, Any] = {}
        joined: list[tuple[str, dict[str, Any]]] = [("metrics", metrics), ("metadata", metadata)]
        for what, found in joined:
            givers: dict[str, int] = {}
            for rank, offer in enumerate(offers):
                for name, value in offer[what].items():
                    if givers.setdefault(name, rank) == rank:
                        found[name] = value
                    elif value != found[name] and repr(value) != repr(found[name]):  # a NaN equals a NaN
                        text = f"{found[name]!r:.80} on rank {givers[name]} and {value!r:.80} on rank {rank}"
                        unlike.setdefault(f"{name!r} of the {what}", text)
        return replace(self, metrics=metrics, metadata=metadata, unlike=unlike)

    def warn_of_unlike(self, store_uri: str) -> None:
        """Log each name under which ranks gave unlike values, once for a store."""
        for what, text in self.unlike.items():
            if is_new(store_uri, what):
                logger.warning("step %d: %s is %s: that of the lowest rank counts", self.step, what, text)
