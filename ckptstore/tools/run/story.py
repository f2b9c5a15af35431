"""The story of a run, top to bottom: restore, start, commit, end. And of a folder that is watched without a trainer."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.events import emit
from ckptstore.group import StorageGroup
from ckptstore.opening import open_store
from ckptstore.retention import Policy
from ckptstore.store import CheckpointStore
from ckptstore.tools.run.committer import Committer, Outcome
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.tools.run.guess import folder_in_command, folder_in_store, folder_written
from ckptstore.tools.run.lock import locked
from ckptstore.tools.run.meeting import is_shared, restore
from ckptstore.tools.run.nodes import Nodes
from ckptstore.tools.run.notices import (
    CheckpointsLeft,
    FolderNotice,
    FolderWatched,
    RunSummary,
    SignalHandedOn,
    TrainerEnded,
    TrainerStarted,
    UnfinishedLeft,
)
from ckptstore.tools.run.signals import ENDING, Signals
from ckptstore.tools.run.trainer import TrainerProcess, check_command


@dataclass(frozen=True, slots=True)
class _Happened:
    """The event that the main thread waits for: a signal, the trainer's end with its code, or that the committer is
    through."""

    what: Literal["signal", "ended", "through"]
    number: int = 0


_WAKE_SECONDS = 0.25
_CLOSE_SECONDS = 10.0
"""The longest time in which a loop that is over closes its store."""
_LOOKS_SECONDS = 3.0
"""The time of the looks at the begin and the end of a quiet time."""
_LAST_LOOK_SECONDS = 20.0
"""The longest time for the last look into the folder."""
_KILL_SECONDS = 10.0
"""The time that a trainer has to end after a second signal that ends it."""
NOTHING_FOUND = 40
"""The exit code for a folder in which nothing was recognised."""

Happenings = queue.SimpleQueue[_Happened]


@dataclass(frozen=True, kw_only=True)
class AgentPlan:
    """The task of an agent."""

    store: str
    folder: Path | None
    """None to look for it."""
    rules: Rules
    makes_folder: bool = True
    """False for a folder that was guessed: what the trainer writes there may be a file."""
    retention: Policy | None = None
    nodes: Nodes = field(default_factory=Nodes)
    interval_seconds: float = 5.0
    grace_seconds: float | None = None
    """The time that the agent may go on after the trainer's end; None: until what is finished is committed, or
    failed."""
    delete_local: bool = False
    require_commit: bool = False
    storage_options: dict[str, Any] | None = None

    def opened(self) -> CheckpointStore:
        """Return the store, for this node among the others."""
        nodes = self.nodes
        group: object = "solo"
        if nodes.count > 1:
            group = StorageGroup(rank=nodes.rank, world_size=nodes.count, start_token=f"agent-{nodes.run_id}")
        return open_store(
            self.store, retention=self.retention, missing="worst", storage_options=self.storage_options, group=group
        )

    def committer(self, prepared: _Prepared, **options: Any) -> Committer:
        """Return the loop over this folder."""
        return Committer(
            store=prepared.store,
            folder=prepared.folder,
            is_shared=prepared.is_shared,
            interval_seconds=self.interval_seconds,
            delete_local=self.delete_local,
            **options,
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A folder that is locked, without leftovers, and its store."""

    lock: int
    store: CheckpointStore
    folder: Folder
    is_shared: bool


