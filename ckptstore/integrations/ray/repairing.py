"""Rebuild Ray's own list of a run's checkpoints from the run's directory: `ckptstore.ray.repair`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.boundary import boundary
from ckptstore.catalogue import job_of
from ckptstore.config import StoreConfig
from ckptstore.errors import CkptstoreError, FileMissing, InvalidInput, NoUsableCheckpoint, StorageError
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.record import Record
from ckptstore.integrations.ray.filesystem import StoragePlace, place_of
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RAY_MARKER
from ckptstore.integrations.ray.kept_by_ray.wrapping import check_whole, files_at
from ckptstore.integrations.ray.metrics import Score, numbers_of, plain_metrics, safe_metrics
from ckptstore.integrations.ray.pointer import POINTER_NAME, Pointer
from ckptstore.integrations.ray.ray_snapshot import ROOT_NAME, SNAPSHOT_NAME, Snapshot, obstacle, read_snapshot
from ckptstore.opening import open_store
from ckptstore.storage.base import Storage
from ckptstore.storage.uri import parse_uri

logger = logging.getLogger("ckptstore.ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The findings and the changes of `repair`."""

    fault: str
    """The reason why Ray could not read its list; "" when it could, and nothing was written."""
    kept: tuple[str, ...]
    """The directories of the checkpoints in the list, in the order of their commits; Ray hands back the last one."""
    steps: tuple[int | None, ...]
    """Their steps; None for those whose files Ray stored itself."""
    left_out: Mapping[str, str]
    """The directories that are not in the list, with the reasons."""
    unknown: tuple[str, ...]
    """Facts that could not be known, in sentences."""
    backup: str
    """The name of the file with the old list, in the run's directory; "" when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One directory for Ray's list."""

    directory: str
    step: int | None
    seconds: float
    """The time of storing: since the epoch, by the leader's clock, or by the storage's for files of Ray's own."""
    number: int
    """The number of its record in a store; 0 without one."""
    metrics: Mapping[str, Any]


