"""The job: one process's knowledge of a store while it works on it, and the claim of the store before it writes."""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from ckptstore.config import StoreConfig
from ckptstore.errors import (
    AccessDenied,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    StoreFenced,
    StoreMissing,
    StoreNotShared,
)
from ckptstore.events import PruneFailed, ResumeForgotten, emit
from ckptstore.format.changes import EMPTY, Annotate, Claim, StoreState
from ckptstore.format.entry import CheckpointEntry
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, Attempt, check_step
from ckptstore.format.record import Record
from ckptstore.group import Group, check_shared, find_group
from ckptstore.group.base import GroupOfParent, new_start_token
from ckptstore.log import SALVAGE_HINT, Log
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_or_create_identity, read_store_json
from ckptstore.log.reader import LogReader
from ckptstore.retention import Candidate, KeepAll, Missing, Policy
from ckptstore.runtime.beat import beat, beating
from ckptstore.runtime.fork import in_forked_child
from ckptstore.runtime.parallel import mapped, started
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.probe import is_server
from ckptstore.storage.retry import briefly
from ckptstore.storage.second_look import looked_twice
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")


_IDLE_SECONDS = 10.0
"""The longest wait in `close` for work that gives no sign of life."""
_PRUNE_SECONDS = 60.0


class Tier(Protocol):
    """A place to which checkpoints go before the store, and its additions to a job: see `extensions.tier.guest`."""

    # This room cannot import types of the rooms above it, so docstrings name them.

    @property
    def is_open(self) -> bool:
        """True once the ranks have met for the tier."""

    def candidates(self, job: Job, order: object, *, is_loaded: bool) -> Any:
        """Claim the store, and return the checkpoints to resume from, as `loading.newest.Candidates`. Collective.

        Return None if `order` can only order checkpoints of the store.
        """

    def saver(self, job: Job, background: Any) -> Any:
        """Return the `saving.save_state.StateSaver` of a job."""

    def near(self, job: Job) -> Sequence[Any]:
        """Return the checkpoints that this process can use without others, oldest first, as `loading.newest.Near`."""


class Start(NamedTuple):
    """A start of a job of which several processes may claim the store, each without the others."""

    token: str
    """The start token of their claims."""
    since: int
    """The number of a record before any of these claims; 0 for an empty log."""


