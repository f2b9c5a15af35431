"""Configure torch_checkpointing with a store, and agree on a start among the ranks of one job."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch.distributed
from torch_checkpointing.storage.base_storage import StorageConfig

from ckptstore.config import StoreConfig, TransferConfig
from ckptstore.errors import InvalidInput
from ckptstore.integrations.torch_checkpointing.drafts import JobStart
from ckptstore.integrations.torch_checkpointing.paths import PathReader
from ckptstore.integrations.torch_checkpointing.store_storage import StoreStorage
from ckptstore.log import Log
from ckptstore.retention import KeepAll, Policy, check_required
from ckptstore.runtime.torch_private import default_store
from ckptstore.storage.uri import parse_uri, redact
from ckptstore.transfer.opened import OpenedPlace, open_place

_alone: dict[tuple[int, str], JobStart] = {}
"""By process and store, the start of a process without other ranks: its managers are one job."""
_lock = threading.Lock()


@dataclass
class StoreStorageConfig(StorageConfig):
    """Stores checkpoints of torch_checkpointing in the store at `uri`: on a disk, or in any cloud that ckptstore knows.

    Create it on every rank, with the same values, and its manager after `init_process_group`. It may be pickled, as the
    asynchronous saver does. A job takes the store over with the first file that it writes: earlier writers are fenced,
    and can make nothing visible any more.

    Args:
        uri: as for `open_store`. Paths of checkpoints are relative to it, and end in the step: "step_100".
        mount: the beginning of all paths, where they are not relative to the store: mount="/ckpt" makes
            "/ckpt/step_100" the checkpoint "step_100".
        temp_dir_prefix: that of the writer's configuration.
        retention: which checkpoints stay live; all by default. It may rank by no metric, for there are none.
        grace_seconds, durable, engine, storage_options, memory_budget_bytes: as for `open_store`. The options travel in
            the pickle, and are shown nowhere.

    Raises InvalidInput for a bad value, InvalidMetric for a retention that needs metrics.
    """

    uri: str
    mount: str | None = None
    temp_dir_prefix: str = "tmp_"
    retention: Policy | None = None
    grace_seconds: float | None = None
    durable: bool | None = None
    engine: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    memory_budget_bytes: int | None = None
    _start: JobStart | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.uri = os.fspath(self.uri)
        parse_uri(self.uri)
        if not self.temp_dir_prefix or "/" in self.temp_dir_prefix:
            raise InvalidInput(f"temp_dir_prefix is {self.temp_dir_prefix!r}, it is the beginning of a name")
        if self.retention is not None and not isinstance(self.retention, Policy):
            raise InvalidInput(f"retention is {self.retention!r}, it is a policy such as KeepLatest(3)")
        check_required(self.policy, {}, missing="error")

    @property
    def policy(self) -> Policy:
        """The policy that keeps checkpoints live."""
        return KeepAll() if self.retention is None else self.retention

    @property
    def paths(self) -> PathReader:
        """The reader of paths."""
        return PathReader(self.mount, self.temp_dir_prefix)

    def create_storage(self) -> StoreStorage:
        """Open the store. Writes nothing, and waits for no rank."""
        return StoreStorage(self.opened(), self.paths, self.policy, self.job_start())

    def opened(self) -> OpenedPlace:
        """Open the store's root."""
        config = StoreConfig.from_env(
            grace_seconds=self.grace_seconds,
            transfer=TransferConfig.from_env(durable=self.durable, memory_budget_bytes=self.memory_budget_bytes),
        )
        return open_place(self.uri, config=config, storage_options=self.storage_options, engine=self.engine)

    def job_start(self) -> JobStart:
        """Return the start on which the ranks of this job agree: found on first use, and carried along by a pickle."""
        with _lock:
            if self._start is None and torch.distributed.is_available() and torch.distributed.is_initialized():
                self._start = self._of_group()
            return self._start or self._of_process()  # counts until there is a group

    def __getstate__(self) -> dict[str, Any]:
        if parse_uri(self.uri).scheme == "memory":
            raise InvalidInput(
                f"{redact(self.uri)} lives in the memory of this process, and the saver writes in another"
            )
        return {**self.__dict__, "_start": self.job_start()}

    def _of_process(self) -> JobStart:
        key = (os.getpid(), self.uri)
        if key not in _alone:
            _alone[key] = self._proposed()
        return _alone[key]

    def _of_group(self) -> JobStart:
        """Take over the start that the first rank proposes. No rank waits for another."""
        store = default_store()
        if store is None:
            raise InvalidInput("The ranks of torch.distributed have no key-value store", hint="Do not use MPI")
        proposed = self._proposed()
        key = f"ckptstore/torch_checkpointing/{sha256(self.uri.encode()).hexdigest()}"
        token, _, since = store.compare_set(key, "", f"{proposed.token} {proposed.since}").decode().partition(" ")
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return replace(proposed, token=token, since=int(since), rank=rank, world_size=world_size)

    def _proposed(self) -> JobStart:
        with closing(self.opened()) as place:
            newest = Log(place.storage).newest()
        return JobStart(token=f"tc-{secrets.token_hex(8)}", since=newest.number if newest else 0)
