"""Commit a drained checkpoint, with the manifest that was made when it was certified."""

from __future__ import annotations

from dataclasses import replace

from ckptstore.errors import CheckpointGone
from ckptstore.format.changes import Commit
from ckptstore.format.layout import MANIFEST_NAME, Attempt
from ckptstore.format.manifest import Manifest
from ckptstore.format.order import SaveOrder, void_of
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.runtime.beat import beat
from ckptstore.saving.commit import change_of, check_stored, entry_of, write_manifest
from ckptstore.saving.shard import Contents


def commit_prepared(job: Job, manifest: Manifest, data: bytes, *, save_number: int) -> Record:
    """Publish the stored files, with the exact bytes of an earlier manifest.

    May be called again after any error: nothing is committed twice. Returns the record of that save or, if it or a
    later save of this job is committed already, the record that `covering` finds. Raises CheckpointGone if that
    checkpoint is no longer live or a roll back has voided this save, and the errors of `commit`.
    """
    attempt, contents = Attempt.of(manifest.attempt), Contents(manifest.files, manifest.directories)
    check_stored(job.storage, job.config, attempt, contents.receipts, rank=job.group.rank, also=[MANIFEST_NAME])
    beat()
    write_manifest(job.storage, job.config, attempt, contents, data, counts=False)

    def change(newest: Record | None) -> Commit | None:
        state = job.claim(newest).state
        if (void := void_of(state.void, order)) is not None:
            raise CheckpointGone(f"{order} is void: the store was rolled back to {void.after}", step=manifest.step)
        return change_of(job, newest, entry, manifest.references) if state.save_number < save_number else None

    entry, order = replace(entry_of(manifest, data), save_number=save_number), SaveOrder(manifest.epoch, save_number)
    return job.log.append(change, commits=attempt) or covering(job, save_number, step=manifest.step)


def covering(job: Job, save_number: int, *, step: int) -> Record:
    """Return the live checkpoint of this epoch's save with that number, else that of the latest save after it.

    Raises CheckpointGone if there is neither.
    """
    newest = job.log.newest()
    found = job.log.readable(newest.state.live if newest else ())
    later = [record for record in found if record.entry.epoch == job.epoch and record.entry.save_number >= save_number]
    if not later:
        raise CheckpointGone(f"Save {save_number} of this job, or a later one, was committed and is removed", step=step)
    # A save that was skipped for a newer one is covered by that: the caller's state is not older than what is stored.
    own = [record for record in later if record.entry.save_number == save_number]
    return own[0] if own else max(later, key=lambda record: record.entry.order)