@dataclass(kw_only=True)
class Job:
    """One process of a job and its store. Methods that say "collective" are called by all ranks in the same order."""

    storage: Storage
    log: Log
    transfer: Transfer
    config: StoreConfig
    policy: Policy
    missing: Missing
    given_group: object = None
    open_at: Callable[[str], Storage] | None = None
    """Opens the storage at another URI with the options of this one; None if they fit this one alone."""
    epoch: int | None = None
    """The writer epoch that this job has claimed; None before the claim."""
    resume_from: int | None = None
    """The number of the checkpoint that was the latest when the store was claimed; None if there was none."""
    start: Start | None = None
    """The start under which other processes claim the store for this job; None if none does."""
    tier: Tier | None = None
    """The fast tier; None if saves go to the store directly."""
    is_fenced: bool = False
    """True once this process knows that a later job has claimed the store."""
    is_closed: bool = False
    saves_left: int | None = None
    """The number of saves for which the disk has room, as a warning has last said; None without one."""
    unthinned: set[int] = field(default_factory=set)
    """The numbers of checkpoints that retention would thin, and which could not be."""
    _claim: tuple[int, str] | None = None
    """The number and SHA-256 of the record of the claim."""
    highest_save_number: int = 0
    """The highest number of a save of this epoch that this process knows; the leader assigns the numbers."""
    _store_id: str = ""
    _group: Group | None = None
    _is_checked: bool = False
    _pruning: threading.Thread | None = None
    _may_delete: bool = True
    _pruned_at: float = 0.0
    """The time of the last sign of life of the prune."""
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
        """The ranks of this job. Collective on first use, which fixes the group and checks that all see the root."""
        if self._group is None:
            self._group = find_group(self.given_group, storage=self.storage, config=self.config)
            self.transfer.set_rank(self._group.rank)
        if not self._is_checked:
            # Only once, even if the check fails: ranks on which it succeeded would not come a second time. A commit
            # also checks that the leader sees the files of all ranks.
            self._is_checked = True
            try:
                check_shared(self._group, self.storage, config=self.config)
            except StoreNotShared:
                self._is_checked = False
                raise
        return self._group

    def check_open(self) -> None:
        """Raise InvalidInput if the store is closed."""
        if self.is_closed:
            raise InvalidInput(f"The store {self.storage.uri} is closed", hint="Open it again with open_store")

    @property
    def is_leader(self) -> bool:
        """True if this process is rank 0."""
        return self.group.rank == 0

    @property
    def claimed_epoch(self) -> int:
        """The writer epoch, after the claim. Raises RuntimeError before it: nothing is written without one."""
        if self.epoch is None:
            raise RuntimeError("This job has not claimed the store")
        return self.epoch

    def claim(self, newest: Record | None) -> Record:
        """Leader: make sure that this job owns the store, and return the newest record. A claim that another process
        has made for this job counts.

        Raises StoreFenced if a later job has claimed the store since.
        """
        if self.epoch is None:
            if self.config.provenance:
                from ckptstore.program import provenance

                provenance()  # begins to look for the commit, so that it is known when a manifest is written
            self._try_creates()
            self.log.check_safe()  # before anything is written
            beat()  # on a storage that fails often, the other ranks may wait long
            self.store_id()

            made: list[Record] = []

            def change(newest: Record | None) -> Claim | None:
                if newest is None:
                    self._refuse_lost_log()
                # To claim again after a later job's claim would take the store back from that job.
                made[:] = self._claims_of_start(newest)
                return None if made else Claim(start_token=self.group.start_token, world_size=self.group.world_size)

            try:
                appended = self.log.append(change)
            except CkptstoreError as error:
                error.committed = False  # it is said of a checkpoint, and a claim makes none visible
                raise
            newest = appended or self.log.newest()
            claim = made[0] if made else cast(Record, appended)
            self.epoch, self.resume_from = claim.state.epoch, claim.state.resume_from
            self._claim = claim.number, claim.sha256
        if newest is None or newest.state.epoch != self.epoch:
            found = newest.state.epoch if newest else 0
            self.is_fenced = True
            raise StoreFenced(
                f"A later job has claimed the store: writer epoch {found}, this job has {self.epoch}",
                hint="Stop this job, or start it again to take the store over",
            )
        return newest

    def _try_creates(self) -> None:
        """Test if the storage honours create-if-absent, and read meanwhile what a claim needs: a request to a server is
        a round trip, and the test takes three of them."""

        def read_id() -> None:
            if not self._store_id and (found := read_store_json(self.storage)):
                self._store_id = found.store_id if found.kept_by == KEPT_BY_CKPTSTORE else ""

        def attempted(read: Callable[[], object]) -> None:
            with suppress(CkptstoreError):  # the claim reads it again, and raises what is wrong
                read()

        ahead = [partial(attempted, read_id), partial(attempted, self.log.checked_newest)]
        calls = [self.log.try_creates, *(ahead if is_server(self.storage) else ())]
        mapped(lambda call: call(), calls, num_threads=len(calls), name="ckptstore-claim")

    def _claims_of_start(self, newest: Record | None) -> list[Record]:
        """Return the claims that other processes have made for this job."""
        if self.start is None or newest is None:
            return []
        return [
            record
            for record in self.log.records(range(self.start.since + 1, newest.number + 1))
            if isinstance(record.change, Claim) and record.change.start_token == self.start.token
        ]

    def shared_start(self) -> Start:
        """Return the start under which other processes claim the store for this job; begin it on first use."""
        with self._lock:
            if self.start is None:
                newest = self.log.newest()
                self.start = Start(new_start_token(), newest.number if newest else 0)
            return self.start

    def _refuse_lost_log(self) -> None:
        """Raise StoreMissing if there are checkpoints but no log: the job would start over beside its own ones."""

        files = self.storage.list(CHECKPOINT_PREFIX)
        found = next((file.key for file in files if file.key.endswith(f"/{MANIFEST_NAME}")), None)
        # Another job may have begun the log, and saved, since this one saw it empty: the claim sees that by itself.
        if found is not None and self.log.found([1]) == [None]:
            raise StoreMissing(
                f"The log of the store at {self.storage.uri} is gone, and its checkpoints are not: {found}, for one",
                hint=SALVAGE_HINT,
            )

    def check_latest_there(self, newest: Record) -> None:
        """Leader: raise StoreMissing if the latest checkpoint is one of this job and has lost its manifest, without
        which it cannot be read. Costs one request. Lost checkpoints of earlier jobs are passed over by a resume."""
        number = newest.state.latest
        if number is None:
            return
        (record,) = self.log.records([number])
        if record.entry.epoch != self.epoch:
            return
        key = record.entry.prefix + MANIFEST_NAME
        try:
            looked_twice(self.storage, key, lambda: self.storage.stat(key))
        except FileMissing:
            again = self.log.newest()  # it may have been removed properly meanwhile
            if again is None or again.state.latest == number:
                raise StoreMissing(
                    f"{key} is gone, of the latest checkpoint (step {record.entry.step}): somebody has removed or "
                    f"replaced checkpoints at {self.storage.uri}",
                    file=key,
                    hint=SALVAGE_HINT,
                    committed=False,
                ) from None

    def claim_to_save(self, step: int) -> Record:
        """Leader: claim the store as `claim` does, and emit `ResumeForgotten` if that is the job's first claim and the
        latest checkpoint has the same or a higher step. Raises StoreFenced.
        """
        if self.epoch is not None:
            if isinstance(self.storage, Disk):  # elsewhere it is a request, and a commit looks
                self.log.check_there()
            return self.claim(self.log.newest())
        newest = self.claim(None)
        latest = self.log.records([] if newest.state.latest is None else [newest.state.latest])
        if isinstance(newest.change, Claim) and latest and latest[0].entry.step >= step:
            emit(
                ResumeForgotten(
                    step=step,
                    latest_step=latest[0].entry.step,
                    hint="This job began anew. Call resume before training, or use another store",
                )
            )
        return newest

    def store_id(self) -> str:
        """Return the id of the store; create it if there is none. Read once. Raises InvalidInput if Ray keeps it."""
        if not self._store_id:
            self._store_id = read_or_create_identity(self.storage)
        return self._store_id

    def claimed(self) -> dict[str, Any]:
        """Leader, after `claim`: return the message for `join_claim` of the other ranks."""
        return {"epoch": self.epoch, "resume_from": self.resume_from, "claim": self._claim}

    def join_claim(self, message: Mapping[str, Any]) -> None:
        """Any rank: take over the claim from the leader's message."""
        self.epoch, self.resume_from = message["epoch"], message["resume_from"]
        self._claim = None if message["claim"] is None else tuple(message["claim"])

    def next_save_number(self, newest: StoreState | None = None) -> int:
        """Leader: assign the number of the next save of this epoch, above all that `newest` knows."""
        self.highest_save_number = self.highest_save_number + 1 if newest is None else self.peek_save_number(newest)
        return self.highest_save_number

    def peek_save_number(self, newest: StoreState) -> int:
        """Leader: return the next result of `next_save_number`, if no save is committed before."""
        return max(self.highest_save_number, newest.save_number) + 1

    @property
    def retention(self) -> str | None:
        """The retention as a text that is the same on all ranks that gave the same; None if all is kept."""
        return None if self.policy == KeepAll() else re.sub(r" at 0x[0-9a-f]+", "", repr(self.policy))

    @property
    def next_fast_save(self) -> int:
        """The number of this job's next save to the nodes; 0 if it saves to the store directly."""
        return 0 if self.tier is None or not self.tier.is_open else self.highest_save_number + 1

    def raise_on_all(self, error: CkptstoreError) -> NoReturn:
        """Raise the error on this rank and, by failing the meeting of their present call, on all ranks."""
        with suppress(CkptstoreError), self.group.meeting("fail"):
            raise error
        raise error  # it says more than the error of the meeting

    def new_attempt(self, step: int) -> Attempt:
        """Leader, after `claim`: return a new attempt, with a unique name."""
        return Attempt(step, self.claimed_epoch, secrets.token_hex(4))

    def candidates(self, newest: Record | None, *, timed: bool = False) -> list[Candidate]:
        """Return the live checkpoints as retention sees them; see `candidates`."""
        return candidates(self.log, newest, timed=timed, unthinned=self.unthinned)

    def prune_in_background(self, prune: Callable[[], object]) -> None:
        """Leader: run `prune` on a thread of its own, one at a time, or at once if no thread can start. Failures are
        emitted as events, not raised; that a right is lacking only once, as long as that is so."""

        def run() -> None:
            try:
                with briefly(), beating(self._note_prune):
                    prune()
                self._may_delete = True
            except Exception as error:  # the next commit tries again
                if self._may_delete or not isinstance(error, AccessDenied):
                    emit(PruneFailed(error=str(error)))
                self._may_delete = not isinstance(error, AccessDenied)

        self._note_prune()

        with self._lock:
            if self._pruning is not None and self._pruning.is_alive():
                return
            self._pruning = thread = started(run, name="ckptstore-prune")
        if thread is None:
            run()

    def at_close(self, call: Callable[[], object]) -> None:
        """Have `close` call `call` before it closes anything else. No save is in flight then."""
        self._at_close.callback(call)

    def _note_prune(self) -> None:
        self._pruned_at = time.monotonic()

    def wait_for_prune(self) -> None:
        """Wait until no prune runs in the background, at most a minute, and a few seconds for one that gets nowhere."""
        with self._lock:
            pruning = self._pruning
        ends_at = time.monotonic() + _PRUNE_SECONDS
        while pruning is not None and pruning.is_alive():
            left_seconds = min(ends_at, self._pruned_at + _IDLE_SECONDS) - time.monotonic()
            if left_seconds <= 0:
                what = "the prune has not ended, and nobody waits any longer; `ckptstore gc` finds what it leaves"
                emit(PruneFailed(error=what))
                return
            pruning.join(left_seconds)

    def close(self) -> None:
        """Wait for the work in the background, and close the group, the transfer and the storage."""
        self.is_closed = True
        self._at_close.close()
        self.wait_for_prune()
        self.log.close(_IDLE_SECONDS)
        if self._group is not None:
            with briefly():
                self._group.close()
        self.transfer.close()
        self.storage.close()