def run(plan: AgentPlan, command: Sequence[str]) -> int:
    """Restore the newest checkpoint, run the command and commit what it writes; returns the exit code.

    The code is the command's, 128 + N after signal N. With `require_commit` it is that of the error where the command
    ended well and something is not in the store. Without a folder it is looked for: in the command, in the metadata of
    the store, and then in what the command writes below the working directory. What is wrong with the store, the folder
    or the command is raised before the command is started; afterwards nothing is raised.
    """
    check_command(command)
    plan = _located(plan, command)
    place = plan.folder or Path.cwd()
    happened: Happenings = queue.SimpleQueue()
    with Signals() as signals, ExitStack() as stack:
        prepared = None if plan.folder is None else stack.enter_context(_prepared(plan))
        if prepared is not None:
            restore(prepared.store, prepared.folder, shared=prepared.is_shared)
        signals.taken = lambda number: happened.put(_Happened("signal", number))
        began, began_at = time.monotonic(), time.time()
        trainer = TrainerProcess(
            command,
            ended=lambda code: happened.put(_Happened("ended", code)),
            lock=prepared.lock if prepared else None,
        )
        emit(TrainerStarted(pid=trainer.pid, command=tuple(command)))
        handing = _Handing(trainer, happened)
        if prepared is None:
            plan, why_not = _written(plan, handing, place, since_seconds=began_at)
            if plan.folder is None:
                trainer.release()
                emit(FolderNotice(text=why_not))
                code = trainer.code or 0
                return NOTHING_FOUND if plan.require_commit and code == 0 else code
            prepared = stack.enter_context(_prepared(plan))
            prepared.store.resume()
        committer = plan.committer(prepared, job=trainer.seen, began_at=began_at)
        thread = _start(committer, prepared.store, happened)
        code = _follow(handing, committer)
        emit(TrainerEnded(code=code, seconds=time.monotonic() - began))
        trainer.release()
        patience_seconds = plan.rules.quiet_seconds + _LOOKS_SECONDS if code == 0 else 0.0
        failure = _end(plan, committer, happened, patience_seconds)
        return _leave(failure if plan.require_commit and code == 0 else code, thread, committer)


def _located(plan: AgentPlan, command: Sequence[str]) -> AgentPlan:
    """Return the plan with the folder that the command or the store names. Raises InvalidInput if it is needed before
    the start and nothing says it."""
    if plan.folder is not None:
        return plan
    if plan.nodes.count > 1:
        raise InvalidInput("Several nodes need --folder", hint="Give the folder that the trainer writes to")
    folder, says = folder_in_command(command), "the command"
    if folder is None:
        with open_store(plan.store, storage_options=plan.storage_options, group="solo") as store:
            folder, says = folder_in_store(store), "the store"
            if folder is None and store.exists() and store.latest() is not None:
                raise InvalidInput(
                    "The store has checkpoints, and nothing says to which folder they belong",
                    hint="Give --folder: without it the trainer would begin anew",
                )
    if folder is not None:
        emit(FolderNotice(text=f"--folder is {folder}, by {says}"))
    return replace(plan, folder=folder, makes_folder=False)


def _written(plan: AgentPlan, handing: _Handing, place: Path, *, since_seconds: float) -> tuple[AgentPlan, str]:
    """Wait for a first checkpoint below a place, and return the plan with its folder. If the trainer ends before there
    is one, there is one more look; then return the reason why there is none, for people."""
    noted: set[str] = set()
    came = None
    while True:
        has_ended = came is not None and came.what == "ended"
        why_not = f"nothing below {place} has the shape of a checkpoint; give --folder"
        try:
            folder = folder_written(place, plan.rules, since_seconds=since_seconds)
        except (CkptstoreError, OSError) as error:  # the training goes on, and the next look may go well
            folder, why_not = None, str(error)
            if not has_ended and why_not not in noted:
                emit(FolderNotice(text=why_not))
            noted.add(why_not)
        if folder is not None:
            emit(FolderNotice(text=f"--folder is {folder}, by what the trainer writes"))
        if folder is not None or has_ended:
            break
        came = handing.next(time.monotonic() + plan.interval_seconds)
    if has_ended and came is not None:
        handing.happened.put(came)  # for who waits for the trainer
    return replace(plan, folder=folder), why_not


class _Handing:
    """Hands signals on to the trainer. After the second one that ends it, it is killed if it does not end by itself."""

    def __init__(self, trainer: TrainerProcess, happened: Happenings) -> None:
        self.happened = happened
        self.is_ending = False
        self._trainer = trainer
        self._kill_at: float | None = None

    def next(self, until: float | None = None) -> _Happened | None:
        """Return what happens next, None when the time is over. What is a signal was handed on."""
        times = [at for at in (until, self._kill_at) if at is not None]
        came = _next(self.happened, min(times, default=None))
        if came is None and self._kill_at is not None and time.monotonic() >= self._kill_at:
            emit(FolderNotice(text=f"the trainer has not ended {_KILL_SECONDS:g} s after a second signal: killed"))
            self._trainer.hand_on(signal.SIGKILL)
            self._kill_at = None
        elif came is not None and came.what == "signal":
            self._trainer.hand_on(came.number)
            emit(SignalHandedOn(name=signal.Signals(came.number).name))
            if came.number in ENDING:
                if self.is_ending and self._kill_at is None:
                    self._kill_at = time.monotonic() + _KILL_SECONDS
                self.is_ending = True
        return came


