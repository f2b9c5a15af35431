"""The targets of checkpoints that users save with `dcp.save` themselves: a directory on its own, or a place in a store.

    dcp.save(state_dict, storage_writer=StoreWriter(store.dcp_target(metrics={"loss": 0.3}), step=100))

The coordinator alone begins and finishes: `begin` returns the prefix of the keys of a new checkpoint, and `finish`
makes it visible once everything is stored. The other ranks write their files under the prefix that it sends. Targets
are pickled for `dcp.async_save` in a separate process. Nobody deletes the files of a save to a store that failed: torch
does not let a rank know when the others have ended, so they are garbage.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput, InvalidStep, StorageError
from ckptstore.format.layout import DCP_METADATA_NAME, MANIFEST_NAME, Attempt, check_step
from ckptstore.format.manifest import Manifest, Receipt, sorted_receipts
from ckptstore.format.timings import Timings
from ckptstore.group import SoloGroup
from ckptstore.group.base import LEADER
from ckptstore.job import Job, Start
from ckptstore.log import Log
from ckptstore.saving.commit import check_receipts, commit, tell, wait_for_files
from ckptstore.saving.log_publisher import LogPublisher, prune_behind
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer
from ckptstore.transfer.opened import OpenedPlace, open_place

_OWN_FILE = re.compile(r"(?:[0-9a-f]+/)?state-rank=\d{5,}-\d{2,}(?:-[0-9a-f]{8})?\.distcp")


class DirectoryTarget:
    """A directory that becomes one checkpoint: no log, no retention, readable by `Checkpoint.from_uri`."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the arguments; the directory is not opened yet."""
        self._given = os.fspath(uri)
        self._storage_options = storage_options
        self._config = StoreConfig.from_env()
        self.num_prefixes = self._config.num_prefixes
        """The number of directories over which the files of all ranks are spread."""
        self.apart: tuple[str, ...] = ()
        """The patterns of keys that get files of their own."""
        self._opened: OpenedPlace | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def uri(self) -> str:
        """The directory, without secrets."""
        return self.open()[0].uri

    def open(self) -> tuple[Storage, Transfer]:
        """Return the storage whose root is the directory, and its transfer."""
        if self._opened is None:
            self._opened = open_place(self._given, config=self._config, storage_options=self._storage_options)
        return self._opened.storage, self._opened.transfer

    def begin(self, step: int | None) -> str:
        """Remove the files that a failed save left. Raises InvalidInput when the directory holds a checkpoint: nothing
        is ever overwritten."""
        storage, _ = self.open()
        found = {file.key for file in storage.list("")}
        held = found & {MANIFEST_NAME, DCP_METADATA_NAME}
        if held:
            raise InvalidInput(f"{storage.uri} holds a checkpoint already: {min(held)}", hint="Give a new directory")
        storage.delete([key for key in found if key == INDEX_NAME or _OWN_FILE.fullmatch(key)])
        return ""

    def offer(self) -> dict[str, Any]:
        """Return what this rank alone knows of the checkpoint, as JSON: nothing."""
        return {}

    def finish(
        self,
        prefix: str,
        receipts: Sequence[Receipt],
        *,
        offers: Sequence[Mapping[str, Any]],
        timings: Callable[[], Timings] | None = None,
    ) -> None:
        """Write the manifest, last. Raises StorageError for a file that is missing: another save into the directory
        takes the files of this one for those that a failed save left."""
        storage, _ = self.open()
        stored = {file.key: file.size_bytes for file in storage.list(prefix)}
        try:
            seen = wait_for_files(storage, self._config, stored, prefix, receipts, rank=LEADER)
            check_receipts(seen, prefix, receipts)
        except StorageError:
            storage.delete([prefix + INDEX_NAME, prefix + DCP_METADATA_NAME])  # of this save; the other one needs them
            raise
        manifest = Manifest(
            store_id="",
            step=0,
            epoch=0,
            attempt=storage.uri.rstrip("/").rpartition("/")[2],
            kind="state",
            world_size=len(offers),
            created_at=time.time(),
            files=tuple(sorted_receipts(receipts)),
            extra={} if timings is None else {"timings": timings().to_json()},
        )
        storage.write(prefix + MANIFEST_NAME, [memoryview(manifest.encode())])
        if self._config.transfer.durable:
            storage.persist([prefix + MANIFEST_NAME])

    def close(self) -> None:
        """End the threads and connections."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


_claims: dict[str, Mapping[str, Any]] = {}
"""The claims that this process has made for jobs of other processes, by start token: each is looked for in the log
once."""


class StoreTarget:
    """A place in the store of a job. Pickled without the job, with its claim, or with the start to claim under."""

    def __init__(
        self,
        job: Job,
        *,
        in_turn: Callable[[], object],
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        """Create the target, with a copy of metrics and metadata; `in_turn` waits for saves that the store has in
        flight, and raises InvalidInput when the store is closed. Raises InvalidMetric, InvalidMetadata."""
        self.storage, self.config, self.policy, self.missing = job.storage, job.config, job.policy, job.missing
        self._request = Request.of(step=0, kind="state", metrics=metrics, metadata=metadata, exists="replace")
        self.job: Job | None = job
        self._claimed: Mapping[str, Any] = job.claimed()
        """The claim of the job, as it was when this was pickled."""
        self._start: Start | None = None
        """The start under which a process without the job claims the store; None if the job has."""
        self.in_turn: Callable[[], object] | None = in_turn
        self._transfer: Transfer | None = None
        self._begun: tuple[Request, Attempt, int] | None = None
        """The attempt, and the number of the newest record when it began."""
        self._started = 0.0

    def __getstate__(self) -> dict[str, Any]:
        job, more = self.job, {}
        if job is not None:
            more = {"_claimed": job.claimed(), "_start": job.shared_start() if job.epoch is None else None}
        return {**self.__dict__, **more, "job": None, "in_turn": None, "_transfer": None}

    @property
    def uri(self) -> str:
        """The URI of the store, without secrets."""
        return self.storage.uri

    @property
    def num_prefixes(self) -> int:
        """The number of directories over which the files of all ranks are spread."""
        return self.config.num_prefixes

    @property
    def apart(self) -> tuple[str, ...]:
        """The patterns of keys that get files of their own, because retention will drop them."""
        return self.policy.thins()

    def open(self) -> tuple[Storage, Transfer]:
        """Return the storage and its transfer."""
        if self.job is not None:
            self.job.check_open()
            return self.storage, self.job.transfer
        if self._transfer is None:
            self._transfer = Transfer(self.storage, config=self.config.transfer, retry=self.config.retry)
        return self.storage, self._transfer

    def offer(self) -> dict[str, Any]:
        """Return what this rank alone knows of the checkpoint, as JSON: its metrics and metadata."""
        return {"metrics": self._request.metrics, "metadata": self._request.metadata}

    def begin(self, step: int | None) -> str:
        """Coordinator: claim the store unless this job has, and name the attempt.

        Raises InvalidStep without a step, InvalidMetric when one that retention needs is missing, StoreFenced.
        """
        self._started = time.monotonic()
        if step is None:
            raise InvalidStep("A checkpoint in a store needs a step: StoreWriter(store.dcp_target(), step=...)")
        request = replace(self._request, step=check_step(step))
        if self.in_turn is not None:
            self.in_turn()
        job = self._alone(world_size=1)
        number = LogPublisher(job).claim(request).number
        if self.job is not None:
            self.job.join_claim(job.claimed())
        elif self._start is not None:
            _claims[self._start.token] = job.claimed()
        attempt = job.new_attempt(request.step)
        self._begun = request, attempt, number
        return attempt.prefix

    def finish(
        self,
        prefix: str,
        receipts: Sequence[Receipt],
        *,
        offers: Sequence[Mapping[str, Any]],
        timings: Callable[[], Timings] | None = None,
    ) -> None:
        """Coordinator: commit the files that all ranks stored, with the metrics and metadata of their `offers`; then
        prune.

        Raises InvalidInput when another checkpoint was committed since `begin`.
        """
        if self._begun is None:
            raise InvalidInput("finish without a begin: nothing was stored", hint="Use the target through dcp.save")
        request, attempt, number = self._begun
        request = request.joined([{**request.offer(), **offer} for offer in offers])
        request.warn_of_unlike(self.storage.uri)
        job = self._alone(world_size=len(offers))
        record = commit(job, request, attempt, Contents(receipts, timings=timings), after=number)
        tell(record, job.storage, rank=0, seconds=time.monotonic() - self._started)
        prune_behind(self.job or job)
        if self.job is None:
            job.wait_for_prune()  # nobody else does, and this process may end with the save

    def close(self) -> None:
        """Close the transfer that `open` made."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _alone(self, *, world_size: int) -> Job:
        """Return the coordinator as a separate job that agrees with nobody, since torch does that."""
        owner = self.job
        start, claimed = (owner.start, owner.claimed()) if owner else (self._start, self._claimed)
        if owner is None and start is not None:
            claimed = _claims.get(start.token, claimed)
        group = SoloGroup(start_token=start.token if start else None)
        group.world_size = world_size
        storage, transfer = self.open()
        log = owner.log if owner else Log(storage, single_writer=self.config.single_writer)
        alone = Job(
            storage=storage,
            log=log,
            transfer=transfer,
            config=self.config,
            policy=self.policy,
            missing=self.missing,
            given_group=group,
            start=start,
        )
        alone.join_claim(claimed)
        return alone


DcpTarget = DirectoryTarget | StoreTarget
"""A place for checkpoints, as `StoreWriter` takes it."""
