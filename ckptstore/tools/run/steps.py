"""Choose the step of the next checkpoint of a folder, where its name does not say it for certain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptstore.catalogue import Catalogue, Entry
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import CkptstoreError
from ckptstore.tools.run.folders import Found, Home, home_of
from ckptstore.tools.run.rounds import NodeOffer


class Steps:
    """The steps of a store and the places in the folder that have them."""

    def __init__(self, store: Catalogue) -> None:
        self._store = store
        self._homes: dict[str, Home | None] = {}
        """The place of each checkpoint that was read, by its URI; None for one that came from no folder."""

    def home_of(self, checkpoint: Checkpoint) -> Home | None:
        """Return the place of a checkpoint in the folder; None if it came from none, or cannot be read."""
        if checkpoint.uri not in self._homes:
            try:
                metadata = files_behind(checkpoint).read_manifest()[0].metadata
                self._homes[checkpoint.uri] = home_of(metadata, step=checkpoint.step)
            except CkptstoreError:
                return None
        return self._homes[checkpoint.uri]

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of that place."""
        home = self.home_of(checkpoint)
        return None if home is None else home.name

    def choose(self, offer: NodeOffer) -> int:
        """Return the step for an offer.

        What is said for certain counts, unless another name has that step. A guess counts if it is above all others, or
        if the step belongs to that very name and other names have other numbers. Else the store counts on.
        """
        entries = self._store.entries()
        highest = max((entry.checkpoint.step for entry in entries), default=-1)
        holder = next((entry for entry in reversed(entries) if entry.checkpoint.step == offer.step), None)
        if offer.step is None:
            return highest + 1
        if holder is None:
            is_right = offer.is_exact or offer.step > highest
        else:
            is_right = self.name_of(holder.checkpoint) == offer.name and (offer.is_exact or offer.is_numbered)
        return offer.step if is_right else highest + 1

    def is_counted(self, entries: Sequence[Entry]) -> bool:
        """Return True if the latest one has another step than its name says."""
        newest = next((entry.checkpoint for entry in entries if entry.is_latest), None)
        home = None if newest is None else self.home_of(newest)
        return home is not None and newest is not None and home.step != newest.step


def grows(found: Iterable[Found]) -> bool:
    """Return True if guessed steps are the same kind of number in all names, and grow with time."""
    numbered = [(it.written_at_seconds, it.step, it.name) for it in found if it.step is not None and not it.is_exact]
    skeletons = {re.sub(r"\d+", "0", name) for _, _, name in numbered}
    steps = [step for _, step, _ in sorted(numbered)]
    return len(skeletons) < 2 and steps == sorted(set(steps))
