"""The story of a checkpoint that Ray keeps: agree on one new directory of the run, fill it, and publish the manifest.

The files lie where Ray expects them, right below the directory of the run. There is no log: Ray's snapshot lists the
checkpoints, and Ray's retention deletes them. Ray gets a directory after its manifest exists, so a registered one is
whole. An attempt is committed when its manifest exists. Only the leader deletes files, of attempts that are not
committed, since it alone knows.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
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
from ckptstore.format.layout import MANIFEST_NAME, Attempt, check_name
from ckptstore.format.manifest import Manifest
from ckptstore.group import Group
from ckptstore.group.base import LEADER
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.log.identity import KEPT_BY_RAY, read_or_create_store_json
from ckptstore.runtime.beat import beat
from ckptstore.saving.commit import check_stored, manifest_of, write_manifest
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents, Decision
from ckptstore.saving.transaction import Destination, Ended
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore.ray")

RAY_MARKER = ".validate_storage_marker"
"""The driver of a run writes it into the run's directory, to find out which workers see the same storage."""


@dataclass(frozen=True, slots=True)
class RayAttempt(Attempt):
    """One try at filling a directory of Ray's, which lies right below the run's."""

    directory: str = ""

    def __str__(self) -> str:
        return self.directory

    @property
    def lane(self) -> str:
        """See `Attempt.lane`. A caller's name is too long for messages, or has slashes."""
        return str(self).rpartition("-")[2]

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

    @staticmethod
    def open(
        worker: Worker,
        *,
        storage_options: Mapping[str, Any] | None = None,
        rank_timeout_seconds: float | None = None,
        durable: bool | None = None,
    ) -> Run:
        """Open the run of this worker. Raises StoreNotShared when this node does not see the driver's files there."""
        config = StoreConfig.from_env(rank_timeout_seconds=rank_timeout_seconds)
        place = place_of(worker.filesystem, worker.run_path, storage_options=storage_options)
        storage = place.open(config, durable=durable)
        try:
            storage.stat(RAY_MARKER)
        except FileMissing:
            raise StoreNotShared(
                f"Rank {worker.rank} does not see at {storage.uri} what the driver wrote there",
                rank=worker.rank,
                hint="Give RunConfig a storage_path that all nodes share",
            ) from None
        transfer = Transfer(storage, config=config.transfer, retry=config.retry, rank=worker.rank)
        return Run(worker=worker, config=config, storage=storage, transfer=transfer)

    @cached_property
    def store_id(self) -> str:
        """The directory's id (leader only). Raises InvalidInput if a log keeps the checkpoints."""
        found = read_or_create_store_json(self.storage, kept_by=KEPT_BY_RAY)
        if found.kept_by != KEPT_BY_RAY:
            raise InvalidInput(
                f"The checkpoints at {self.storage.uri} are kept by {found.kept_by}, not by Ray",
                hint="Give the run another name, or ckptstore.ray.store() another root",
            )
        return found.store_id


@dataclass(frozen=True, slots=True)
class RayPublisher:
    """See `Publisher`; it publishes directories of the run, named like their attempts.

    The name of a directory is the leader's `directory`, and a mark that the leader draws: no two attempts share one, so
    nothing that an earlier attempt or another job still writes gets into this one. The leader also writes the files of
    `beside`, which are not in the manifest.
    """

    run: Run
    directory: str
    beside: Callable[[], Mapping[str, bytes]] = dict

    @property
    def destination(self) -> Destination:
        """See `Publisher.destination`: the directory of the run."""
        storage, rank = self.run.storage, self.run.worker.rank
        return Destination(storage, storage.uri, rank, removes=rank == LEADER)

    def begin(self, request: Request, decision: Decision) -> Mapping[str, Any]:
        """See `Publisher.begin`. Raises InvalidName, InvalidInput where a log keeps the checkpoints, StorageFull."""
        _ = self.run.store_id
        storage, needed_bytes = self.run.storage, decision.size_bytes or 0
        free_bytes = storage.free_bytes()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise StorageFull(
                f"The checkpoint needs {needed_bytes} bytes, and {free_bytes} bytes are free at {storage.uri}",
                hint="Make room, or give CheckpointConfig a smaller num_to_keep",
            )
        # Even a free name needs a mark: a failed attempt may write into it later, and no log would refuse that.
        return {"directory": check_name(f"{self.directory}-{secrets.token_hex(8)}")}

    def join(self, request: Request, begun: Mapping[str, Any]) -> RayAttempt:
        """See `Publisher.join`."""
        return RayAttempt(request.step, 0, "", begun["directory"])

    def publish(self, request: Request, attempt: Attempt, contents: Contents) -> Any:
        """See `Publisher.publish`: the manifest, last."""
        run = self.run
        check_stored(run.storage, run.config, attempt, contents.receipts, rank=LEADER)
        beat()
        for name, data in self.beside().items():
            run.storage.write(attempt.key(name), [memoryview(data)])
        store_id, world_size = run.store_id, run.worker.world_size
        manifest = manifest_of(request, attempt, contents, run.config, store_id=store_id, world_size=world_size)
        try:
            write_manifest(run.storage, run.config, attempt, contents, manifest.encode())
        except StorageError as error:
            if not isinstance(error, AccessDenied | StorageFull):  # these are final; else it may exist, or appear
                error.committed = None
            if error.committed is False or self._found(attempt) is None:
                raise
        return str(attempt)

    def outcome(self, lane: Group, attempt: Attempt, published: Any, end: Callable[[], Ended]) -> RayAttempt | None:
        """See `Publisher.outcome`. Emits nothing: Ray does not know of the checkpoint yet."""
        found = self._found(attempt) if published is None else RayAttempt(attempt.step, 0, "", published)
        if found is not None:
            end()
        return found

    def _found(self, attempt: Attempt) -> RayAttempt | None:
        """Return the attempt if its manifest exists, which commits it."""
        key = attempt.key(MANIFEST_NAME)
        try:
            found = Manifest.decode(self.run.storage.read(key), file=key)
        except CkptstoreError:
            return None
        is_it = found.attempt == str(attempt) and found.step == attempt.step
        return RayAttempt(attempt.step, 0, "", found.attempt) if is_it else None


def default_directory(step: int) -> str:
    """Return the beginning of the name of a step's directory, if the caller gives none."""
    return f"checkpoint_step-{step:010d}"
