"""Judge the checkpoint that Ray hands back at a start: one of the store, a readable one of Ray's own, or neither.

A start that ignored Ray's checkpoint would silently train again from the beginning. So an unreadable one is an error
that says how to go on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.errors import CheckpointDamaged, CheckpointGone, FileMissing, InvalidInput, NoUsableCheckpoint
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.record import Record
from ckptstore.integrations.ray.kept_by_ray.wrapping import kept_files
from ckptstore.integrations.ray.pointer import pointed_place, read_pointer
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.storage.uri import parse_uri

logger = logging.getLogger("ckptstore.ray")

IGNORE_RAY = (
    "to leave it out on purpose, and begin with what the store has, if anything: ckptstore.ray.store(ignore_ray=True)"
)


Verdict = tuple[int | None, str]
"""The number of the store's live record to which Ray points, and the path in Ray's own directory to resume from
instead; None and "" for neither."""


def look(
    ray_checkpoint: Any, job: Job, *, prefers_ray: bool, storage_options: Mapping[str, Any] | None = None
) -> Verdict:
    """Decide about a checkpoint that Ray hands back, on the leader.

    Raises NoUsableCheckpoint, with the way out, when the store has nothing in its place.
    """
    newest = job.log.newest()
    live = newest.state.in_order() if newest else []
    try:
        pointer = read_pointer(ray_checkpoint, retry=RetryConfig.from_env())
    except InvalidInput:  # there is no pointer in it
        return _look_at_files(ray_checkpoint, job, live, prefers_ray, storage_options)
    except (CheckpointDamaged, FileMissing) as error:
        return _lost(ray_checkpoint, job, live, str(error))
    place = pointed_place(ray_checkpoint, pointer, {})  # its URI alone: nothing is opened
    root = parse_uri(place.uri).uri
    if pointer.number is None:
        logger.warning("what Ray hands back is passed over: the save of step %d failed", pointer.step)
        return None, ""
    if root != job.storage.uri:
        raise NoUsableCheckpoint(
            f"Ray hands back step {pointer.step} of another store, {root}; this one is {job.storage.uri}",
            hint=f"Open that one, ckptstore.ray.store({root!r}), or copy it with `ckptstore cp`; {IGNORE_RAY}",
            step=pointer.step,
        )
    number = newest.state.live_at(pointer.number) if newest else None
    if number == pointer.number:
        return number, ""
    why = "is not in the store any more" if number is None else job.log.records([number])[0].entry.thinned
    return _lost(ray_checkpoint, job, live, f"step {pointer.step} {why}")


def unknown_to_ray(ray_checkpoint: Any, job: Job, taken: int, *, is_of_run: bool) -> list[Record]:
    """Return the live records of the store up to the number `taken` that Ray has no pointer to, on the leader.

    Ray forgets reports that it had not fetched when a worker was killed. What it has is known by its last pointer.
    Where that leads elsewhere, `taken` alone is returned; without any, all records of a store that is the run's own.
    """
    newest = job.log.newest()
    live = newest.state.live.without(newest.state.thinned) if newest else ()  # those that Ray has had
    numbers = [number for number in live if number <= taken]
    if ray_checkpoint is None:
        return _readable(job, numbers if is_of_run else [taken])
    try:
        pointer = read_pointer(ray_checkpoint, retry=RetryConfig.from_env())
    except (InvalidInput, CheckpointDamaged, FileMissing):
        return _readable(job, [taken])
    if parse_uri(pointed_place(ray_checkpoint, pointer, {}).uri).uri != job.storage.uri:
        return _readable(job, [taken])
    if pointer.number is None:
        return [record for record in _readable(job, [taken]) if record.entry.step > pointer.step]
    return _readable(job, [number for number in numbers if number > pointer.number])


def _readable(job: Job, numbers: Sequence[int]) -> list[Record]:
    found: list[Record] = []
    for number in numbers:
        with suppress(CheckpointDamaged):  # training does not go on from that one
            found += job.log.records([number])
    return found


def _lost(ray_checkpoint: Any, job: Job, live: Sequence[int], reason: str) -> Verdict:
    """Fall back from a lost checkpoint to the others of the store. Raises NoUsableCheckpoint if there are none."""
    if not live:
        raise NoUsableCheckpoint(
            f"Ray hands back {ray_checkpoint.path}, which cannot be read: {reason}; and {job.storage.uri} has no "
            "checkpoint",
            hint=IGNORE_RAY[0].upper() + IGNORE_RAY[1:],
        )
    logger.warning("what Ray hands back, %s, is passed over: %s", ray_checkpoint.path, reason)
    return None, ""


def _look_at_files(
    ray_checkpoint: Any,
    job: Job,
    live: Sequence[int],
    prefers_ray: bool,
    storage_options: Mapping[str, Any] | None,
) -> Verdict:
    """Judge a directory of Ray's with files in it: stored by `ckptstore.ray.report`, or by Ray itself."""
    try:
        kept = kept_files(ray_checkpoint, StoreConfig.from_env(), storage_options=storage_options)
    except (CheckpointDamaged, CheckpointGone) as error:
        return _lost(ray_checkpoint, job, live, str(error))
    except InvalidInput as error:
        raise NoUsableCheckpoint(
            f"Ray hands back a checkpoint that no state can be loaded from: {error.message}",
            hint="Load the files of ray.train.get_checkpoint().as_directory() yourself, save them into the store, and "
            f"{IGNORE_RAY}",
        ) from error
    step = kept.read_manifest()[0].step
    if prefers_ray or not live:
        return None, ray_checkpoint.path
    for record in reversed(job.log.records(live)):
        with suppress(FileMissing):  # damaged: `resume` passes over it
            is_later = _stored_seconds(kept) > _stored_seconds(files_of(job, record))
            break
    else:
        return None, ray_checkpoint.path
    if (step > record.entry.step) == is_later or step == record.entry.step:
        logger.warning(
            "%s is the newer one of step %d that Ray hands back and step %d of the store",
            "the first" if is_later else "the second",
            step,
            record.entry.step,
        )
        return None, ray_checkpoint.path if is_later else ""
    raise NoUsableCheckpoint(
        f"Ray hands back step {step}, and the store has step {record.entry.step}: by their steps the one is newer, by "
        "the times at which they were stored the other",
        hint=f'To take that of Ray: ckptstore.ray.resume(..., prefer="ray"); {IGNORE_RAY}',
    )


def _stored_seconds(files: CheckpointFiles) -> float:
    """Return the time of storing, by the clock of the storage."""
    return files.storage.stat(files.prefix + MANIFEST_NAME).modified_seconds
