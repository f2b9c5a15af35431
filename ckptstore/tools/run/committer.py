"""The loop that commits: a thread that looks into the folder now and then, and never holds up the trainer.

look → judge (`Folder.look`) → offer → all nodes agree on one (`choose`, `Steps`) → hold → save → tell
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.errors import CkptstoreError, InvalidInput, SourceChanged
from ckptstore.events import emit
from ckptstore.runtime.near import shown
from ckptstore.saving.directory_shard import directory_of
from ckptstore.store import CheckpointStore, save_shard
from ckptstore.tools.run.explain import pattern_for, rule_of
from ckptstore.tools.run.failures import FINAL, Failures
from ckptstore.tools.run.folders import Folder, Found, Held, JobSeen, Look, same, save_found
from ckptstore.tools.run.folders.division import divide
from ckptstore.tools.run.folders.snapshot import Sign
from ckptstore.tools.run.notices import (
    CheckpointsPassedOver,
    CommitsDelayed,
    CommitsStopped,
    FolderAhead,
    FolderNotice,
    LocalDeleted,
    OlderFound,
    ShapeFound,
)
from ckptstore.tools.run.rounds import NodeOffer, NodeView, choose
from ckptstore.tools.run.steps import Steps, grows

_NICE = 10
_OWN_TRIES = 3
"""The number of tries of a checkpoint that itself is at fault."""
_LOCAL_COPIES = 2
"""The number of newest checkpoints that `delete_local` leaves in the folder."""
_TOO_OLD = "step {} went first, and an older one must not become the latest"


@dataclass(slots=True)
class _Settled:
    """A checkpoint that needs no commit, as long as it is what it is now."""

    fingerprint: str
    passed: str = ""
    """The reason why it is passed over; "" if it is in the store."""
    is_older: bool = False
    """True if the store has a newer one."""
    stored: Mapping[str, Sign] = field(default_factory=dict, compare=False)
    """The files that are in the store."""

    def needs_no_commit(self, found: Found) -> bool:
        """Return True if the checkpoint is what it was, or what was stored without some of its files: its trainer is
        deleting it, part by part, and what is left is no checkpoint."""
        return self.fingerprint == found.fingerprint or self.stored.items() >= found.files.items()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of the folder and the store at the end."""

    committed: int
    """The number of checkpoints that were committed."""
    passed: dict[str, str]
    """The names that were passed over, with the reasons."""
    left: list[Found]
    """The checkpoints that are finished, and neither in the store nor passed over."""
    unfinished: dict[str, str]
    had_any: bool
    """True if there was anything that had the name of a checkpoint."""
    has_last: bool
    """True if the newest of them, or one that is newer than all of them, is in the store."""


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
    failures: Failures = field(default_factory=Failures)
    is_hurried: bool = False
    """True if only the newest counts."""
    is_through: bool = False
    """True when the loop is over."""
    _settled: dict[str, _Settled] = field(default_factory=dict)
    _committed: int = 0
    _rounds: int = 0
    _last: Found | None = None
    """The checkpoint that was committed last."""
    _last_step: int = -1
    _seen_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """The time when each of those that are not in the store was seen finished first, by name and fingerprint."""
    _noted: set[str] = field(default_factory=set)
    """The things that were said once."""
    _seen: Look = field(default_factory=Look)
    """The last look of a round."""
    _suspects: set[str] | None = None
    """Names of what may be in the store, and is compared before it is offered; None before the first look."""
    _has_compared: bool = False
    """True once what was there before the first look was compared with the store."""
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _has_ended: bool = False
    _all_had_ended: bool = False
    """Leader: True if the trainers of all nodes had ended in the round before, so that each has looked after that."""
    _patience_seconds: float = 0.0
    _patient_until: float | None = None

    def __post_init__(self) -> None:
        self._steps = Steps(self.store)

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

    def finish(self, *, patience_seconds: float = 0.0) -> None:
        """Note that the trainer has ended. What it has left running may go on writing: as long as that runs, what needs
        nothing but time is waited for, for `patience_seconds` at most."""
        self._patience_seconds, self._has_ended = patience_seconds, True
        self._wake.set()

    def settling(self) -> frozenset[str] | None:
        """Return the names of what needs nothing but time, as the last round saw it; None before the second round."""
        return self._seen.settling if self._rounds > 1 else None

    def outcome(self) -> Outcome:
        """Look once more, and return what has become of everything in the folder. From any thread."""
        self._look()
        look = self._look()
        passed = {name: it.passed for name, it in self._settled.items() if it.passed}
        left, unfinished = self._open(look), {n: why for n, why in look.unfinished.items() if not self._is_in(n)}
        newest = max(look.candidates, key=lambda it: it.written_at_ns, default=None)
        settled = None if newest is None else self._settled.get(newest.name)
        return Outcome(
            committed=self._committed,
            passed={**passed, **look.refused},
            left=left,
            unfinished=unfinished,
            had_any=bool(look.candidates or self._settled),
            has_last=newest is None or (settled is not None and (settled.is_older or not settled.passed)),
        )

    def _is_in(self, name: str) -> bool:
        """Return True if the checkpoint of that name is in the store, in its present or an earlier state."""
        return name in self._settled and not self._settled[name].passed

    def _pause_seconds(self) -> float:
        if self._has_ended or self.is_hurried:
            return min(1.0, self.interval_seconds)
        return max(self.interval_seconds, self.failures.not_before - time.monotonic())

    def _look(self) -> Look:
        seen = self.job()
        with self._looking:
            return self.folder.look(seen)

    def _open(self, look: Look) -> list[Found]:
        return [
            found
            for found in look.finished
            if found.name not in self._settled or not self._settled[found.name].needs_no_commit(found)
        ]

    def _round(self) -> bool:
        """Look once, and commit one after another until none is left. Return True when the loop is over."""
        while not self.failures.is_final:
            had_ended = self._has_ended
            offer: NodeOffer | None = None
            try:
                offer, is_over = self._meet(had_ended)
                if offer is None:
                    if self.failures.count == 0:
                        self._delete_committed()
                    return is_over
                self._commit(offer)
            except Exception as error:  # nothing that a folder holds ends the loop
                failure = (
                    error if isinstance(error, CkptstoreError) else CkptstoreError(f"{type(error).__name__}: {error}")
                )
                # The system's errors are of our own directory or of a way, and no checkpoint is to blame.
                is_own = isinstance(error, InvalidInput | SourceChanged) or not isinstance(
                    error, CkptstoreError | OSError
                )
                if is_own and offer is not None:
                    self._blame(offer, failure)
                    return False  # what is at fault is passed over after some tries
                self._fail(failure)
                return had_ended
        return True

    def _meet(self, had_ended: bool) -> tuple[NodeOffer | None, bool]:
        look = self._seen = self._look()
        self._rounds += 1
        if had_ended:  # nothing changes any more: what looks the same twice is whole
            look = self._seen = self._look()
        self._tell(look)
        self._compare(look)
        self._pass_over_late(look)
        view = self._view(look, had_ended and not self._is_patient(look))

        def join() -> Any:
            views = [NodeView.from_json(item) for item in brought]
            chosen = None if self._must_wait(views) else choose(views)
            if chosen is not None:
                chosen = replace(chosen, step=self._steps.choose(chosen))
            offer, had_ended = None if chosen is None else asdict(chosen), self._all_had_ended
            self._all_had_ended = all(it.has_ended for it in views)
            return {"offer": offer, "is_over": self._all_had_ended and (had_ended or len(views) == 1)}

        with job_of(self.store).group.meeting("agent") as meeting:
            brought = meeting.gather(asdict(view))
            reply = meeting.tell(join)
        return (None if reply["offer"] is None else NodeOffer(**reply["offer"])), bool(reply["is_over"])

    def _is_patient(self, look: Look) -> bool:
        """Return True if something may be finished by waiting after the trainer's end; see `finish`."""
        if not (self._patience_seconds and look.settling and self.job().is_alive) or self.is_hurried:
            return False
        if self._patient_until is None:
            self._patient_until = time.monotonic() + self._patience_seconds
            text = "the trainer has left processes, so this may not be finished yet and is waited for"
            emit(FolderNotice(text=f"{text}: {', '.join(sorted(look.settling))}"))
        return time.monotonic() < self._patient_until

    def _must_wait(self, views: Iterable[NodeView]) -> bool:
        """Return True if a failure is too recent for another try (leader only). At the end there is one try more at
        once."""
        is_pressed = any(view.is_hurried or view.has_ended for view in views)
        return not is_pressed and time.monotonic() < self.failures.not_before

    def _view(self, look: Look, had_ended: bool) -> NodeView:
        now, is_open = time.monotonic(), self._open(look)
        self._note_seen(is_open)
        names, may_guess = {found.name for found in is_open}, grows(look.finished)
        is_numbered = sum(not found.is_exact for found in look.finished) > 1
        return NodeView(
            offers=tuple(
                NodeOffer(
                    name=found.name,
                    step=found.step if found.is_exact or may_guess or found.is_rewritten else None,
                    is_exact=found.is_exact,
                    is_numbered=is_numbered,
                    written_at_seconds=found.written_at_seconds,
                    metrics=dict(found.metrics),
                    metadata=found.metadata(self.folder.path),
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
        keys = [(found.name, found.fingerprint) for found in is_open]
        self._seen_at = {key: self._seen_at.get(key, now) for key in keys}

    def _commit(self, offer: NodeOffer) -> None:
        """Save what the nodes have agreed on. Collective."""
        look = self._seen
        found = next((item for item in (*look.finished, *look.uncertain) if item.name == offer.name), None)
        options: dict[str, Any] = {"metrics": offer.metrics, "metadata": offer.metadata, "suffix": "never"}
        with ExitStack() as stack:
            held = self._hold(found, stack)
            if found is not None and held is not None:
                save_found(self.store, found, held, step=offer.step, **options)
            else:
                save_shard(self.store, lambda job: directory_of(job, offer.step, None, **options))
        self._note_metrics(offer)
        self.failures = Failures(own=self.failures.own)
        self._committed, self._last_step = self._committed + 1, offer.step or 0
        if found is not None:
            self.failures.own.pop(found.name, None)
            self._settled[found.name], self._last = _Settled(found.fingerprint, stored=found.files), found
        self._pass_over(
            [it for it in self._open(look) if self._is_older(it)], _TOO_OLD.format(offer.step), is_older=True
        )

    def _note_metrics(self, offer: NodeOffer) -> None:
        """Say once that a checkpoint lacks the numbers by which retention ranks."""
        lacks = job_of(self.store).policy.required_metrics() - offer.metrics.keys()
        file = self.folder.rules.metrics_file
        text = f"has no numbers in {file}" if file and not offer.metrics else ""
        if lacks:
            text = f"has no {shown(lacks)}, by which retention ranks, and {shown(offer.metrics)}: it ranks last"
        if text and self._once("metrics"):
            emit(FolderNotice(text=f"{offer.name} {text}"))

    def _is_older(self, found: Found) -> bool:
        """Return True if it comes before the checkpoint that was committed last."""
        last = self._last
        if last is None:
            return found.is_exact and found.step is not None and found.step < self._last_step
        if found.is_exact and last.is_exact and found.step is not None and last.step is not None:
            return found.step < last.step
        return found.written_at_seconds < last.written_at_seconds

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
        failures = self.failures
        failures.error = error
        if isinstance(error, FINAL):
            failures.is_final = True
            emit(CommitsStopped(reason=str(error)))
            return
        wait_seconds = failures.delay(self.interval_seconds)
        if error.committed is not False and self._suspects is not None:
            self._suspects |= {found.name for found in self._open(self._seen)}
        emit(CommitsDelayed(wait_seconds=wait_seconds, error=str(error)))

    def _blame(self, offer: NodeOffer, error: CkptstoreError) -> None:
        """Count a failure that is the checkpoint's own. After some it is passed over, and keeps no other one out."""
        self.failures.error = error
        own = self.failures.own
        own[offer.name] += 1
        if own[offer.name] >= _OWN_TRIES:
            del own[offer.name]
            self._pass_over([found for found in self._open(self._seen) if found.name == offer.name], str(error))

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
        latest = next((entry.checkpoint for entry in entries if entry.is_latest), None)
        is_counted = self._steps.is_counted(entries)
        for found in due:
            is_exact = found.is_exact and not is_counted
            alike = [it for it in entries if it.checkpoint.step == found.step or not is_exact]
            for entry in reversed(alike):
                if self._steps.name_of(entry.checkpoint) == found.name and same(self.folder, found, entry.checkpoint):
                    self._settled[found.name] = _Settled(found.fingerprint, stored=found.files)
                    break
        if latest is not None:
            has_latest = any(self._steps.name_of(it.checkpoint) in self._settled for it in entries if it.is_latest)
            known_at = max(latest.created_at, self.began_at if has_latest else 0.0)
            home = self._steps.home_of(latest)
            written_at = (home and home.written_at_seconds) or latest.created_at
            older = [
                found
                for found in self._open(look)
                if found.name in self._suspects
                and (not found.is_exact or (found.step or 0) < latest.step)
                and found.written_at_seconds <= (known_at if found.is_exact and not is_counted else written_at)
            ]
            if older:
                reason = f"the store has the newer step {latest.step}"
                names = self._settle(older, reason, is_older=True)
                emit(OlderFound(steps=_steps(older), names=names, latest_step=latest.step))
        self._suspects -= {found.name for found in due}
        self._has_compared = True

    def _pass_over_late(self, look: Look) -> None:
        """Pass over what is found finished only after a newer one was committed. What is rewritten after it is not
        older."""
        if self._last is not None:
            written_at = self._last.written_at_seconds
            late = [it for it in self._open(look) if self._is_older(it) and it.written_at_seconds <= written_at]
            self._pass_over(late, _TOO_OLD.format(self._last_step), is_older=True)

    def _pass_over(self, passed: Sequence[Found], reason: str, *, is_older: bool = False) -> None:
        if passed:
            names = self._settle(passed, reason, is_older=is_older)
            emit(CheckpointsPassedOver(steps=_steps(passed), names=names, reason=reason))

    def _settle(self, passed: Sequence[Found], reason: str, *, is_older: bool) -> tuple[str, ...]:
        """Commit these never, as long as they are what they are now; return their names."""
        for found in passed:
            self._settled[found.name] = _Settled(found.fingerprint, reason, is_older)
        return tuple(found.name for found in passed)

    def _once(self, what: str) -> bool:
        """Return True the first time."""
        is_new = what not in self._noted
        self._noted.add(what)
        return is_new

    def _tell(self, look: Look) -> None:
        """Say what is taken for what, what is not, and what the folder has and the store has not."""
        for candidate in look.candidates:
            if candidate.name not in look.refused and self._once(f"{candidate.shape} {candidate.parent}"):
                emit(
                    ShapeFound(name=candidate.name, shape=candidate.shape, step=candidate.step, rule=rule_of(candidate))
                )
        for name in look.unknown:
            if self._once(pattern := pattern_for(name)):
                text = f"{name} may be a checkpoint, fits no known shape and is not committed"
                emit(FolderNotice(text=f"{text}. To take it and those like it write --pattern {pattern!r}"))
        for name, why in look.left_out.items():
            if self._once(f"{name} {why}"):
                emit(FolderNotice(text=f"{name} fits --beside and is not stored: it {why}"))
        for name, why in look.refused.items():
            if self._once(f"{name} {why}"):
                emit(CheckpointsPassedOver(steps=(), names=(name,), reason=why))
        is_open = self._open(look)
        if not self._has_compared or not is_open or (len(is_open) == 1 and self.failures.count == 0):
            return  # one alone comes there now, and what was there before may be in the store
        self._note_seen(is_open)
        if self._once(f"{is_open[-1].name} {is_open[-1].fingerprint}"):
            emit(
                FolderAhead(
                    steps=_steps(is_open),
                    names=tuple(found.name for found in is_open),
                    not_durable_seconds=time.monotonic() - min(self._seen_at.values()),
                )
            )

    def _delete_committed(self) -> None:
        """Remove from the folder what is in the store, but for the newest."""
        if not self.delete_local or (self.is_shared and not job_of(self.store).is_leader):
            return
        for found in self._seen.finished[:-_LOCAL_COPIES]:
            settled = self._settled.get(found.name)
            if settled == _Settled(found.fingerprint) and not found.is_rewritten and self.folder.delete(found):
                emit(LocalDeleted(step=found.step or 0, name=found.name))


def _steps(found: Iterable[Found]) -> tuple[int, ...]:
    return tuple(it.step for it in found if it.step is not None)
