"""Whether an attempt is committed, for who does not know."""

from __future__ import annotations

from ckptstore.errors import CkptstoreError
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.log import Log


def committed_record(log: Log, attempt: Attempt) -> Record | None:
    """The record that committed the attempt, for who does not know whether it was; None if there is none (yet), or the
    log cannot be read."""
    try:
        newest = log.newest()
        found = log.records([*newest.state.live, *newest.state.trash] if newest else ())
    except CkptstoreError:
        return None
    return next((record for record in found if record.entry.attempt == str(attempt)), None)