@boundary
def repair(
    path: str,
    *,
    checkpoint_config: Any = None,
    whole: Collection[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Repair:
    """Rebuild Ray's list of a run's checkpoints if Ray cannot start the run from it.

    It may be torn, since the driver was killed while it wrote, or missing, or name directories that are gone. No run
    may use the directory meanwhile. The list is `checkpoint_manager_snapshot.json` in the run's directory. The readable
    part of the old one stays, and a copy of it as a file. Each other directory is taken in that holds a pointer to a
    live checkpoint of a store, or a whole checkpoint of `ckptstore.ray.report` or `upload_fn`. Nothing is deleted.
    Unknown facts are in `Repair.unknown`, and logged as a warning.

    Args:
        path: the run's directory, `<storage_path>/<run name>`: a path or a URI, with the query of Ray's too.
        checkpoint_config: that of the run's `RunConfig`, if it ranks checkpoints by a metric: the list has that order.
        whole: directories whose files Ray stored itself, and that you know to be whole. Nothing else can tell.
        storage_options: credentials and the like, in fsspec's names; also for a store with a root of its own.

    Raises InvalidInput if there is no run of Ray's or another version of Ray, NoUsableCheckpoint when nothing in the
    directory can be shown to be whole, StorageError when something cannot be read at present; nothing is written then.
    """
    place = _place_of_run(path, storage_options)
    config = StoreConfig.from_env()
    storage = place.open(config)
    try:
        snapshot = read_snapshot(storage)
        keys = {file.key for file in storage.list("")}
        directories = _directories(keys, snapshot)
        if snapshot is None and RAY_MARKER not in keys:
            raise InvalidInput(
                f"There is no run of Ray Train at {storage.uri}",
                hint="Give the run's own directory, <storage_path>/<run name>",
            )
        fault = "it is not there" if snapshot is None else obstacle(storage, snapshot)
        if snapshot is not None and not fault:
            return Repair(fault="", kept=(), steps=(), left_out={}, unknown=(), backup="")
        search = _Search(place, storage, config, snapshot, directories, set(whole), storage_options)
        found, left_out = search.run()
        name = getattr(checkpoint_config, "checkpoint_score_attribute", None)
        score = None if name is None else Score(name, checkpoint_config.checkpoint_score_order)
        return _rewritten(storage, snapshot, fault, found, left_out, score)
    finally:
        storage.close()


def _directories(keys: Collection[str], snapshot: Snapshot | None) -> dict[str, set[str]]:
    """Return the names of the files in each directory right below the run's, and in deeper ones that Ray has listed."""
    deeper = [item.directory for item in snapshot.listed if "/" in item.directory] if snapshot else []
    found: dict[str, set[str]] = {}
    for key in keys:
        listed = next((name for name in deeper if key.startswith(f"{name}/")), "")
        directory = listed or key.partition("/")[0]
        if directory not in (key, ROOT_NAME):
            found.setdefault(directory, set()).add(key[len(directory) + 1 :])
    return found


def _place_of_run(path: str, storage_options: Mapping[str, Any] | None) -> StoragePlace:
    """Return the place of the run. Ray puts options under its own names in the query of a URI."""
    if "://" in path and "?" in path:
        from pyarrow.fs import FileSystem

        filesystem, inner = FileSystem.from_uri(path)
        return place_of(filesystem, inner, storage_options=storage_options)
    return StoragePlace(parse_uri(path).uri, storage_options)


class _Search:
    """Examines every directory of the run."""

    def __init__(
        self,
        place: StoragePlace,
        storage: Storage,
        config: StoreConfig,
        snapshot: Snapshot | None,
        directories: Mapping[str, Collection[str]],
        whole: set[str],
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._place, self._storage, self._config = place, storage, config
        self._storage_options = storage_options
        self._directories, self._whole = directories, whole
        self._listed = {item.directory: item.metrics for item in snapshot.listed} if snapshot else {}
        self._live: dict[str, dict[int, Record]] = {}
        """The live checkpoints of each store that a pointer has named, by number."""

    def run(self) -> tuple[list[_Found], dict[str, str]]:
        """Return the directories for Ray's list, in the order of the commits; and the others, with the reasons."""
        found, left_out = [], {}
        for name in self._whole - self._directories.keys():
            raise InvalidInput(f"There is no directory {name!r} at {self._storage.uri}")
        for name, files in self._directories.items():
            try:
                found.append(self._look(name, files))
            except CkptstoreError as error:
                if isinstance(error, StorageError) and not isinstance(error, FileMissing):
                    raise  # it may be whole: another try, or other credentials, may show it
                left_out[name] = error.message
        in_one_log = len(self._live) == 1 and all(item.number for item in found)
        return sorted(found, key=lambda item: item.number if in_one_log else item.seconds), left_out

    def _look(self, name: str, files: Collection[str]) -> _Found:
        """Examine one directory. Raises an error with the reason why it cannot be listed."""
        step: int | None = None
        number = 0
        metrics: Mapping[str, Any] = {}
        if POINTER_NAME in files:
            record = self._record_of(Pointer.decode(self._storage.read(f"{name}/{POINTER_NAME}")))
            step, seconds, number = record.entry.step, record.entry.created_at, record.number
            metrics = {**record.entry.metrics, "ckptstore_step": step}
        elif MANIFEST_NAME in files:
            kept = files_at(self._storage, self._config, prefix=f"{name}/")
            check_whole(kept)
            manifest = kept.read_manifest()[0]
            step, seconds, metrics = manifest.step, manifest.created_at, manifest.metrics
        elif name not in self._listed and name not in self._whole:
            raise InvalidInput(f"Ray stored its {len(files)} files itself: whether they are all is not known")
        else:
            seconds = max(self._storage.stat(f"{name}/{file}").modified_seconds for file in files)
        metrics = self._listed.get(name, metrics)
        return _Found(directory=name, step=step, seconds=seconds, number=number, metrics=metrics)

    def _record_of(self, pointer: Pointer) -> Record:
        """Return the record of a pointer. Raises InvalidInput if it is no longer live."""
        if pointer.number is None:
            raise InvalidInput(f"the save of step {pointer.step} failed: {pointer.error}")
        if pointer.root not in self._live:
            self._live[pointer.root] = self._records_of(pointer.root)
        record = self._live[pointer.root].get(pointer.number)
        if record is None or record.entry.attempt != pointer.attempt:
            raise InvalidInput(f"step {pointer.step} is not in the store any more")
        return record

    def _records_of(self, root: str) -> dict[int, Record]:
        uri, options = root, self._storage_options
        if root == ROOT_NAME:
            uri, options = f"{self._place.uri.rstrip('/')}/{ROOT_NAME}", self._place.storage_options
        with open_store(uri, storage_options=options, group="solo") as store:
            log = job_of(store).log
            newest = log.newest()
            records = log.annotated(log.records(newest.state.live if newest else ()), newest)
            return {record.number: record for record in records}


def _rewritten(
    storage: Storage,
    snapshot: Snapshot | None,
    fault: str,
    found: Sequence[_Found],
    left_out: Mapping[str, str],
    score: Score | None,
) -> Repair:
    """Write the list, and a copy of the old one. Raises NoUsableCheckpoint rather than writing an empty list."""
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:5])
        raise NoUsableCheckpoint(
            f"Ray's list of checkpoints at {storage.uri} cannot be made anew ({fault}): no checkpoint can be shown to "
            f"be whole: {reasons or 'there is none'}",
            hint="Name those that you know to be whole, repair(path, whole=[...]); or remove "
            f"{SNAPSHOT_NAME} to begin anew",
        )
    data = _encoded(found, snapshot, score)
    backup = ""
    if snapshot is not None:
        backup = f"{SNAPSHOT_NAME}.{int(time.time())}.torn"
        _write(storage, backup, snapshot.text.encode())
    _write(storage, SNAPSHOT_NAME, data)
    unknown = tuple(_unknown(found, snapshot, left_out, score))
    for sentence in unknown:
        logger.warning("%s: %s", storage.uri, sentence)
    kept, steps = tuple(item.directory for item in found), tuple(item.step for item in found)
    return Repair(fault=fault, kept=kept, steps=steps, left_out=dict(left_out), unknown=unknown, backup=backup)


def _write(storage: Storage, key: str, data: bytes) -> None:
    storage.write(key, [memoryview(data)])
    storage.persist([key])


def _encoded(found: Sequence[_Found], snapshot: Snapshot | None, score: Score | None) -> bytes:
    """Return the list as the installed Ray writes it, by its own classes. Raises InvalidInput if Ray lacks them."""
    try:
        from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
            _CheckpointManagerState,
            _TrainingResultState,
        )
    except ImportError as error:
        raise InvalidInput(f"This version of Ray Train keeps no such list, or Ray is not installed: {error}") from error
    safe = {item.directory: safe_metrics(item.metrics, score=score) for item in found}
    results: Any = {
        item.directory: _TrainingResultState(checkpoint_dir_name=item.directory, metrics=safe[item.directory])
        for item in found
    }
    indices = {item.directory: index for index, item in enumerate(found)}
    names = list(results) if score is None else sorted(results, key=lambda name: _rank(safe[name], score))
    state: Any = _CheckpointManagerState(
        checkpoint_results=[results[name] for name in names],
        checkpoint_report_indices=[indices[name] for name in names],
        latest_checkpoint_result=results[found[-1].directory],
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=max(len(found), *(item.step or 0 for item in found)),
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    return bytes(state.json().encode())


def _rank(metrics: Mapping[str, Any], score: Score) -> float:
    """Return the key of Ray's order: the worst first; of equal ones the earlier."""
    value = numbers_of(plain_metrics(metrics))[score.name]
    return value if score.order == "max" else -value


def _unknown(
    found: Sequence[_Found], snapshot: Snapshot | None, left_out: Mapping[str, str], score: Score | None
) -> Iterator[str]:
    listed = {item.directory for item in snapshot.listed} if snapshot else set()
    made_up = [item for item in found if item.directory not in listed]
    if made_up:
        names = ", ".join(item.directory for item in made_up[:5])
        yield f"of the metrics of {names} the numbers that were saved with them are known, and no others"
    if score is None and any(item.metrics for item in found):
        yield (
            "the checkpoints are in the order of their commits. If the run ranks them by a metric, repair with "
            "checkpoint_config, or Ray takes the oldest for the worst"
        )
    yield "how many reports there were, and which checkpoints were validated or waited for it, is not known"
    for name, why in left_out.items():
        yield f"{name} is left out: {why}"
