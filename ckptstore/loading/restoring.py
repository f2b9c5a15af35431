"""Restore a checkpoint from the trash: make it live again, as long as all its files exist.

The files are checked first, and the record is written last. A prune writes a record before it deletes anything, and
only one of two records can follow the same state. So once the record of the restore is written, no prune has begun on
these files, and none will.
"""

from __future__ import annotations

from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput, StoreMissing
from ckptstore.format.changes import Restore
from ckptstore.format.layout import check_step
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.log import Log
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_store_json


def restore(job: Job, step: int, *, number: int | None = None, pin: bool = True) -> Record:
    """Make the checkpoint of `step` live again, and return the record that committed it; see `Catalogue.restore`.

    With `pin` the same record pins it. Raises CheckpointGone also if a prune was faster; StoreMissing; StoreFenced.
    """
    step = check_step(step)
    check_has_trash(job)
    log = job.log
    found = _in_trash(log, log.newest(), step, number)
    files = files_of(job, found)
    try:
        files.check_complete(files.read_manifest()[0])
    except (CheckpointGone, CheckpointDamaged):
        _in_trash(log, log.newest(), step, found.number)  # raises CheckpointGone if a prune has begun to delete it
        raise

    def change(newest: Record | None) -> Restore:
        return Restore((_in_trash(log, newest, step, found.number).number,), pin, job.epoch)

    return log.annotated([found], log.append(change))[0]


def check_has_trash(job: Job) -> None:
    """Raise StoreMissing without a store, and InvalidInput if Ray keeps the checkpoints."""
    uri = job.storage.uri
    identity = read_store_json(job.storage)
    if identity is None:
        raise StoreMissing(f"There is no store at {uri}")
    if identity.kept_by != KEPT_BY_CKPTSTORE:
        raise InvalidInput(
            f"The checkpoints at {uri} are kept by Ray, which has no trash: what it dropped is deleted",
            hint="Raise CheckpointConfig(num_to_keep=...), or let ckptstore keep them: ckptstore.ray.store()",
        )


def _in_trash(log: Log, newest: Record | None, step: int, number: int | None) -> Record:
    """Return the record of the checkpoint to restore, as of the newest record. Raises as `restore` does."""
    state = newest.state if newest else None
    live = [record.number for record in log.records(state.live if state else ()) if record.entry.step == step]
    trashed = log.records(sorted(state.trash) if state else ())
    found = [record for record in trashed if record.entry.step == step and number in (None, record.number)]
    if state is not None and live:  # what it was before it was thinned, or by its number any other form of it
        places = {state.place(other) for other in live}
        is_exchange = number is not None or state.thinned.keys() >= set(live)
        found = [record for record in found if is_exchange and {state.place(record.number)} == places]
    if live and not found:
        raise InvalidInput(
            f"Step {step} is live, so nothing was restored",
            hint="Where it was saved twice and you want the other one, roll back to an earlier step first",
        )
    if not found:
        what = f"step {step}" if number is None else f"step {step} with number {number}"
        there = ", ".join(f"{record.entry.step} (number {record.number})" for record in trashed[-10:]) or "nothing"
        raise CheckpointGone(f"There is no checkpoint of {what} in the trash any more; there is: {there}", step=step)
    return found[-1]
