"""The story of a checkpoint that Ray keeps: agree on one new directory of the run, fill it, and publish the manifest.

The files lie where Ray expects them, right below the directory of the run. There is no log: Ray's snapshot says what
there is, and Ray's retention deletes. Ray hears of a directory after its manifest is there, so what Ray has registered
is whole. An attempt is committed when its manifest is there. Nothing is ever deleted here but the files of an attempt
that is not: by the leader, which alone knows.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import (
    AccessDenied,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    StorageError,
    StorageFull,
    StoreNotShared,
)
from ckptstore.events import SaveFailed, emit
from ckptstore.format.layout import MANIFEST_NAME, Attempt, check_name, known_step
from ckptstore.format.manifest import Manifest
from ckptstore.group import Beat, Group
from ckptstore.group.base import LEADER
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.log.identity import KEPT_BY_RAY, read_or_create_store_json
from ckptstore.saving.commit import check_stored, manifest_of, write_manifest
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Shard
from ckptstore.saving.story import check_same_request, remove_files
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.retry import retrying
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore.ray")

_RAY_MARKER = ".validate_storage_marker"
"""The driver of a run writes it into the run's directory, to find out which workers see the same storage."""


@dataclass(frozen=True, slots=True)
class RayAttempt(Attempt):
    """One try at filling a directory of Ray's, which lies right below the run's."""

    directory: str = ""

    def __str__(self) -> str:
        return self.directory

    @property
    def mark(self) -> str:
        """What no other attempt has in its name."""
        return self.directory.rpartition("-")[2]

    @property
    def prefix(self) -> str:
        """See `Attempt.prefix`."""
        return f"{self.directory}/"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The directory of a run, open in one worker."""

    worker: Worker
    config: StoreConfig
    storage: Storage
    transfer: Transfer
    board: Storage
    """The same place, for messages between ranks: on a disk nobody waits for them to be durable."""
    _identity: list[str] = field(default_factory=list)

    @staticmethod
    def open(
        worker: Worker,
        *,
        storage_options: Mapping[str, Any] | None = None,
        rank_timeout_seconds: float | None = None,
    ) -> Run:
        """The run of this worker. Raises StoreNotShared when this node does not see what the driver wrote there."""
        config = StoreConfig.from_env(rank_timeout_seconds=rank_timeout_seconds)
        place = place_of(worker.filesystem, worker.run_path, storage_options=storage_options)
        storage = place.open(config)
        try:
            storage.stat(_RAY_MARKER)
        except FileMissing:
            raise StoreNotShared(
                f"Rank {worker.rank} does not see at {storage.uri} what the driver wrote there",
                rank=worker.rank,
                hint="Give RunConfig a storage_path that all nodes share",
            ) from None
        transfer = Transfer(storage, config=config.transfer, retry=config.retry, rank=worker.rank)
        board = place.open(config, durable=False)
        return Run(worker=worker, config=config, storage=storage, transfer=transfer, board=board)

    def store_id(self) -> str:
        """Leader: who this directory is. Raises InvalidInput where a log of ckptstore keeps the checkpoints."""
        if not self._identity:
            found = read_or_create_store_json(self.storage, kept_by=KEPT_BY_RAY, retry=self.config.retry)
            if found.kept_by != KEPT_BY_RAY:
                raise InvalidInput(
                    f"The checkpoints at {self.storage.uri} are kept by {found.kept_by}, not by Ray",
                    hint="Give the run another name, or ckptstore.ray.store() another root",
                )
            self._identity.append(found.store_id)
        return self._identity[0]


def store_checkpoint(
    run: Run, group: Group, shard: Shard, *, directory: str, beside: Callable[[], Mapping[str, bytes]] = dict
) -> RayAttempt:
    """Store the shards of all ranks in one new directory of the run, the manifest last. Collective in `group`.

    The name of the directory is `directory`, that of the leader, and a mark that it draws: no two attempts share one,
    so nothing that an earlier attempt or another job still writes gets into this one. An error on any rank is raised
    on all ranks; where its `committed` is False, the leader removes what was written. A rank that does not hear the
    leader looks for the manifest; where that is not there, `error.committed` is None. The leader writes what `beside`
    gives too; it is not in the manifest.
    """
    request, attempt, told = _agree(run, group, shard, directory)

    def join(stored: list[bytes], beat: Beat) -> bytes:
        contents = shard.join(attempt, stored, beat)
        world_size = run.worker.world_size
        manifest = manifest_of(request, attempt, contents, store_id=run.store_id(), world_size=world_size)
        check_stored(run.storage, attempt, contents.receipts)
        beat()
        for name, data in beside().items():
            run.storage.write(attempt.key(name), [memoryview(data)])
        try:
            write_manifest(run.storage, run.config, attempt, contents, manifest)
        except StorageError as error:
            if not isinstance(error, AccessDenied | StorageFull):  # these are answers; else it may be there, or come
                error.committed = None
            if error.committed is False or not _is_committed(run, attempt):
                raise
        return b""

    lane = group.lane(attempt.mark)  # a name that a caller gave is too long for messages, or has slashes
    try:
        lane.exchange("store for Ray", lambda beat: shard.store(attempt, told, beat), join)
    except CkptstoreError as error:
        error.at(step=attempt.step)
        if error.committed is None and _is_committed(run, attempt):
            logger.warning("step %d is stored, though this rank did not hear of it: %s", attempt.step, error)
            return attempt
        emit(SaveFailed(step=attempt.step, rank=run.worker.rank, error=str(error)))
        if group.rank == LEADER and error.committed is False:
            remove_files(run.storage, attempt)
        raise
    finally:
        lane.close()
    return attempt


def _is_committed(run: Run, attempt: RayAttempt) -> bool:
    """Whether the manifest of this attempt is there, for who does not know."""
    key = attempt.key(MANIFEST_NAME)
    try:
        data = retrying(run.config.retry, f"read {key}", lambda: run.storage.read(key))
        found = Manifest.decode(data, file=key)
    except CkptstoreError:
        return False
    return found.attempt == attempt.directory and found.step == attempt.step


def _agree(run: Run, group: Group, shard: Shard, directory: str) -> tuple[Request, RayAttempt, bytes]:
    """One exchange before any byte moves: who has what, is there room, and where does it go."""
    asked: list[Request] = []

    def describe(_beat: Beat) -> bytes:
        request, description = shard.describe()
        asked.append(request)
        head = {"step": request.step, "options": dict(request.options), "directory": check_name(directory)}
        return json.dumps(head).encode() + b"\n" + description

    def agree(parts: list[bytes], _beat: Beat) -> bytes:
        heads, descriptions = zip(*(_unpacked(part) for part in parts), strict=True)
        check_same_request(heads)
        run.store_id()
        agreed = shard.agree(descriptions)
        _check_room(run.storage, agreed.size_bytes)
        return json.dumps({"directory": _marked(heads[0]["directory"])}).encode() + b"\n" + agreed.told

    head, told = _unpacked(group.exchange("agree for Ray", describe, agree, step=known_step(shard.step)))
    return asked[0], RayAttempt(asked[0].step, 0, "", head["directory"]), told


def _marked(directory: str) -> str:
    """The name of a new attempt. A name that looks free is none: an attempt that failed may write into it later, and
    who keeps no log has nothing that would refuse it. Raises InvalidName where the mark makes the name too long."""
    return check_name(f"{directory}-{secrets.token_hex(8)}")


def _check_room(storage: Storage, needed_bytes: int) -> None:
    if isinstance(storage, Disk) and needed_bytes > (free_bytes := storage.free_bytes()):
        raise StorageFull(
            f"The checkpoint needs {needed_bytes} bytes, and {free_bytes} bytes are free at {storage.uri}",
            hint="Make room, or give CheckpointConfig a smaller num_to_keep",
        )


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = data.partition(b"\n")
    return json.loads(head), body


def default_directory(step: int) -> str:
    """How the directory of a step begins where nobody has given it a name."""
    return f"checkpoint_step-{step:010d}"
