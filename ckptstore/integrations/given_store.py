"""The store that a callback was given: an open one, or what it takes to open one in each process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore

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

    def close(self) -> None:
        """Close the store if it was opened here. Collective where a save was."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
