"""Look beside an empty place for the store that was perhaps meant."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from ckptstore.errors import CkptstoreError
from ckptstore.format.layout import CHECKPOINT_PREFIX, LOG_PREFIX, STORE_KEY
from ckptstore.log.reader import LogReader
from ckptstore.runtime.parallel import started
from ckptstore.storage.base import Disk, Storage

logger = logging.getLogger("ckptstore")

_MOST_LISTED = 1000
"""The most entries beside the place to look at: one request of most object stores."""
_MOST_READ = 3
"""The most stores whose logs are read."""
_WAIT_SECONDS = 5.0
_LIKE = 0.7
"""The likeness of two names, between 0 and 1, from which on one may be a misspelling of the other."""

Opener = Callable[[str], Storage]
"""Opens the storage at another URI, with the options of this store."""


def full_neighbour(storage: Storage, open_at: Opener) -> str:
    """Return a sentence on the store beside this place that has checkpoints and the likest name, "" if none is found
    in a few seconds, or if the look fails. It is logged too, as a warning where the name may be a misspelling."""
    found: list[str] = []

    def look() -> None:
        with suppress(Exception):  # nobody waits for this, and no start may fail because of it
            found.extend(_look(storage, open_at))

    thread = started(look, name="ckptstore-beside")
    if thread is not None:
        thread.join(_WAIT_SECONDS)
    return found[0] if found else ""


def _look(storage: Storage, open_at: Opener) -> Iterator[str]:
    uri = storage.uri.rstrip("/")
    above, _, own = uri.rpartition("/")
    if not own or above.endswith("/") or (not above and not isinstance(storage, Disk)):
        return
    parent = open_at(above or "/")
    try:
        names = sorted(_names(parent) - {own}, key=lambda name: -_likeness(name, own))
    finally:
        parent.close()
    for name in names[:_MOST_READ]:
        neighbour = open_at(f"{above}/{name}")
        try:
            latest = LogReader(neighbour).latest()
        except CkptstoreError:
            continue
        finally:
            neighbour.close()
        if latest is not None:
            # Runs that differ by a number are runs of their own: a line is enough.
            is_typo = _likeness(name, own) >= _LIKE and re.sub(r"\d", "", name) != re.sub(r"\d", "", own)
            said = f"{neighbour.uri}, beside it, has step {latest.entry.step}"
            logger.log(
                logging.WARNING if is_typo else logging.INFO,
                "there is no checkpoint at %s, so training begins anew; %s",
                storage.uri,
                said,
            )
            yield said
            return


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name.casefold(), other.casefold()).ratio()


def _names(parent: Storage) -> set[str]:
    """Return the names of the stores right below a place, as far as a bounded listing shows them."""
    if isinstance(parent, Disk):
        top = parent.local_path("")
        return {path.name for path in islice(top.iterdir(), _MOST_LISTED) if (path / STORE_KEY).is_file()}
    marks = tuple(f"/{mark}" for mark in (STORE_KEY, LOG_PREFIX, CHECKPOINT_PREFIX))
    found = set[str]()
    for file in islice(parent.list(""), _MOST_LISTED):
        name, slash, rest = file.key.partition("/")
        if f"{slash}{rest}".startswith(marks):
            found.add(name)
    return found
