"""The story of a run, top to bottom: restore, start, commit, end. And of a folder that is watched without a trainer."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.events import emit
from ckptstore.group import StorageGroup
from ckptstore.opening import open_store
from ckptstore.retention import Policy
from ckptstore.store import CheckpointStore
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.tools.run.lock import locked
from ckptstore.tools.run.meeting import is_shared, restore
from ckptstore.tools.run.nodes import Nodes
from ckptstore.tools.run.notices import (
    CheckpointsLeft,
    FolderNotice,
    FolderWatched,
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

Happenings = queue.SimpleQueue[_Happened]


@dataclass(frozen=True, kw_only=True)
class AgentPlan:
    """The task of an agent."""

    store: str
    folder: Path
    rules: Rules
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

    def committer(self, store: CheckpointStore, folder: Folder, **options: Any) -> Committer:
        """Return the loop over this folder."""
        return Committer(
            store=store,
            folder=folder,
            interval_seconds=self.interval_seconds,
            delete_local=self.delete_local,
            **options,
        )


def run(plan: AgentPlan, command: Sequence[str]) -> int:
    """Restore the newest checkpoint, run the command and commit what it writes; returns the exit code.

    The code is the command's, 128 + N after signal N. With `require_commit` it is that of the error where the command
    ended well and something finished is not in the store. What is wrong with the store, the folder or the command is
    raised before the command is started; afterwards nothing is raised.
    """
    check_command(command)
    with _prepared(plan) as (signals, lock, store, folder):
        shared = is_shared(store, plan.folder)
        restore(store, folder, shared=shared)
        happened: Happenings = queue.SimpleQueue()
        signals.taken = lambda number: happened.put(_Happened("signal", number))
        began, began_at = time.monotonic(), time.time()
        trainer = TrainerProcess(command, ended=lambda code: happened.put(_Happened("ended", code)), lock=lock)
        emit(TrainerStarted(pid=trainer.pid, command=tuple(command)))
        committer = plan.committer(
            store,
            folder,
            job=trainer.seen,
            is_shared=shared,
            began_at=began_at,
        )
        thread = _start(committer, store, happened)
        code = _follow(trainer, committer, happened)
        emit(TrainerEnded(code=code, seconds=time.monotonic() - began))
        trainer.release()
        failure = _end(committer, happened, plan.grace_seconds)
        return _leave(failure if plan.require_commit and code == 0 else code, thread, committer)


def watch(plan: AgentPlan, *, once: bool) -> int:
    """Commit what appears in a folder, whoever writes it, until a signal comes; with `once` what is finished now.

    Returns 128 + N after signal N; with `once` or `require_commit` the code of the error of what could not be
    committed, 0 if all is well.
    """
    with _prepared(plan) as (signals, _lock, store, folder):
        happened: Happenings = queue.SimpleQueue()
        signals.taken = lambda number: happened.put(_Happened("signal", number))
        committer = plan.committer(
            store, folder, job=JobSeen, began_at=time.time(), is_shared=is_shared(store, plan.folder)
        )
        if once:
            folder.look(JobSeen())  # what is known by standing still takes two looks
            time.sleep(plan.interval_seconds)
        else:
            emit(FolderWatched(folder=str(folder.path)))
        thread = _start(committer, store, happened)
        code = 0
        while not once and code == 0:
            came = _next(happened)
            if came is None or came.what == "through":
                break
            code = 128 + came.number if came.number in ENDING else 0
        if code:
            committer.hurry()
        failure = _end(committer, happened, plan.grace_seconds)
        return _leave(failure or code if once or plan.require_commit else code, thread, committer)


@contextmanager
def _prepared(plan: AgentPlan) -> Iterator[tuple[Signals, int, CheckpointStore, Folder]]:
    """Yield the folder, locked and without leftovers, and the store. Raises what is wrong with either."""
    _check_folder(plan.folder)

    def waits(text: str) -> None:
        emit(FolderNotice(text=text))

    with Signals() as signals, locked(plan.folder, node_rank=plan.nodes.rank, waits=waits) as lock:
        folder = Folder(plan.folder, plan.rules)
        folder.sweep()
        yield signals, lock, plan.opened(), folder


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"The folder {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
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


def _follow(trainer: TrainerProcess, committer: Committer, happened: Happenings) -> int:
    """Hand signals on until the trainer ends; returns its exit code."""
    while True:
        came = _next(happened)
        assert came is not None  # there is no end to this wait
        if came.what == "ended":
            return came.number
        if came.what == "signal":
            trainer.hand_on(came.number)
            emit(SignalHandedOn(name=signal.Signals(came.number).name))
            if came.number in ENDING:
                committer.hurry()
            else:
                committer.look_now()


def _end(committer: Committer, happened: Happenings, grace_seconds: float | None) -> int:
    """Wait for the last commits, and say what is left; the exit code of that, 0 when all is well.

    A signal makes the newest checkpoint the only one that is waited for, another one ends the wait.
    """
    committer.finish()
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
    return _tell_left(committer, reason)


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


def _tell_left(committer: Committer, reason: str) -> int:
    left, unfinished = committer.left()
    failed = committer.stopped or committer.failed
    if unfinished:
        emit(UnfinishedLeft(names=tuple(unfinished), reasons=tuple(unfinished.values())))
    if not left:
        return 0
    emit(
        CheckpointsLeft(
            steps=tuple(found.step for found in left),
            names=tuple(found.name for found in left),
            reason=reason or (str(failed) if failed else "the agent ended before they could be"),
        )
    )
    return failed.exit_code if failed else CkptstoreError.exit_code


def _leave(code: int, thread: threading.Thread, committer: Committer) -> int:
    """Return the exit code, for an agent that is through. One that is not ends here: its thread may wait for a
    storage."""
    thread.join(_CLOSE_SECONDS if committer.is_through else 0.0)
    if thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
