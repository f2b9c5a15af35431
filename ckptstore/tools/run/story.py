"""The story of a run, top to bottom: restore, start, commit, end. And of a folder that is watched without a trainer."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.events import emit
from ckptstore.format.layout import CHECKPOINT_PREFIX
from ckptstore.group import StorageGroup
from ckptstore.opening import open_store
from ckptstore.retention import Policy
from ckptstore.storage.base import Disk
from ckptstore.store import CheckpointStore
from ckptstore.tools.run.committer import Committer, Outcome
from ckptstore.tools.run.failures import FINAL, Failures
from ckptstore.tools.run.first_process import stay_behind
from ckptstore.tools.run.folders import Folder, Found, JobSeen, Rules
from ckptstore.tools.run.guess import folder_in_command, folder_in_store, folder_written
from ckptstore.tools.run.lock import locked
from ckptstore.tools.run.meeting import is_shared, restore
from ckptstore.tools.run.nodes import Nodes
from ckptstore.tools.run.notices import (
    CheckpointsLeft,
    CommitsDelayed,
    CommitsStopped,
    FolderNotice,
    FolderWatched,
    RunSummary,
    TrainerEnded,
    TrainerStarted,
    UnfinishedLeft,
)
from ckptstore.tools.run.signals import ENDING, Handing, Happened, Happenings, Signals, next_of
from ckptstore.tools.run.trainer import TrainerProcess, check_command

_CLOSE_SECONDS = 10.0
"""The longest time in which a loop that is over closes its store."""
_THREAD_SECONDS = 0.5
"""The longest time in which a thread that has nothing more to do ends."""
_LOOKS_SECONDS = 3.0
"""The time of the looks at the begin and the end of a quiet time."""
_LAST_LOOK_SECONDS = 60.0
"""The longest time for the last look into the folder: a busy machine takes seconds, one that is away minutes."""
NOTHING_FOUND = 40
"""The exit code for a folder in which nothing was recognised."""


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
    stay_behind()
    check_command(command)
    plan = _located(plan, command)
    place = plan.folder or Path.cwd()
    happened: Happenings = queue.SimpleQueue()
    with Signals() as signals, ExitStack() as stack:
        prepared = None if plan.folder is None else stack.enter_context(_prepared(plan))
        if prepared is not None:
            restore(prepared.store, prepared.folder, shared=prepared.is_shared)
        signals.taken = lambda number: happened.put(Happened("signal", number))
        began, began_at = time.monotonic(), time.time()
        trainer = TrainerProcess(
            command,
            ended=lambda code: happened.put(Happened("ended", code)),
            lock=prepared.lock if prepared else None,
        )
        emit(TrainerStarted(pid=trainer.pid, command=tuple(command)))
        handing = Handing(trainer, happened)
        if prepared is None:
            plan, why_not = _written(plan, handing, place, since_seconds=began_at)
            if plan.folder is None:
                trainer.release()
                emit(FolderNotice(text=why_not))
                code = trainer.code or 0
                return NOTHING_FOUND if plan.require_commit and code == 0 else code
            late = _Late(plan, handing)
            prepared = late.prepared(stack)
            if prepared is None:
                emit(TrainerEnded(code=trainer.code or 0, seconds=time.monotonic() - began))
                trainer.release()
                failure, code = late.tell_left(trainer.seen), trainer.code or 0
                code = failure if plan.require_commit and code == 0 else code
                return _leave(code, late.thread, patience_seconds=_THREAD_SECONDS)
        committer = plan.committer(prepared, job=trainer.seen, began_at=began_at)
        thread = _start(committer, prepared.store, happened)
        code = _follow(handing, committer)
        emit(TrainerEnded(code=code, seconds=time.monotonic() - began))
        trainer.release()
        patience_seconds = plan.rules.quiet_seconds + _LOOKS_SECONDS if code == 0 else 0.0
        failure = _end(plan, committer, happened, patience_seconds)
        code = failure if plan.require_commit and code == 0 else code
        return _leave(code, thread, patience_seconds=_CLOSE_SECONDS if committer.is_through else 0.0)


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


def _written(plan: AgentPlan, handing: Handing, place: Path, *, since_seconds: float) -> tuple[AgentPlan, str]:
    """Wait for a first checkpoint below a place, and return the plan with its folder. If the trainer ends before there
    is one, there is one more look; then return the reason why there is none, for people."""
    noted: set[str] = set()
    came = None
    while True:
        has_ended = came is not None and came.what == "ended"
        why_not = f"nothing below {place} has the shape of a checkpoint; give --folder"
        try:
            folder = folder_written(place, plan.rules, since_seconds=since_seconds)
        except Exception as error:  # the training goes on, and the next look may go well
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


class _Late:
    """Prepares a folder that was found while the trainer runs, and its store: on a thread, for a storage may not
    answer, and as often as it takes. Nothing of that ends the training."""

    def __init__(self, plan: AgentPlan, handing: Handing) -> None:
        self._plan, self._handing = plan, handing
        self._failures = Failures()
        self._tried: queue.SimpleQueue[tuple[_Prepared, ExitStack] | CkptstoreError] = queue.SimpleQueue()
        self._ended: Happened | None = None
        self._give_up_at: float | None = None
        self.thread = self._try()

    def prepared(self, stack: ExitStack) -> _Prepared | None:
        """Return what is prepared, in `stack` until the end; None when the trainer has ended and there is no hope or no
        time for one try more."""
        is_last, next_at = False, None
        while True:
            was_ending = self._handing.is_ending
            came = self._handing.next(min((at for at in (next_at, self._give_up_at) if at is not None), default=None))
            if came is not None and came.what == "prepared":
                tried = self._tried.get()
                if not isinstance(tried, CkptstoreError):
                    return self._handed_over(*tried, stack)
                self._failures.error = tried
                if is_last:
                    return None
                next_at = self._failed(tried)
            elif came is not None and came.what == "ended":
                self._ended, grace_seconds = came, self._plan.grace_seconds
                self._give_up_at = None if grace_seconds is None else time.monotonic() + grace_seconds
                next_at = None if next_at is None else time.monotonic()
            elif came is not None and came.what == "signal" and self._ended and was_ending and came.number in ENDING:
                return None
            if self._ended and (self._failures.is_final or _is_over(self._give_up_at)):
                return None
            if _is_over(next_at):
                self.thread, next_at, is_last = self._try(), None, self._ended is not None

    def _handed_over(self, prepared: _Prepared, own: ExitStack, stack: ExitStack) -> _Prepared:
        stack.push(own)
        if self._ended is not None:
            self._handing.happened.put(self._ended)  # for who waits for the trainer
        return prepared

    def _failed(self, error: CkptstoreError) -> float | None:
        """Say that a try has failed, and return the time of the next one; None for never."""
        if isinstance(error, FINAL):
            self._failures.is_final = True
            emit(CommitsStopped(reason=str(error)))
            return None
        wait_seconds = 0.0 if self._ended else self._failures.delay(self._plan.interval_seconds)
        emit(CommitsDelayed(wait_seconds=wait_seconds, error=str(error)))
        return time.monotonic() + wait_seconds

    def _try(self) -> threading.Thread:
        def work() -> None:
            with ExitStack() as own:
                try:
                    prepared = own.enter_context(_prepared(self._plan))
                    with ExitStack() as failed:
                        failed.callback(prepared.store.close)
                        prepared.store.resume()
                        failed.pop_all()
                    self._tried.put((prepared, own.pop_all()))
                except Exception as error:  # nothing may end the training
                    own.close()  # before the next try: it has the lock
                    failure = error if isinstance(error, CkptstoreError) else CkptstoreError(f"{error!r}")
                    self._tried.put(failure)
                self._handing.happened.put(Happened("prepared"))

        thread = threading.Thread(target=work, name="ckptstore-agent", daemon=True)
        thread.start()
        return thread

    def tell_left(self, job: Callable[[], JobSeen]) -> int:
        """Say what the folder has, and that nothing of it is in the store; return the exit code for that."""
        folder, error = self._plan.folder, self._failures.error
        assert folder is not None  # it was found
        reason = str(error) if error else "the agent ended before the store had answered"
        left: tuple[Found, ...] = ()
        unfinished: Mapping[str, str] = {}
        try:
            place = Folder(folder, self._plan.rules)
            place.look(job(), notes=False)  # another agent may work on it
            look = place.look(job(), notes=False)
            left, unfinished = look.finished, look.unfinished
        except Exception as looked:
            emit(FolderNotice(text=f"the folder cannot be looked at: {looked}"))
        _tell_rest({}, 0, left, unfinished, reason)
        return CkptstoreError.exit_code if error is None else error.exit_code


def _is_over(at: float | None) -> bool:
    return at is not None and time.monotonic() >= at


def watch(plan: AgentPlan, *, once: bool) -> int:
    """Commit what appears in a folder, whoever writes it, until a signal comes; with `once` what is finished now.

    Returns 128 + N after signal N, and the code of the error after which nothing more is committed; with `once` or
    `require_commit` the code of the error of what could not be committed, 0 if all is well.
    """
    happened: Happenings = queue.SimpleQueue()
    if plan.folder is not None and once and not plan.folder.is_dir():
        raise InvalidInput(f"There is no folder {plan.folder}", hint="Give the folder that the trainer has written to")
    with Signals() as signals, _prepared(plan) as prepared:
        signals.taken = lambda number: happened.put(Happened("signal", number))
        committer = plan.committer(prepared, job=JobSeen, began_at=time.time())
        emit(FolderWatched(folder=str(prepared.folder.path)))
        if not prepared.folder.path.is_dir():
            emit(FolderNotice(text=f"there is no folder {prepared.folder.path} yet"))
        thread = _start(committer, prepared.store, happened)
        waited_for: frozenset[str] = frozenset()
        code = stopped = 0
        while code == 0:
            came = next_of(happened, time.monotonic() + plan.interval_seconds if once else None)
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
        return _leave(stopped or code, thread, patience_seconds=_CLOSE_SECONDS if committer.is_through else 0.0)


@contextmanager
def _prepared(plan: AgentPlan) -> Iterator[_Prepared]:
    """Yield the folder and the store. Collective. Raises what is wrong with either."""
    assert plan.folder is not None  # it was located
    _check_folder(plan.folder, makes_it=plan.makes_folder)
    with locked(plan.folder, node_rank=plan.nodes.rank) as lock:
        folder, store = Folder(plan.folder, plan.rules), plan.opened()
        storage, real = job_of(store).storage, plan.folder.resolve()
        if isinstance(storage, Disk):
            root = storage.local_path("").resolve()
            if real == root or real.is_relative_to(root / CHECKPOINT_PREFIX):
                store.close()
                raise InvalidInput(
                    f"The folder {real} is the store {root}, or that of its checkpoints",
                    hint="Give the store a directory beside it",
                )
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
            happened.put(Happened("through"))

    thread = threading.Thread(target=work, name="ckptstore-agent", daemon=True)
    thread.start()
    return thread


def _follow(handing: Handing, committer: Committer) -> int:
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
        came = next_of(happened, until)
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


def _tell_left(plan: AgentPlan, committer: Committer, reason: str) -> int:
    """Say what has become of everything; return the exit code of that, 0 if all is well."""
    outcome = _outcome(committer)
    if outcome is None:
        emit(FolderNotice(text=f"the folder {plan.folder} did not answer, so what is left in it is not known"))
        return CkptstoreError.exit_code
    failed, left = committer.failures.error, outcome.left
    reason = reason or (str(failed) if failed else "the agent ended before they could be")
    _tell_rest(outcome.passed, outcome.committed, left, outcome.unfinished, reason)
    if not outcome.had_any:
        emit(FolderNotice(text=_nothing_in(plan)))
        return NOTHING_FOUND
    if left or not outcome.has_last:
        return failed.exit_code if failed else CkptstoreError.exit_code
    return 0


def _tell_rest(
    passed: dict[str, str], committed: int, left: Sequence[Found], unfinished: Mapping[str, str], reason: str
) -> None:
    """Say what is in the store, and for which reasons the rest is not."""
    names = tuple(found.name for found in left)
    if unfinished:
        emit(UnfinishedLeft(names=tuple(unfinished), reasons=tuple(unfinished.values())))
    if left:
        steps = tuple(found.step for found in left if found.step is not None)
        emit(CheckpointsLeft(steps=steps, names=names, reason=reason))
    emit(RunSummary(committed=committed, passed_over=passed, left=names, unfinished=tuple(unfinished)))


def _outcome(committer: Committer) -> Outcome | None:
    """Return the outcome; None if the folder does not answer, as a network file system that is away."""
    found: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def look() -> None:
        try:
            found.put(committer.outcome())
        except Exception as error:
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


def _leave(code: int, thread: threading.Thread, *, patience_seconds: float = 0.0) -> int:
    """Return the exit code, for an agent that is through within that time. One that is not ends here: its thread may
    wait for a storage."""
    thread.join(patience_seconds)
    if thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