def candidates(log: Log, newest: Record | None, *, timed: bool, unthinned: Collection[int] = ()) -> list[Candidate]:
    """Return the live checkpoints of a store as retention sees them, oldest first, with their times if `timed`.
    `unthinned` are the numbers of those that could not be thinned."""
    state = newest.state if newest else EMPTY
    records = log.annotated(log.readable(state.in_order()), newest)
    times = log.commit_times(records) if timed else {}
    held = held_by_bases(log, [record.entry for record in records])
    stay_whole = {*unthinned, *state.bases}
    return [
        Candidate(
            number=record.number,
            step=record.entry.step,
            committed_at=times.get(record.number, math.nan),
            metrics=record.entry.metrics,
            holds={record.number: record.entry.held_bytes, **{base: held[base] for base in record.entry.bases}},
            whole=state.thinned.get(record.number),
            dropped=thinned.dropped if thinned else (),
            left_share=record.entry.size_bytes / max(1, thinned.size_bytes) if thinned else None,
            can_thin=record.entry.kind == "state" and record.number not in stay_whole,
        )
        for record in records
        for thinned in [record.entry.thinned]
    ]


def held_by_bases(log: Log, entries: Iterable[CheckpointEntry]) -> dict[int, int]:
    """Return the bytes in the directories of the checkpoints to whose files some others refer, by number."""
    bases = log.records(sorted({base for entry in entries for base in entry.bases}))
    return {record.number: record.entry.held_bytes for record in bases}


