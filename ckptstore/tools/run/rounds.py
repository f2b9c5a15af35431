"""Decide in a round of all nodes which checkpoint is committed next. Pure.

Each agent says what its folder has. A checkpoint is taken when every node whose folder has it says that it is finished,
and every node whose folder ever had one has this one too. Where a framework writes its marker after all ranks, one node
that has it knows the end for all. A node whose folder never had any is waited for a while, then
it counts as one that writes none. The oldest comes first, by step or, where steps are guesses, by time, since the
checkpoint that is committed last is the latest of the store. When the end is near only the newest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

LONELY_SECONDS = 30.0
"""The time that a checkpoint waits for nodes whose folder never had one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """A finished checkpoint that is not committed."""

    name: str
    step: int | None
    is_exact: bool = True
    """False if the step is a guess: then the store may count."""
    is_numbered: bool = True
    """True if other names of the folder have other guesses; else the number in it may be part of its name."""
    written_at_seconds: float = 0.0
    """The time of the last change of its files, since the epoch."""
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    waits_seconds: float = 0.0
    """Since this node saw it finished."""
    tells_all: bool = False
    """True if what shows the end on this node was written after all ranks of all nodes had written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The answer of one node."""

    offers: tuple[NodeOffer, ...] = ()
    committed: tuple[str, ...] = ()
    """Names that are finished on this node and need no commit."""
    unfinished: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    """Those of the unfinished that lack nothing, but nothing on this node shows their end."""
    is_hurried: bool = False
    has_ended: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the answer of another node, from its fields."""
        offers = tuple(NodeOffer(**offer) for offer in fields["offers"])
        lists = {name: tuple(fields[name]) for name in ("committed", "unfinished", "uncertain")}
        return cls(**{**fields, **lists, "offers": offers})

    def blocks(self, name: str, *, patience_is_over: bool, is_known: bool) -> bool:
        """Return True if the checkpoint of that name has to wait for this node; `is_known` if another one knows the
        end."""
        if name in self.unfinished:
            return not (is_known and name in self.uncertain)
        if name in self.committed or any(offer.name == name for offer in self.offers):
            return False
        has_any = bool(self.offers or self.committed or self.unfinished)
        return has_any or not (patience_is_over or self.has_ended or self.is_hurried)


def choose(views: Sequence[NodeView]) -> NodeOffer | None:
    """Return the checkpoint to commit now, as the first node that has it offers it; None when there is none."""
    offers: dict[str, NodeOffer] = {}
    for view in views:
        for offer in view.offers:
            offers.setdefault(offer.name, offer)
    same = {name: [it for view in views for it in view.offers if it.name == name] for name in offers}
    known = {name: any(it.tells_all for it in same[name]) for name in offers}
    waited = {name: any(it.waits_seconds >= LONELY_SECONDS for it in same[name]) for name in offers}
    is_exact = all(offer.is_exact for offer in offers.values())
    ready = sorted(
        (float(offer.step or 0) if is_exact else offer.written_at_seconds, name)
        for name, offer in offers.items()
        if not any(view.blocks(name, patience_is_over=waited[name], is_known=known[name]) for view in views)
    )
    if not ready:
        return None
    return offers[ready[-1 if any(view.is_hurried for view in views) else 0][1]]