def watch(plan: AgentPlan, *, once: bool) -> int:
    """Commit what appears in a folder, whoever writes it, until a signal comes; with `once` what is finished now.

    Returns 128 + N after signal N, and the code of the error after which nothing more is committed; with `once` or
    `require_commit` the code of the error of what could not be committed, 0 if all is well.
    """
    happened: Happenings = queue.SimpleQueue()
    if plan.folder is not None and once and not plan.folder.is_dir():
        raise InvalidInput(f"There is no folder {plan.folder}", hint="Give the folder that the trainer has written to")
    with Signals() as signals, _prepared(plan) as prepared:
        signals.taken = lambda number: happened.put(_Happened("signal", number))
        committer = plan.committer(prepared, job=JobSeen, began_at=time.time())
        emit(FolderWatched(folder=str(prepared.folder.path)))
        if not prepared.folder.path.is_dir():
            emit(FolderNotice(text=f"there is no folder {prepared.folder.path} yet"))
        thread = _start(committer, prepared.store, happened)
        waited_for: frozenset[str] = frozenset()
        code = stopped = 0
        while code == 0:
            came = _next(happened, time.monotonic() + plan.interval_seconds if once else None)
            if came is not None:
                if came.what == "through":
                    stopped = committer.failures.stopped_code
                    break
                code = 128 + came.number if came.number in ENDING else 0
            elif (settling := committer.settling()) is None:
                continue
            elif settling:
                if settling != waited_for:
                    emit(FolderNotice(text=f"waiting for what may not be finished yet: {', '.join(sorted(settling))}"))
                waited_for = settling
            else:
                break
        if code:
            committer.hurry()
        failure = _end(plan, committer, happened)
        if once or plan.require_commit:
            code = failure or code
        return _leave(stopped or code, thread, committer)


@contextmanager
def _prepared(plan: AgentPlan) -> Iterator[_Prepared]:
    """Yield the folder and the store. Collective. Raises what is wrong with either."""
    assert plan.folder is not None  # it was located
    _check_folder(plan.folder, makes_it=plan.makes_folder)

    def waits(text: str) -> None:
        emit(FolderNotice(text=text))

    with locked(plan.folder, node_rank=plan.nodes.rank, waits=waits) as lock:
        folder, store = Folder(plan.folder, plan.rules), plan.opened()
        folder.sweep()
        yield _Prepared(lock, store, folder, is_shared(store, folder))


def _check_folder(folder: Path, *, makes_it: bool) -> None:
    """Raise InvalidInput for a folder that the trainer could not write to."""
    try:
        if makes_it:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"The folder {folder} cannot be made: {error.strerror}") from error
    if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidInput(f"The folder {folder} cannot be written to", hint="Give one that this user may write to")


def _start(committer: Committer, store: CheckpointStore, happened: Happenings) -> threading.Thread:
    """Run the loop on a thread, which closes the store in the end: a storage that does not answer holds up that
    thread alone."""

    def work() -> None:
        try:
            committer.run()
            store.close()
        except Exception as error:  # nothing may end the training
            emit(FolderNotice(text=f"the agent has failed, {type(error).__name__}: {error}"))
        finally:
            happened.put(_Happened("through"))

    thread = threading.Thread(target=work, name="ckptstore-agent", daemon=True)
    thread.start()
    return thread


def _follow(handing: _Handing, committer: Committer) -> int:
    """Wait for the end of the trainer, and return its exit code."""
    while True:
        if handing.is_ending and not committer.is_hurried:
            committer.hurry()
        came = handing.next()
        if came is not None and came.what == "ended":
            return came.number
        if came is not None and came.what == "signal":
            committer.look_now()


