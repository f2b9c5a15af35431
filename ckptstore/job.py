"""A job: what one process knows of a store while it works on it, and how it claims the store before it writes."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, cast

from ckptstore.config import StoreConfig
from ckptstore.errors import (
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    StoreFenced,
    StoreMissing,
    StoreNotShared,
)
from ckptstore.events import PruneFailed, ResumeForgotten, emit
from ckptstore.format.changes import Claim, StoreState
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, Attempt, check_step
from ckptstore.format.record import Record
from ckptstore.group import Group, check_shared, find_group
from ckptstore.group.base import GroupOfParent
from ckptstore.log import SALVAGE_HINT, Log
from ckptstore.log.identity import read_or_create_identity
from ckptstore.retention import Candidate, Policy
from ckptstore.runtime.beat import beat
from ckptstore.runtime.fork import in_forked_child
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.retry import retrying
from ckptstore.storage.second_look import looked_twice
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")


class Tier(Protocol):
    """A place to which checkpoints go before the store, and what it adds to a job: see `ckptstore.fast.guest`.

    It knows the rooms above this one, and they know what it gives them.
    """

    @property
    def is_open(self) -> bool:
        """True once the ranks have met for it."""

    def candidates(self, job: Job, order: object, *, is_loaded: bool) -> Any:
        """Claim the store, and find all that a job can go on from: `loading.newest.Candidates`. Collective.

        None where the order in which checkpoints are to be tried knows of the store alone.
        """

    def saver(self, job: Job, background: Any) -> Any:
        """Return the `saving.save_state.StateSaver` of a job."""

    def near(self, job: Job) -> Sequence[Any]:
        """Return what this process can use without the others, the oldest first: `catalogue.Near`."""


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
    tier: Tier | None = None
    """None where saves go to the store directly."""
    is_fenced: bool = False
    """Whether this process knows that a later job has claimed the store."""
    is_closed: bool = False
    _claim: tuple[int, str] | None = None
    """Number and SHA-256 of the record of the claim."""
    highest_save_number: int = 0
    """The highest number of a save of this epoch that this process knows of; the leader gives them."""
    _store_id: str = ""
    _group: Group | None = None
    _is_checked: bool = False
    _pruning: threading.Thread | None = None
    _at_close: ExitStack = field(default_factory=ExitStack)
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
            self._group = find_group(self.given_group, storage=self.storage, config=self.config)
            self.transfer.set_rank(self._group.rank)
        if not self._is_checked:
            # Once, also where the ranks did not meet: those that did would not come to a second time. A commit checks
            # too that what all ranks have stored is seen.
            self._is_checked = True
            try:
                check_shared(self._group, self.storage, config=self.config)
            except StoreNotShared:
                self._is_checked = False
                raise
        return self._group

    def check_open(self) -> None:
        """Raise InvalidInput when the store is closed."""
        if self.is_closed:
            raise InvalidInput(f"The store {self.storage.uri} is closed", hint="Open it again with open_store")

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0."""
        return self.group.rank == 0

    def claim(self, newest: Record | None) -> Record:
        """Leader: make sure that this job owns the store, and return the newest record. The others may wait long for
        it, on a storage that fails often: `beat` is the sign to them.

        Raises StoreFenced when a later job has claimed it since.
        """
        if self.epoch is None:
            self.log.try_creates()
            beat()
            self.store_id()

            def change(newest: Record | None) -> Claim:
                beat()
                if newest is None:
                    self._refuse_lost_log()
                return Claim(start_token=self.group.start_token, world_size=self.group.world_size)

            newest = self.log.append(change)
            assert newest is not None  # a claim is always written
            self.epoch, self.resume_from = newest.state.epoch, newest.state.resume_from
            self._claim = newest.number, newest.sha256
        elif newest is None or newest.state.epoch != self.epoch:
            found = newest.state.epoch if newest else 0
            self.is_fenced = True
            raise StoreFenced(
                f"A later job has claimed the store: writer epoch {found}, this job has {self.epoch}",
                hint="Stop this job, or start it again to take the store over",
            )
        return newest

    def _refuse_lost_log(self) -> None:
        """Raise StoreMissing when there are checkpoints and no log: a job would begin anew beside what it has saved."""

        def find() -> str | None:
            files = self.storage.list(CHECKPOINT_PREFIX)
            return next((file.key for file in files if file.key.endswith(f"/{MANIFEST_NAME}")), None)

        found = retrying(self.config.retry, f"list {CHECKPOINT_PREFIX}", find)
        if found is not None:
            raise StoreMissing(
                f"The log of the store at {self.storage.uri} is gone, and its checkpoints are not: {found}, for one",
                hint=SALVAGE_HINT,
            )

    def check_latest_there(self, newest: Record) -> None:
        """Leader: raise StoreMissing when the latest checkpoint has lost its manifest, without which nothing of it can
        be read, and this job has saved it: what was lost of earlier jobs a resume passes over. One request."""
        number = newest.state.latest
        if number is None:
            return
        (record,) = self.log.records([number])
        if record.entry.epoch != self.epoch:
            return
        key = record.entry.prefix + MANIFEST_NAME
        try:
            retrying(
                self.config.retry,
                f"stat {key}",
                lambda: looked_twice(self.storage, key, lambda: self.storage.stat(key)),
            )
        except FileMissing:
            again = self.log.newest()  # somebody may have removed it meanwhile, as it should be done
            if again is None or again.state.latest == number:
                raise StoreMissing(
                    f"{key} is gone, of the latest checkpoint (step {record.entry.step}): somebody has removed or "
                    f"replaced checkpoints at {self.storage.uri}",
                    file=key,
                    hint=SALVAGE_HINT,
                    committed=False,
                ) from None

    def claim_to_save(self, step: int) -> Record:
        """Leader: `claim`, and a warning when the first thing that a job does is to save over what it could go on from.

        Raises StoreFenced as `claim` does.
        """
        if self.epoch is not None:
            if isinstance(self.storage, Disk):  # elsewhere it is a request, and a commit looks
                self.log.check_there()
            return self.claim(self.log.newest())
        newest = self.claim(None)
        latest = self.log.records([] if newest.state.latest is None else [newest.state.latest])
        if latest and latest[0].entry.step >= step:
            emit(
                ResumeForgotten(
                    step=step,
                    latest_step=latest[0].entry.step,
                    hint="This job began anew. Call resume before training, or use another store",
                )
            )
        return newest

    def store_id(self) -> str:
        """The id of the store, created where there is none; read once. Raises InvalidInput where Ray keeps it."""
        if not self._store_id:
            self._store_id = read_or_create_identity(self.storage)
        return self._store_id

    def claimed(self) -> dict[str, Any]:
        """What the leader tells the other ranks after `claim`."""
        return {"epoch": self.epoch, "resume_from": self.resume_from, "claim": self._claim}

    def join_claim(self, told: Mapping[str, Any]) -> None:
        """Any rank: take over what the leader told."""
        self.epoch, self.resume_from = told["epoch"], told["resume_from"]
        self._claim = None if told["claim"] is None else tuple(told["claim"])

    def next_save_number(self, newest: StoreState | None = None) -> int:
        """Leader: the number of the next save of this epoch, above those of the saves that `newest` knows."""
        self.highest_save_number = self.highest_save_number + 1 if newest is None else self.peek_save_number(newest)
        return self.highest_save_number

    def peek_save_number(self, newest: StoreState) -> int:
        """Leader: what `next_save_number` will be, if no save is committed before."""
        return max(self.highest_save_number, newest.save_number) + 1

    def raise_on_all(self, error: CkptstoreError) -> NoReturn:
        """Raise it here, and on ranks that do not know of it in the call that they make now: no rank waits in vain."""

        try:
            with self.group.meeting("fail"):
                raise error
        except CkptstoreError:
            """What became of the meeting says less."""
        raise error

    def new_attempt(self, step: int) -> Attempt:
        """Leader, after `claim`: the name of a new attempt, which it tells the others. No other attempt has it."""
        assert self.epoch is not None  # the store is claimed before anything is written
        return Attempt(step, self.epoch, secrets.token_hex(4))

    def candidates(self, newest: Record | None, *, timed: bool = False) -> list[Candidate]:
        """The live checkpoints, as retention sees them."""
        return candidates(self.log, newest, timed=timed)

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

    def at_close(self, call: Callable[[], object]) -> None:
        """Call it when this job is closed, before anything else is given back. No save is in flight then."""
        self._at_close.callback(call)

    def close(self) -> None:
        """Wait for what runs in the background and give everything back."""
        self.is_closed = True
        self._at_close.close()
        with self._lock:
            pruning = self._pruning
        if pruning is not None:
            pruning.join()
        if self._group is not None:
            self._group.close()
        self.transfer.close()
        self.storage.close()


def candidates(log: Log, newest: Record | None, *, timed: bool) -> list[Candidate]:
    """The live checkpoints of a store as retention sees them, oldest first; `timed` if a policy compares times."""
    records = log.readable(newest.state.live if newest else ())
    times = log.commit_times(records) if timed else {}
    return [
        Candidate(
            number=record.number,
            step=record.entry.step,
            committed_at=times.get(record.number, math.nan),
            metrics=record.entry.metrics,
        )
        for record in records
    ]


def record_of_step(log: Log, newest: Record | None, step: int) -> Record:
    """The newest live checkpoint of a step. Raises CheckpointGone, which names others."""
    step = check_step(step)
    records = log.readable(newest.state.live if newest else ())
    found = [record for record in records if record.entry.step == step]
    if not found:
        shown = ", ".join(str(record.entry.step) for record in records[-10:]) or "none"
        raise CheckpointGone(f"There is no live checkpoint of step {step}; live ones: {shown}", step=step)
    return found[-1]
