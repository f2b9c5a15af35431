"""A job: what one process knows of a store while it works on it, and how it claims the store before it writes."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointGone, StoreFenced
from ckptstore.events import PruneFailed, emit
from ckptstore.fork import in_forked_child
from ckptstore.group import Beat, Group, check_shared, find_group
from ckptstore.group.base import GroupOfParent
from ckptstore.identity import read_or_create_identity
from ckptstore.layout import Attempt
from ckptstore.log import Log
from ckptstore.records import Claim, Record
from ckptstore.request import check_step
from ckptstore.retention import Candidate, Policy
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")


@dataclass(kw_only=True)
class Job:
    """One process of a job and its store. Methods that say "collective" are called by all ranks in the same order."""

    storage: Storage
    log: Log
    transfer: Transfer
    config: StoreConfig
    policy: Policy
    missing: str
    given_group: object = None
    epoch: int | None = None
    """The writer epoch that this job has claimed, None before its first collective call."""
    resume_from: int | None = None
    """The number of the checkpoint that was the latest when the store was claimed."""
    num_saves: int = 0
    """Attempts so far: with the start token it names the next one, the same on all ranks."""
    _store_id: str = ""
    _group: Group | None = None
    _pruning: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        in_forked_child(self, Job._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._group is not None:
            self._group = cast(Group, GroupOfParent(self._group))

    @property
    def group(self) -> Group:
        """The ranks of this job. Collective on first use: the group is fixed then, and the root is checked."""
        if self._group is None:
            group = find_group(self.given_group, storage=self.storage, config=self.config)
            try:
                check_shared(group, self.storage, config=self.config)
            except BaseException:
                group.close()
                raise
            self._group = group
        return self._group

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0."""
        return self.group.rank == 0

    def claim(self, newest: Record | None) -> Record:
        """Leader: make sure that this job owns the store, and return the newest record.

        Raises StoreFenced when a later job has claimed it since.
        """
        if self.epoch is None:
            self.log.try_creates()
            self.store_id()
            token, size = self.group.start_token, self.group.world_size
            newest = self.log.append(lambda _newest: Claim(start_token=token, world_size=size))
            assert newest is not None  # a claim is always written
            self.epoch, self.resume_from = newest.state.epoch, newest.state.resume_from
        elif newest is None or newest.state.epoch != self.epoch:
            found = newest.state.epoch if newest else 0
            raise StoreFenced(
                f"A later job has claimed the store: writer epoch {found}, this job has {self.epoch}",
                hint="Stop this job, or start it again to take the store over",
            )
        return newest

    def store_id(self) -> str:
        """The id of the store, created where there is none; read once. Raises InvalidInput where Ray keeps it."""
        if not self._store_id:
            self._store_id = read_or_create_identity(self.storage)
        return self._store_id

    def claimed(self) -> dict[str, Any]:
        """What the leader tells the other ranks after `claim`."""
        return {"epoch": self.epoch, "resume_from": self.resume_from}

    def join_claim(self, told: dict[str, Any]) -> None:
        """Any rank: take over what the leader told."""
        self.epoch, self.resume_from = told["epoch"], told["resume_from"]

    def exchange(
        self,
        tag: str,
        work: Callable[[Beat], Any],
        join: Callable[[list[Any], Beat], Any],
    ) -> Any:
        """`Group.exchange` with JSON values in place of bytes."""

        def encoded_join(parts: list[bytes], beat: Beat) -> bytes:
            return json.dumps(join([json.loads(part) for part in parts], beat)).encode()

        return json.loads(self.group.exchange(tag, lambda beat: json.dumps(work(beat)).encode(), encoded_join))

    def next_attempt(self, step: int, epoch: int) -> Attempt:
        """The directory of the next save. It follows from what all ranks know, so a restarted rank cannot mix in."""
        self.num_saves += 1
        return attempt_of(self.group.start_token, num_saves=self.num_saves, step=step, epoch=epoch)

    def candidates(self, newest: Record | None) -> list[Candidate]:
        """The live checkpoints, as retention sees them."""
        return candidates(self.log, newest)

    def prune_in_background(self, prune: Callable[[], object]) -> None:
        """Leader: delete what may be deleted, on a thread of its own; one at a time. Failures are told, not raised."""

        def run() -> None:
            try:
                prune()
            except Exception as error:  # the next commit tries again
                emit(PruneFailed(error=str(error)))

        with self._lock:
            if self._pruning is not None and self._pruning.is_alive():
                return
            self._pruning = threading.Thread(target=run, name="ckptstore-prune", daemon=True)
            self._pruning.start()

    def close(self) -> None:
        """Wait for what runs in the background and give everything back."""
        with self._lock:
            pruning = self._pruning
        if pruning is not None:
            pruning.join()
        if self._group is not None:
            self._group.close()
        self.transfer.close()
        self.storage.close()


def attempt_of(start_token: str, *, num_saves: int, step: int, epoch: int) -> Attempt:
    """The attempt that a job makes with its n-th save."""
    return Attempt(step, epoch, hashlib.sha256(f"{start_token}:{num_saves}".encode()).hexdigest()[:8])


def candidates(log: Log, newest: Record | None) -> list[Candidate]:
    """The live checkpoints of a store, as retention sees them, oldest first."""
    found = []
    for record in log.records(newest.state.live if newest else ()):
        entry = record.entry
        found.append(
            Candidate(number=record.number, step=entry.step, created_at=entry.created_at, metrics=entry.metrics)
        )
    return found


def record_of_step(log: Log, newest: Record | None, step: int) -> Record:
    """The newest live checkpoint of a step. Raises CheckpointGone, which names others."""
    step = check_step(step)
    records = log.records(newest.state.live if newest else ())
    found = [record for record in records if record.entry.step == step]
    if not found:
        shown = ", ".join(str(record.entry.step) for record in records[-10:]) or "none"
        raise CheckpointGone(f"There is no live checkpoint of step {step}; live ones: {shown}", step=step)
    return found[-1]