def _end(plan: AgentPlan, committer: Committer, happened: Happenings, patience_seconds: float = 0.0) -> int:
    """Wait for the last commits, and say what is left; the exit code of that, 0 when all is well.

    A signal makes the newest checkpoint the only one that is waited for, another one ends the wait. `patience_seconds`
    is that of `Committer.finish`.
    """
    committer.finish(patience_seconds=patience_seconds)
    grace_seconds = plan.grace_seconds
    until = None if grace_seconds is None else time.monotonic() + grace_seconds
    reason = ""
    while not reason and not committer.is_through:
        came = _next(happened, until)
        if came is None:
            reason = f"the time after the trainer's end, {grace_seconds:g} s, is over"
            break
        if came.what == "through":
            break
        if came.what == "signal" and came.number in ENDING:
            if committer.is_hurried:
                reason = f"a second {signal.Signals(came.number).name} came"
            committer.hurry()
    return _tell_left(plan, committer, reason)


def _next(happened: Happenings, until: float | None = None) -> _Happened | None:
    """Return what happens next, None when the time is over. The system may give a signal to another thread; then
    nothing wakes this one, which runs the handlers. So it wakes by itself."""
    while True:
        left = _WAKE_SECONDS if until is None else max(0.0, min(_WAKE_SECONDS, until - time.monotonic()))
        try:
            return happened.get(timeout=left)
        except queue.Empty:
            if until is not None and time.monotonic() >= until:
                return None


def _tell_left(plan: AgentPlan, committer: Committer, reason: str) -> int:
    """Say what has become of everything; return the exit code of that, 0 if all is well."""
    outcome = _outcome(committer)
    if outcome is None:
        emit(FolderNotice(text=f"the folder {plan.folder} did not answer, so what is left in it is not known"))
        return CkptstoreError.exit_code
    failed, left = committer.failures.error, outcome.left
    if outcome.unfinished:
        emit(UnfinishedLeft(names=tuple(outcome.unfinished), reasons=tuple(outcome.unfinished.values())))
    if left:
        emit(
            CheckpointsLeft(
                steps=tuple(found.step for found in left if found.step is not None),
                names=tuple(found.name for found in left),
                reason=reason or (str(failed) if failed else "the agent ended before they could be"),
            )
        )
    emit(
        RunSummary(
            committed=outcome.committed,
            passed_over=outcome.passed,
            left=tuple(found.name for found in left),
            unfinished=tuple(outcome.unfinished),
        )
    )
    if not outcome.had_any:
        emit(FolderNotice(text=_nothing_in(plan)))
        return NOTHING_FOUND
    if left or not outcome.has_last:
        return failed.exit_code if failed else CkptstoreError.exit_code
    return 0


def _outcome(committer: Committer) -> Outcome | None:
    """Return the outcome; None if the folder does not answer, as a network file system that is away."""
    found: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def look() -> None:
        try:
            found.put(committer.outcome())
        except (CkptstoreError, OSError) as error:
            emit(FolderNotice(text=f"the folder cannot be looked at: {error}"))
            found.put(None)

    threading.Thread(target=look, daemon=True).start()
    try:
        return found.get(timeout=_LAST_LOOK_SECONDS)
    except queue.Empty:
        return None


def _nothing_in(plan: AgentPlan) -> str:
    """Say that nothing was recognised, and what to write."""
    if plan.folder is None or not plan.folder.is_dir():
        return f"there is no folder {plan.folder}; --folder is the one that the trainer writes its checkpoints to"
    if plan.rules.patterns:
        return f"nothing in {plan.folder} fits {' or '.join(plan.rules.patterns)}, and nothing has a known shape"
    return f"nothing in {plan.folder} has the shape of a checkpoint; --pattern GLOB says what a checkpoint is called"


def _leave(code: int, thread: threading.Thread, committer: Committer) -> int:
    """Return the exit code, for an agent that is through. One that is not ends here: its thread may wait for a
    storage."""
    thread.join(_CLOSE_SECONDS if committer.is_through else 0.0)
    if thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