def record_of_step(log: LogReader, newest: Record | None, step: int) -> Record:
    """Return the record of the newest live checkpoint of a step. Raises CheckpointGone, which names live steps."""
    step = check_step(step)
    records = log.readable(newest.state.in_order() if newest else ())
    found = [record for record in records if record.entry.step == step]
    if not found:
        shown = ", ".join(str(record.entry.step) for record in records[-10:]) or "none"
        trashed = log.readable(sorted(newest.state.trash)) if newest else []
        is_in_trash = any(record.entry.step == step for record in trashed)
        raise CheckpointGone(
            f"There is no live checkpoint of step {step}; live ones: {shown}",
            step=step,
            hint="It is in the trash, from which `restore` brings it back" if is_in_trash else None,
        )
    return log.annotated(found[-1:], newest)[0]


def annotation(
    log: LogReader, newest: Record | None, place: int, metrics: Mapping[str, float], *, epoch: int | None
) -> Annotate:
    """Return the change that adds metrics to the checkpoint of a place, on top of those that it was annotated with
    before."""
    annotated_by = newest.state.annotated.get(place) if newest else None
    before = log.records([annotated_by])[0].change if annotated_by is not None else None
    known = before.metrics if isinstance(before, Annotate) else {}
    return Annotate(place, {**known, **metrics}, epoch)
