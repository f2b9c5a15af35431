"""Run saves in the background: one at a time, in the order of the calls, with no failure lost.

The thread of a save does everything that follows the staging: it stores the files, agrees with the other ranks in a
lane of its own, and commits. It ends with the save; the interpreter waits for it at exit.
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from ckptstore.boundary import bounded
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, InvalidInput, RankFailed, SaveBusy
from ckptstore.format.layout import known_step
from ckptstore.job import Job
from ckptstore.runtime.fork import in_forked_child
from ckptstore.runtime.parallel import is_ending

logger = logging.getLogger("ckptstore")

OnBusy = Literal["wait", "skip", "error"]


@bounded
class PendingSave:
    """An asynchronous save. It saves a copy of the state, so the state may be changed."""

    def __init__(self, step: int, *, stalled_seconds: float = 0.0, skipped: bool = False) -> None:
        self.step = step
        self.stalled_seconds = stalled_seconds
        """The time for which the call held up the training: waiting for the save before, agreeing and copying."""
        self.skipped = skipped
        """True if the save was left out, because the one before was still in flight and on_busy="skip"."""
        self._ended = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._error: CkptstoreError | None = None
        self._bring: Callable[[float | None], Checkpoint] | None = None
        if skipped:
            self._ended.set()

    def done(self) -> bool:
        """Return True once the save has ended, with or without success."""
        return self._ended.is_set()

    def result(self, timeout_seconds: float | None = None) -> Checkpoint | None:
        """Wait for the commit and return the checkpoint; None if the save was skipped.

        Raises the save's error, the same on all ranks, and TimeoutError if the save has not ended in time.
        """
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"The save of step {self.step} has not ended after {timeout_seconds} seconds")
        if self._error is not None:
            raise self._error
        return self._checkpoint

    def durable(self, timeout_seconds: float | None = None) -> Checkpoint | None:
        """Wait until the checkpoint is in the store, and return it as stored there; None if the save was skipped.

        Without a fast tier this is `result`. With one, a checkpoint is complete once it is on the disks of the nodes,
        and a drain brings it into the store behind the training. If a newer checkpoint was drained in its place, that
        one is returned. When all ranks call this for a checkpoint that `FastTier.drain` leaves out, it is drained too.

        Raises the save's error; NotDurable, or another error of the drain, if the checkpoint is still only on the
        nodes; TimeoutError if it is not in the store in time.
        """
        began = time.monotonic()
        found = self.result(timeout_seconds)
        if self._bring is None:
            return found
        left = None if timeout_seconds is None else max(0.0, timeout_seconds - (time.monotonic() - began))
        return self._bring(left)

    def brought_by(self, bring: Callable[[float | None], Checkpoint]) -> None:
        """Have `durable` call `bring`, which waits until a checkpoint that is complete on the nodes is in the store."""
        self._bring = bring

    def error(self) -> CkptstoreError | None:
        """Return the save's error; None while it runs, and if it has succeeded."""
        return self._error

    def __repr__(self) -> str:
        how = "skipped" if self.skipped else "failed" if self._error else "done" if self.done() else "in flight"
        return f"PendingSave(step={self.step}, {how}, stalled_seconds={self.stalled_seconds:.3f})"


