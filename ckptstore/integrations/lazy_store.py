"""The store that a callback was given: an open one, or what it takes to open one in each process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore

logger = logging.getLogger("ckptstore")

_LOOK_SECONDS = 1.0

StoreGiven = CheckpointStore | str | os.PathLike[str] | Callable[[], CheckpointStore]
"""An open store, a URI, or a function without arguments that opens one. The last two can go to other processes."""


class GivenStore:
    """Opens the store when it is needed first, and closes only what it has opened itself.

    Anything with the methods of a `CheckpointStore` is taken for an open store. `keywords` are those of `open_store`.
    """

    def __init__(self, given: StoreGiven, keywords: Mapping[str, Any]) -> None:
        self._given = given
        self._keywords = dict(keywords)
        self._opened: CheckpointStore | None = None
        if keywords and not isinstance(given, str | os.PathLike):
            raise InvalidInput(
                f"{', '.join(sorted(keywords))}: only a store that is given by its URI takes keywords of open_store",
                hint="Give them where the store is opened",
            )
        if not (isinstance(given, str | os.PathLike) or callable(given) or callable(getattr(given, "save", None))):
            raise InvalidInput(f"store is a {type(given).__name__}, it is an open store, a URI or a function")

    def get(self) -> CheckpointStore:
        """The open store; opened anew after `close`."""
        if self._opened is not None:
            return self._opened
        given = self._given
        if isinstance(given, str | os.PathLike):
            self._opened = open_store(given, **self._keywords)
        elif isinstance(given, CheckpointStore) or callable(getattr(given, "save", None)):
            return given  # type: ignore[return-value]
        else:
            self._opened = given()
        return self._opened

    def settle(self) -> None:
        """With a fast tier: bring the newest checkpoint into the store, so that what is asked of the store next knows
        of it. Collective. Given up, with a warning, when the store does not answer, or the time after SIGTERM is over.
        """
        store = self._has_tier()
        if store is None:
            return
        while not store.finish_by(None if store.stop_requested else _LOOK_SECONDS):
            health = store.health()
            if store.stop_requested or health.away_seconds is not None or health.draining is health.waiting is None:
                why = health.error or "its time was over"
                logger.warning("the newest checkpoint is on the disks of the nodes, and not in the store yet: %s", why)
                return

    def abandon(self, error: BaseException) -> None:
        """The training has ended with an error, and other ranks may not come. Nothing is raised: that error says more.

        After a SIGTERM that the store knows of, what is in flight has the seconds that are left. What is on the disks
        of the nodes stays there. A store with a fast tier that was opened here is closed: its thread and connections
        would go on else, as long as the program does.
        """
        store = self._opened or (self._given if isinstance(self._given, CheckpointStore) else None)
        try:
            if store is not None and store.stop_requested:
                store.finish_by()
            if self._opened is not None and self._has_tier() is not None:
                opened, self._opened = self._opened, None
                opened.__exit__(type(error), error, error.__traceback__)
        except CkptstoreError as failure:
            logger.warning("a save has failed too: %s", failure)

    def _has_tier(self) -> CheckpointStore | None:
        """The store, if it is open and has a fast tier."""
        store = self._opened or self._given
        if not isinstance(store, CheckpointStore) or job_of(store).tier is None:
            return None
        return store

    def close(self) -> None:
        """Close the store if it was opened here. Collective where a save was."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
