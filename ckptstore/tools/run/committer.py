"""The loop that commits: a thread that looks into the folder now and then, and never holds up the trainer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.errors import CkptstoreError, InvalidInput, SourceChanged, StoreFenced, StoreForked, UnsupportedVersion
from ckptstore.events import emit
from ckptstore.saving.directory_shard import directory_of
from ckptstore.store import CheckpointStore, save_shard
from ckptstore.tools.run.folders import Folder, Found, Held, JobSeen, Look, same, save_found
from ckptstore.tools.run.folders.division import divide
from ckptstore.tools.run.notices import (
    CheckpointsPassedOver,
    CommitsDelayed,
    CommitsStopped,
    FolderAhead,
    FolderNotice,
    LocalDeleted,
    OlderFound,
)
from ckptstore.tools.run.rounds import NodeOffer, NodeView, choose

_NICE = 10
_LONGEST_WAIT_SECONDS = 60.0
_FINAL = (StoreFenced, StoreForked, UnsupportedVersion)
"""Errors that no later try mends."""
_LAST_LOOKS = 3
"""The number of tries of a checkpoint that changes after the trainer's end."""
_LOCAL_COPIES = 2
"""The number of newest checkpoints that `delete_local` leaves in the folder."""


@dataclass(slots=True)
class _Tries:
    """Failed commits in a row."""

    count: int = 0
    not_before: float = 0.0


