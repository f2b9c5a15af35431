"""The store of a callback: an open one, or the means to open one in each process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore

logger = logging.getLogger("ckptstore")

_LOOK_SECONDS = 1.0

StoreSource = CheckpointStore | str | os.PathLike[str] | Callable[..., CheckpointStore]
"""An open store, a URI, or a function that opens one. The last two can go to other processes."""


class LazyStore:
    """Opens the store on first use, and closes only a store that it opened itself.

    Anything with the methods of a `CheckpointStore` counts as an open store. `keywords` are those of `open_store`, or
    of the function that opens one.
    """

    def __init__(self, source: StoreSource, keywords: Mapping[str, Any]) -> None:
        self._source = source
        self._keywords = dict(keywords)
        self._opened: CheckpointStore | None = None
        if not (isinstance(source, str | os.PathLike) or callable(source) or callable(getattr(source, "save", None))):
            raise InvalidInput(f"store is a {type(source).__name__}, it is an open store, a URI or a function")
        if not (isinstance(source, str | os.PathLike) or _takes(source, keywords)):
            raise InvalidInput(
                f"{', '.join(sorted(keywords))}: only a URI, or a function with these keywords, takes them",
                hint="Give them where the store is opened",
            )

    def get(self) -> CheckpointStore:
        """Return the open store; reopen it after `close`."""
        if self._opened is not None:
            return self._opened
        source = self._source
        if isinstance(source, str | os.PathLike):
            self._opened = open_store(source, **self._keywords)
        elif isinstance(source, CheckpointStore) or callable(getattr(source, "save", None)):
            return source  # type: ignore[return-value]
        else:
            self._opened = source(**self._keywords)
        return self._opened

    def settle(self) -> None:
        """Bring the newest fast checkpoint into the store, so that later calls find it there. Collective.

        Gives up with a warning when the store does not answer, or the time after SIGTERM is over. Does nothing without
        a fast tier.
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
        """Handle a training that ended with an error, after which other ranks may not come. Raises nothing.

        After a SIGTERM that the store has seen, saves in flight get the remaining seconds. Fast checkpoints stay on the
        nodes. A store with a fast tier that was opened by this object is closed.
        """
        store = self._opened or (self._source if isinstance(self._source, CheckpointStore) else None)
        try:
            if store is not None and store.stop_requested:
                store.finish_by()
            # Its thread and connections would otherwise live as long as the program.
            if self._opened is not None and self._has_tier() is not None:
                opened, self._opened = self._opened, None
                opened.__exit__(type(error), error, error.__traceback__)
        # Only logged: the error of the training says more.
        except CkptstoreError as failure:
            logger.warning("a save has failed too: %s", failure)

    def _has_tier(self) -> CheckpointStore | None:
        """Return the store, if it is open and has a fast tier."""
        store = self._opened or self._source
        if not isinstance(store, CheckpointStore) or job_of(store).tier is None:
            return None
        return store

    def close(self) -> None:
        """Close the store if this object opened it. Collective if a save was."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _takes(source: Any, keywords: Mapping[str, Any]) -> bool:
    """True if the source can be called with these keywords; an open store takes none."""
    if not keywords:
        return True
    if callable(getattr(source, "save", None)):
        return False
    try:
        signature(source).bind(**keywords)
    except (TypeError, ValueError):  # others, or a function whose signature nobody knows
        return False
    return True


def reports_to_ray(store: CheckpointStore) -> bool:
    """True if each save in this store is a report to Ray Train."""
    return getattr(store, "worker", None) is not None