class Background:
    """The background saves of one store in one process."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._unseen: CkptstoreError | None = None
        self._tells_at_exit = False
        in_forked_child(self, Background._after_fork)

    def _after_fork(self) -> None:
        """End the pending save in a forked child, which will not learn the outcome of its parent's save."""
        if (pending := self.pending) is not None:
            pending._error = RankFailed("the save goes on in the parent of this process", step=pending.step)
            pending._error.committed = None
            pending._ended = threading.Event()
            pending._ended.set()

    @property
    def pending(self) -> PendingSave | None:
        """The save in flight; None if there is none."""
        return self._pending if self._pending is not None and not self._pending.done() else None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no save is in flight. Return False on timeout."""
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_free(self, job: Job, on_busy: OnBusy, *, step: Any) -> bool:
        """Return True if a save may begin once `wait` returns; the same on all ranks. Collective. Raises SaveBusy."""
        if on_busy not in ("wait", "skip", "error"):
            job.raise_on_all(InvalidInput(f"on_busy is {on_busy!r}, it is 'wait', 'skip' or 'error'"))
        if on_busy == "wait":
            return True

        with job.group.meeting(f"busy: {on_busy}", step=known_step(step)) as meeting:
            busy = meeting.gather(self.pending is not None)
            is_busy = meeting.tell(lambda: any(busy))
        if is_busy and on_busy == "error":
            raise SaveBusy(f"The save before that of step {step} is still in flight", hint="Save less often, or wait")
        return not is_busy

    def failure(self, *, max_failures: Any = 0) -> CkptstoreError | None:
        """Return the error of the last save, once only, if more than `max_failures` saves have failed in a row."""
        if not isinstance(max_failures, int) or max_failures < 0:
            raise InvalidInput(f"max_failures is {max_failures!r}, it is an integer of at least 0")
        error, self._unseen = self._unseen, None
        if error is None or self._failures > max_failures:
            return error
        logger.warning("%d saves in a row have failed, %d are tolerated: %s", self._failures, max_failures, error)
        return None

    def raise_failure(self, *, max_failures: int = 0) -> None:
        """Raise the error that `failure` returns, if any."""
        error = self.failure(max_failures=max_failures)
        if error is not None:
            raise error

    def forgive(self, pending: PendingSave) -> None:
        """Drop the error of this save, which the caller has handled: it still counts, but is not raised again."""
        if self._unseen is pending.error():
            self._unseen = None

    def start(self, pending: PendingSave, save: Callable[[], Checkpoint]) -> PendingSave:
        """Run `save` on a thread of its own, or at once if no thread can start. No other save may be in flight."""

        def run() -> None:
            try:
                pending._checkpoint = save()
                self._failures = 0
            except CkptstoreError as error:
                self._fail(pending, error)
            except BaseException as error:  # nothing may be lost with the thread
                failure = RankFailed(f"{type(error).__name__}: {error}", step=pending.step, committed=None)
                failure.__cause__ = error
                self._fail(pending, failure, is_told=isinstance(error, Exception))
            finally:
                pending._ended.set()

        self._pending = pending
        thread = threading.Thread(target=run, name="ckptstore-save", daemon=False)
        try:
            if is_ending():  # nobody would wait for it, and it would be lost without a word
                raise RuntimeError("the interpreter ends")
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            logger.warning("step %d is saved before the call returns: %s", pending.step, error)
            run()
        return pending

    def failed(self, pending: PendingSave, error: CkptstoreError, *, max_failures: int) -> PendingSave:
        """Record that a save failed before it could `start`. Raises the error if it exceeds `max_failures`."""
        self._fail(pending, error)
        pending._ended.set()
        self.raise_failure(max_failures=max_failures)
        return pending

    def _fail(self, pending: PendingSave, error: CkptstoreError, *, is_told: bool = True) -> None:
        self._failures += 1
        pending._error = self._unseen = error
        if is_ending():
            self._tell_unseen()
        elif is_told and not self._tells_at_exit:
            self._tells_at_exit = True
            atexit.register(self._tell_unseen)  # also where nobody holds the store any more

    def _tell_unseen(self) -> None:
        """Log, when the process ends, an error that no caller has received."""
        if self._unseen is not None:
            logger.error("the process ends, and the last asynchronous save has failed: %s", self._unseen)
            self._unseen = None


class Deadline:
    """The time by which this process must be done, set by a signal handler that does nothing else."""

    def __init__(self) -> None:
        self._at: float | None = None

    def set(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now."""
        self._at = time.monotonic() + seconds

    @property
    def is_set(self) -> bool:
        """True once the deadline is set."""
        return self._at is not None

    def left_seconds(self) -> float | None:
        """Return the seconds left, at least 0; None without a deadline."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


def install_sigterm(deadline: Deadline, seconds: float) -> None:
    """On SIGTERM, set the deadline, then call the previous handler. Main thread only."""
    if not seconds > 0:
        raise InvalidInput(f"seconds is {seconds!r}, it must be above 0")
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        deadline.set(seconds)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handle)
