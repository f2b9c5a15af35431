"""Examine the store at a place: its log, the files of its checkpoints, and the list that Ray Train has of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.config import RetryConfig
from ckptstore.errors import CheckpointDamaged, CheckpointGone, CkptstoreError, StoreForked, UnsupportedVersion
from ckptstore.format.layout import CHECKPOINT_PREFIX, LOG_PREFIX, STORE_KEY
from ckptstore.integrations.ray.ray_snapshot import ROOT_NAME, SNAPSHOT_NAME, obstacle, read_snapshot, uris_in_run
from ckptstore.log import Log
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_store_json
from ckptstore.opening import open_store
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.retry import with_retries
from ckptstore.tools.doctor.finding import Finding

_RETRY = RetryConfig(retry_attempts=3, retry_deadline_seconds=15.0, retry_wait_max_seconds=2.0)
"""Somebody waits for the answer, and what fails three times is a finding."""


def examine_log(storage: Storage) -> Finding | str:
    """Check the chain of the log, and that a place with checkpoints has one."""
    storage = with_retries(storage, _RETRY)
    identity = read_store_json(storage)
    if identity is None or (identity.kept_by == KEPT_BY_CKPTSTORE and next(storage.list(LOG_PREFIX), None) is None):
        return _without_log(storage, is_store=identity is not None)
    log = Log(storage)
    problems, newest = log.verify_chain(), log.newest()
    if problems:
        hint = "The store can be read, not written; `ckptstore cp` makes a good one of what is live"
        raise StoreForked("; ".join(problems), hint=hint)
    if newest is None:
        return "a store without a record"
    state = newest.state
    return f"{newest.number} records, {len(state.live)} live, {len(state.trash)} in the trash, epoch {state.epoch}"


def _without_log(storage: Storage, *, is_store: bool) -> Finding | str:
    """Describe a place without `store.json` or a log. It is no new one if it has checkpoints: nothing finds them."""
    if next(storage.list(CHECKPOINT_PREFIX), None) is not None:
        lost = "log" if is_store else STORE_KEY
        hint = f"`ckptstore cp --salvage {storage.uri} DESTINATION` makes a store of the checkpoints that are whole"
        raise CheckpointDamaged(
            f"There are checkpoints, and the store has lost its {lost}: no job can resume", hint=hint
        )
    if is_store:
        return "a store without a record"
    hint = "The first save creates it. If there should be one, look at the spelling of the URI"
    return Finding("warning", "there is no store yet", hint)


def examine_checkpoints(uri: str, storage_options: Mapping[str, Any] | None, engine: str | None) -> str:
    """Compare the files of every live checkpoint with its manifest, by size; in a run that Ray keeps, of every one."""
    with open_store(uri, storage_options=storage_options, engine=engine, group="solo") as store:
        live = list(store) if store.exists() else []
        found: dict[str, Callable[[], object]] = {
            f"step {checkpoint.step}": partial(_check_files, checkpoint) for checkpoint in live
        }
        for one in [] if live else uris_in_run(job_of(store).storage) or []:
            opened = partial(Checkpoint.from_uri, one, storage_options=storage_options)
            found[one.rpartition("/")[2]] = opened
        damaged = {name: fault for name, check in found.items() if (fault := _fault(check))}
    if damaged:
        told = "; ".join(f"{name}: {why}" for name, why in islice(damaged.items(), 3))
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        whole = [name for name in found if name not in damaged]
        hint = "No job can resume"
        if whole:
            resumes = f"A job resumes from {whole[-1]}, the newest that has its files"
            hint = resumes if live else f"The newest that has its files is {whole[-1]}"  # Ray chooses by its own list
        raise CheckpointDamaged(f"{len(damaged)} of {len(found)} live ones are damaged: {told}{more}", hint=hint)
    if not found:
        return "there are none"
    return f"{len(found)} live, each has all its files with their sizes; `ckptstore verify --all` reads the bytes"


def _check_files(checkpoint: Checkpoint) -> None:
    files = files_behind(checkpoint)
    files.check_complete(files.read_manifest()[0])


def _fault(check: Callable[[], object]) -> str | None:
    """Return what makes a checkpoint unusable, None where nothing does."""
    try:
        check()
    except (CheckpointDamaged, CheckpointGone, UnsupportedVersion) as error:
        return error.message
    return None


def examine_ray_list(storage: Storage, storage_options: Mapping[str, Any] | None, engine: str | None) -> Finding | str:
    """Check Ray Train's list of checkpoints in the directory of a run, or of a store in one; "" elsewhere."""
    uri = storage.uri
    run = uri.removesuffix(f"/{ROOT_NAME}")
    try:
        with ExitStack() as stack:
            if run != uri:
                storage = stack.enter_context(
                    closing(open_storage(run, storage_options=storage_options, engine=engine))
                )
            snapshot = read_snapshot(storage)
            fault = "" if snapshot is None else obstacle(storage, snapshot)
    except CkptstoreError:  # it cannot be read here: the other checks say what can
        return ""
    if snapshot is None:
        return ""
    if not fault:
        return f"{len(snapshot.listed)} checkpoints"
    hint = f"In Python: ckptstore.ray.repair({run!r})"
    return Finding("failed", f"{SNAPSHOT_NAME}: {fault}. The run cannot start again", hint, CheckpointDamaged.code)
