"""Several stores in one document, which is still made when some of them cannot be read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckptstore.errors import CkptstoreError
from ckptstore.tools.report.document import Document, SeenStore
from ckptstore.tools.report.gather import Sighting, unseen


@dataclass(slots=True)
class Overview:
    """Stores that are looked at together, once or again and again."""

    sightings: Sequence[Sighting]
    command: str
    """The command line, without secrets."""
    is_live: bool = False
    """True if somebody will look again."""
    errors: dict[str, CkptstoreError] = field(default_factory=dict)
    """By URI, why stores could not be read at the last look."""
    _seen: dict[int, SeenStore] = field(default_factory=dict)

    def look(self) -> Document:
        """Return what all stores hold now.

        A store that cannot be read has the error as its trouble; if it could be read before, beside what was seen then.
        """
        self.errors.clear()
        stores = tuple(self._look_at(at, sighting) for at, sighting in enumerate(self.sightings))
        return Document(created_at=time.time(), command=self.command, live=self.is_live, stores=stores)

    def _look_at(self, at: int, sighting: Sighting) -> SeenStore:
        try:
            self._seen[at] = sighting.look()
        except CkptstoreError as error:
            self.errors[sighting.store.uri] = error
            before = self._seen.get(at)
            if before is None:
                return unseen(sighting.store.uri, error, num_trees=sighting.num_trees)
            text = f"this is what was seen before: now the store cannot be read: {error.message}"
            return replace(before, health=replace(before.health, trouble=(text, *before.health.trouble)))
        return self._seen[at]
