"""Add metrics to a checkpoint that is committed, such as those of an evaluation in another process."""

from __future__ import annotations

from ckptstore.errors import CheckpointGone, InvalidInput
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.job import record_of_step
from ckptstore.log.reader import LogReader


def place_of_step(log: LogReader, newest: Record | None, step: int) -> int:
    """Return the place of the newest live checkpoint of a step or, if there is none, of the newest in the trash.

    Raises CheckpointGone, which names live steps.
    """
    try:
        return record_of_step(log, newest, step).place
    except CheckpointGone:
        trashed = log.records(sorted(newest.state.trash, reverse=True) if newest else ())
        found = next((record for record in trashed if record.entry.step == step), None)
        if found is None:
            raise
        return found.place


def place_of(log: LogReader, newest: Record | None, uri: str, record: Record | None) -> int:
    """Return the place in this log of the checkpoint at a URI, whose `record` is known if it comes from a store.

    Without the record, those of all checkpoints are read. Raises InvalidInput if it is not in the log, CheckpointGone
    if it was deleted.
    """
    if record is not None:
        found = log.found([record.number])[0]
        if not isinstance(found, Record) or found.sha256 != record.sha256:
            raise InvalidInput(f"{uri} is a checkpoint of another store")
        return record.place
    attempt = Attempt.parse(uri.rpartition("/")[2])
    held = log.records([*newest.state.live, *newest.state.trash] if newest else ())
    place = next((item.place for item in held if item.entry.attempt == str(attempt)), None)
    if place is None:
        raise CheckpointGone(f"{uri} is neither live in this store nor in its trash")
    return place