@dataclass(kw_only=True)
class Committer:
    """Commits what is finished in a folder, round by round. All nodes of the job take part in each round.

    A round that fails is logged and tried again later; nothing is raised.
    """

    store: CheckpointStore
    folder: Folder
    job: Callable[[], JobSeen]
    """Returns what is known of the trainer's processes now."""
    interval_seconds: float
    began_at: float
    """The time when the agent began, in seconds since the epoch, before anything was started that writes to the
    folder."""
    delete_local: bool = False
    is_shared: bool = False
    """True if the folder is one and the same for all nodes."""
    _committed: dict[str, str] = field(default_factory=dict)
    """The fingerprints of what is in the store, by name."""
    _passed: dict[str, str] = field(default_factory=dict)
    """The same of what is passed over."""
    _last: tuple[int, float] | None = None
    """The step of the last commit, and when its files were written."""
    _seen_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """The time when each of those that are not in the store was seen finished first, by name and fingerprint."""
    _noted_ahead: tuple[str, str] | None = None
    """The newest of them that an event has named."""
    _noted: set[str] = field(default_factory=set)
    _tries: _Tries = field(default_factory=_Tries)
    _all_ranks: frozenset[int] | None = None
    _seen: Look = field(default_factory=lambda: Look((), {}, ()))
    """The last look of a round."""
    _suspects: set[str] | None = None
    """Names of what may be in the store, and is compared before it is offered; None before the first look."""
    _has_compared: bool = False
    """True once what was there before the first look was compared with the store."""
    _changes: int = 0
    """The number of times in a row that a checkpoint was no longer what it was."""
    stopped: CkptstoreError | None = None
    """Why nothing more is committed."""
    failed: CkptstoreError | None = None
    """The last failure, None after a commit that went well."""
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    is_hurried: bool = False
    """True if only the newest counts."""
    is_through: bool = False
    """True when the loop is over."""
    _has_ended: bool = False

    def run(self) -> None:
        """Run until `finish` is called and what is finished is committed, or cannot be."""
        with contextlib.suppress(OSError, AttributeError):  # threads that it starts have the same priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            while not self._round():
                self._wake.wait(self._pause_seconds())
                self._wake.clear()
        finally:
            self.is_through = True

    def look_now(self) -> None:
        """Begin the next round now."""
        self._wake.set()

    def hurry(self) -> None:
        """Commit only the newest from now on: the end is near."""
        self.is_hurried = True
        self._wake.set()

    def finish(self) -> None:
        """Note that nothing more is written to the folder."""
        self._has_ended = True
        self._wake.set()

    def left(self) -> tuple[list[Found], Mapping[str, str]]:
        """Return what is finished and neither in the store nor passed over, as the folder is now, and what is
        unfinished, with the reasons. From any thread."""
        self._look()
        look = self._look()
        return self._open(look), {name: why for name, why in look.unfinished.items() if name not in self._committed}

    def _pause_seconds(self) -> float:
        waits = self._tries.not_before - time.monotonic()
        if self._has_ended or self.is_hurried:
            return min(1.0, self.interval_seconds)
        return max(self.interval_seconds, waits)

    def _look(self) -> Look:
        seen = self.job()
        if self.is_shared and self._all_ranks is not None:
            seen = replace(seen, ranks=self._all_ranks)
        with self._looking:
            return self.folder.look(seen)

    def _open(self, look: Look) -> list[Found]:
        return [
            found
            for found in look.finished
            if found.fingerprint not in (self._committed.get(found.name), self._passed.get(found.name))
        ]

    def _round(self) -> bool:
        """Look once, and commit one after another until none is left. Return True when the loop is over."""
        while self.stopped is None:
            had_ended = self._has_ended
            try:
                chosen, is_over = self._meet(had_ended)
                if chosen is None:
                    if self._tries.count == 0:
                        self._delete_committed()
                    return is_over
                self._commit(chosen)
            except (CkptstoreError, OSError) as error:
                self._fail(error if isinstance(error, CkptstoreError) else InvalidInput(str(error)))
                return had_ended and self._changes in (0, _LAST_LOOKS)
        return True

    def _meet(self, had_ended: bool) -> tuple[NodeOffer | None, bool]:
        look = self._seen = self._look()
        if had_ended:  # nothing changes any more: what looks the same twice is whole
            look = self._seen = self._look()
        self._tell_unknown(look)
        self._tell_ahead(look)
        self._compare(look)
        self._pass_over_late(look)
        view = self._view(look, had_ended)

        def join() -> Any:
            views = [NodeView.from_json(item) for item in brought]
            chosen = None if self._must_wait(views) else choose(views)
            ranks = (
                None if any(item.ranks is None for item in views) else sorted({r for v in views for r in v.ranks or ()})
            )
            offer = None if chosen is None else NodeView(offers=(chosen,)).to_json()["offers"][0]
            return {"offer": offer, "ranks": ranks, "is_over": all(item.has_ended for item in views)}

        with job_of(self.store).group.meeting("agent") as meeting:
            brought = meeting.gather(view.to_json())
            told = meeting.tell(join)
        return (None if told["offer"] is None else NodeOffer(**told["offer"])), bool(told["is_over"])

    def _must_wait(self, views: Iterable[NodeView]) -> bool:
        """Return True if a failure is too recent for another try (leader only). At the end there is one try more at
        once."""
        is_pressed = any(view.is_hurried or view.has_ended for view in views)
        return not is_pressed and time.monotonic() < self._tries.not_before

    def _view(self, look: Look, had_ended: bool) -> NodeView:
        now, is_open = time.monotonic(), self._open(look)
        self._note_seen(is_open)
        names = {found.name for found in is_open}
        return NodeView(
            offers=tuple(
                NodeOffer(
                    name=found.name,
                    step=found.step,
                    metrics=dict(found.metrics),
                    metadata=found.metadata(),
                    tells_all=found.tells_all,
                    waits_seconds=now - self._seen_at[found.name, found.fingerprint],
                )
                for found in is_open
            ),
            committed=tuple(found.name for found in look.finished if found.name not in names),
            unfinished=tuple(look.unfinished),
            uncertain=tuple(found.name for found in look.uncertain),
            is_hurried=self.is_hurried,
            has_ended=had_ended,
        )

    def _note_seen(self, is_open: Sequence[Found]) -> None:
        now = time.monotonic()
        self._seen_at = {
            key: self._seen_at.get(key, now) for key in [(found.name, found.fingerprint) for found in is_open]
        }

    def _tell_ahead(self, look: Look) -> None:
        """Say what the folder has and the store has not, unless it is one alone that comes there now. What was there
        before the agent may be in the store: nothing is said before that was compared."""
        is_open = self._open(look)
        if not self._has_compared or not is_open or (len(is_open) == 1 and self._tries.count == 0):
            return
        self._note_seen(is_open)
        newest = is_open[-1].name, is_open[-1].fingerprint
        if newest != self._noted_ahead:
            self._noted_ahead = newest
            emit(
                FolderAhead(
                    steps=tuple(found.step for found in is_open),
                    names=tuple(found.name for found in is_open),
                    not_durable_seconds=time.monotonic() - min(self._seen_at.values()),
                )
            )

    def _commit(self, offer: NodeOffer) -> None:
        """Save what the nodes have agreed on. Collective."""
        look = self._seen
        found = next((item for item in (*look.finished, *look.uncertain) if item.name == offer.name), None)
        options: dict[str, Any] = {"metrics": offer.metrics, "metadata": offer.metadata, "suffix": "never"}
        with ExitStack() as stack:
            held = self._hold(found, stack)
            if found is not None and held is not None:
                save_found(self.store, found, held, **options)
            else:
                save_shard(self.store, lambda job: directory_of(job, offer.step, None, **options))
        self.failed, self._tries, self._changes = None, _Tries(), 0
        if found is not None:
            self._committed[found.name] = found.fingerprint
            self._last = (found.step, _written_at(found))
        older = [item for item in self._open(look) if item.step < offer.step]
        self._pass_over(older, f"step {offer.step} went first, and an older one must not become the latest")

    def _hold(self, found: Found | None, stack: ExitStack) -> Held | None:
        """Keep this node's share of the files from being deleted. What fails on one node fails on all."""
        job = job_of(self.store)
        files = found.files if found is not None else {}
        with job.group.meeting("see") as meeting:
            brought = meeting.gather({name: (it.mtime_ns, it.size_bytes) for name, it in files.items()})
            seen = meeting.tell(lambda: brought)
        shares = divide([{name: (times[0], times[1]) for name, times in item.items()} for item in seen])
        with job.group.meeting("hold"):
            if found is None:
                return None
            try:
                return stack.enter_context(self.folder.hold(found, shares[job.group.rank]))
            except SourceChanged:
                if not (self.folder.path / found.name).exists():
                    self._pass_over([found], "the trainer has deleted it")
                raise

    def _fail(self, error: CkptstoreError) -> None:
        self.failed = error
        if isinstance(error, SourceChanged):  # the next look says what is there now
            self._changes += 1
            return
        self._changes = 0
        if isinstance(error, _FINAL):
            self.stopped = error
            emit(CommitsStopped(reason=str(error)))
            return
        tries = self._tries
        tries.count += 1
        wait_seconds = min(_LONGEST_WAIT_SECONDS, self.interval_seconds * 2 ** (tries.count - 1))
        tries.not_before = time.monotonic() + wait_seconds
        if error.committed is not False and self._suspects is not None:
            self._suspects |= {found.name for found in self._open(self._seen)}
        emit(CommitsDelayed(wait_seconds=wait_seconds, error=str(error)))

    def _compare(self, look: Look) -> None:
        """Find what of the folder is in the store already: of what was there before the agent, and of what a failed
        commit may have committed all the same. Each is compared when it is finished."""
        if self._suspects is None:
            self._suspects = {found.name for found in look.finished} | set(look.unfinished)
        due = [found for found in self._open(look) if found.name in self._suspects]
        if not due:
            self._has_compared = True
            return
        entries = self.store.entries()
        live = {entry.checkpoint.step: entry.checkpoint for entry in entries}
        latest = next((entry.checkpoint for entry in entries if entry.is_latest), None)
        for found in due:
            if found.step in live and same(self.folder, found, live[found.step]):
                self._committed[found.name] = found.fingerprint
        if latest is not None:
            has_latest = any(found.step == latest.step and found.name in self._committed for found in look.finished)
            known_at = max(latest.created_at, self.began_at if has_latest else 0.0)
            older = [
                found
                for found in self._open(look)
                if found.name in self._suspects and found.step < latest.step and _written_at(found) <= known_at
            ]
            if older:
                steps, names = self._forget(older)
                emit(OlderFound(steps=steps, names=names, latest_step=latest.step))
        self._suspects -= {found.name for found in due}
        self._has_compared = True

    def _pass_over_late(self, look: Look) -> None:
        """Pass over what is found finished only after a newer one was committed. What is rewritten after it is not
        older."""
        if self._last is not None:
            step, written_at = self._last
            late = [found for found in self._open(look) if found.step < step and _written_at(found) <= written_at]
            self._pass_over(late, f"step {step} went first, and an older one must not become the latest")

    def _pass_over(self, passed: Sequence[Found], reason: str) -> None:
        if passed:
            steps, names = self._forget(passed)
            emit(CheckpointsPassedOver(steps=steps, names=names, reason=reason))

    def _forget(self, passed: Sequence[Found]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Commit these never, as long as they are what they are now; their steps and names."""
        self._passed |= {found.name: found.fingerprint for found in passed}
        return tuple(found.step for found in passed), tuple(found.name for found in passed)

    def _tell_unknown(self, look: Look) -> None:
        for name in sorted(set(look.unknown) - self._noted):
            emit(FolderNotice(text=f"{name} fits no known shape and is not committed. Name it with --pattern"))
        self._noted |= set(look.unknown)

    def _delete_committed(self) -> None:
        """Remove from the folder what is in the store, but for the newest."""
        if not self.delete_local or (self.is_shared and not job_of(self.store).is_leader):
            return
        for found in self._seen.finished[:-_LOCAL_COPIES]:
            if self._committed.get(found.name) == found.fingerprint and self.folder.delete(found):
                emit(LocalDeleted(step=found.step, name=found.name))


def _written_at(found: Found) -> float:
    """Return the time of the last change of its files, in seconds since the epoch by the clock of its file system."""
    return max((sign.mtime_ns for sign in found.files.values()), default=0) / 1e9
