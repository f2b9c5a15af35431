"""Follow a store: report each commit to a tracker, on a thread of its own, without delaying or failing a save."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from ckptstore.boundary import boundary, bounded
from ckptstore.catalogue import job_of
from ckptstore.errors import InvalidInput
from ckptstore.events import CheckpointCommitted, Event, listening
from ckptstore.integrations.trackers.reference import Reference
from ckptstore.runtime.fork import in_forked_child
from ckptstore.storage.uri import parse_uri
from ckptstore.store import CheckpointStore, wait_in_flight

logger = logging.getLogger("ckptstore.trackers")

MAX_WAITING = 1000
"""References that wait for a tracker; above that the oldest is dropped."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_ERRORS = 3
"""Failures on one reference, while the tracker accepts others."""


class Tracker(Protocol):
    """A receiver of references. The contract, for whoever writes one:

    - `log` and `close` are called on one thread that belongs to the tracker, one call at a time, in the process of
      rank 0 alone. They may take their time. References come in the order of commits, except for repeated ones.
    - `log` may be called again with the same reference, after a call that raised: that must leave one reference.
    - A reference that will never be accepted raises InvalidInput, and is dropped with a warning. Any other error means
      that the tracker is unavailable: the reference waits and is tried again. If others are accepted meanwhile, it is
      dropped at the third such error.
    - Creating a tracker needs no connection and leaves nothing behind, for every rank creates one. It may look up the
      run of the calling thread.
    - `str(tracker)` names it and its run in messages, without secrets.
    """

    def log(self, reference: Reference) -> None:
        """Record the reference and its metrics. See the contract above."""

    def close(self) -> None:
        """Release connections after the last reference. The run itself belongs to the user, and stays open."""


@bounded
class Following:
    """A store that a tracker follows, created by `follow`. Ends with `close`, its context, the store or the process."""

    def __init__(
        self,
        store_uri: str,
        tracker: Tracker,
        *,
        settle: Callable[[], object] | None = None,
        close_seconds: float,
        goes_on: Callable[[], bool] | None = None,
    ) -> None:
        self._store_uri = store_uri
        self._tracker = tracker
        self._settle = settle
        self._goes_on = goes_on
        self._close_seconds = close_seconds
        self._changed = threading.Condition()
        self._waiting: deque[Reference] = deque()
        self._sending: Reference | None = None
        self._given_up: list[Reference] = []
        self._thread: threading.Thread | None = None
        self._ends_at: float | None = None
        """The end of sending, by the monotonic clock. None while the store is followed."""
        self._is_forked = False
        self._is_away = False
        self._errors: Counter[Reference] = Counter()
        self._listening = ExitStack()
        self._listening.enter_context(listening(self._on_event))
        atexit.register(self._end)
        in_forked_child(self, Following._after_fork)

    @property
    def unsent(self) -> tuple[Reference, ...]:
        """References that the tracker does not have, in the order of commits: dropped, or still waiting."""
        with self._changed:
            sending = () if self._sending is None else (self._sending,)
            return tuple(sorted((*self._given_up, *sending, *self._waiting), key=lambda item: item.number))

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the tracker has everything committed so far; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._sending is None, timeout_seconds)

    def close(self) -> None:
        """Wait for the save in flight, then up to `close_seconds` for the tracker; warn of references not sent.

        Raises nothing. May be called again. An open store with a fast tier is followed on until it is closed: only then
        does its newest checkpoint come into the store.
        """
        if self._goes_on is None or not self._goes_on():
            self._end()

    def _end(self) -> None:
        if self._is_forked or self._ends_at is not None:
            return
        if self._settle is not None:
            self._settle()
        self._listening.close()
        atexit.unregister(self._end)
        with self._changed:
            self._ends_at = time.monotonic() + self._close_seconds
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return
        thread.join(self._close_seconds)
        if unsent := self.unsent:
            steps = ", ".join(str(item.step) for item in unsent[:10]) + (", ..." if len(unsent) > 10 else "")
            logger.warning(
                "%s was not told of %d checkpoints of %s (steps %s); the checkpoints themselves are whole. "
                "Tell it later: tracker.log(Reference.to(store[step]))",
                *(self._tracker, len(unsent), self._store_uri, steps),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_event(self, event: Event) -> None:
        """Queue the reference of a commit. This runs on the thread of the save."""
        if not isinstance(event, CheckpointCommitted) or event.rank != 0 or event.store != self._store_uri:
            return
        if self._is_forked:
            logger.warning("step %d is not told to %s: a forked process follows anew", event.step, self._tracker)
            return
        with self._changed:
            self._waiting.append(Reference.of_event(event))
            if len(self._waiting) > MAX_WAITING:
                self._give_up(self._waiting.popleft(), f"more than {MAX_WAITING} wait")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckptstore-tracker", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        """Send waiting references, in order, until the end."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while (reference := self._next()) is not None:
            try:
                self._tracker.log(reference)
            except InvalidInput as error:
                with self._changed:
                    self._sending = None
                    self._give_up(reference, _without_secrets(str(error)))
            except Exception as error:  # a tracker must never fail a save
                self._put_back(reference, error, pause_seconds)
                pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
                continue
            self._sent(reference)
            pause_seconds = FIRST_PAUSE_SECONDS
        try:
            self._tracker.close()
        except Exception as error:
            logger.warning("%s did not close well: %s", self._tracker, _shown(error))

    def _next(self) -> Reference | None:
        """Wait for the next reference; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends_at is not None)
            is_over = self._ends_at is not None and time.monotonic() > self._ends_at
            self._sending = None if is_over or not self._waiting else self._waiting.popleft()
            return self._sending

    def _sent(self, reference: Reference) -> None:
        with self._changed:
            self._sending = None
            del self._errors[reference]
            self._changed.notify_all()
        if self._is_away:
            self._is_away = False
            logger.info("%s answers again", self._tracker)

    def _put_back(self, reference: Reference, error: Exception, pause_seconds: float) -> None:
        """Queue a reference again, behind the others, and wait a moment. Logged once until the tracker is back."""
        if not self._is_away:
            self._is_away = True
            self._errors[reference] += 1
            text = "%s does not take step %d: %s. Training goes on, and what it misses is sent later"
            logger.warning(text, self._tracker, reference.step, _shown(error))
        with self._changed:
            self._sending = None
            if self._errors[reference] < MAX_ERRORS:
                self._waiting.append(reference)
            else:
                self._give_up(reference, "it takes others, and has failed on this one again and again")
            self._changed.wait_for(lambda: self._ends_at is not None, pause_seconds)
            ends_at = self._ends_at
        if ends_at is not None:  # the last tries come quickly, one after another
            time.sleep(max(0.0, min(FIRST_PAUSE_SECONDS / 4, ends_at - time.monotonic())))

    def _give_up(self, reference: Reference, reason: str) -> None:
        self._given_up.append(reference)
        logger.warning("%s is not told of step %d: %s", self._tracker, reference.step, reason)

    def _after_fork(self) -> None:
        """Reset a forked child. It has no thread of its parent's, and perhaps a connection in the middle of a reply."""
        self._is_forked = True
        self._changed = threading.Condition()
        self._thread, self._sending = None, None
        self._waiting.clear()


@boundary
def follow(
    store: CheckpointStore | str | os.PathLike[str], tracker: Tracker, *, close_seconds: float = 30.0
) -> Following:
    """Report every checkpoint that this process commits in a store from now on to a tracker.

    Every rank may call it; only rank 0 reports. It covers `save`, `save_async`, `save_directory`, torch's `dcp.save`
    and the callbacks of frameworks. A save never waits for the tracker and never fails because of it. References that
    cannot be sent wait, at most 1000 of them, and are tried again.

    With a fast tier a checkpoint is reported when it is in the store; one that never comes there is never reported. An
    open store with one is followed until it is closed.

    Args:
        store: an open store, or the URI of one that other code in this process opens, such as a callback.
        tracker: see `Tracker` for its contract.
        close_seconds: the longest wait at the end for a tracker that is slow or unavailable.

    It ends with the `close` of the result, at the end of its `with` block, when the open store is closed, or when the
    process exits. Raises InvalidInput for a closed store and for an object that is no tracker.
    """
    if not callable(getattr(tracker, "log", None)) or not callable(getattr(tracker, "close", None)):
        raise InvalidInput(f"tracker is a {type(tracker).__name__}, it is an object with log and close")
    if not close_seconds >= 0:
        raise InvalidInput(f"close_seconds is {close_seconds!r}, it must be at least 0")
    if isinstance(store, str | os.PathLike):
        return Following(parse_uri(store).uri, tracker, close_seconds=close_seconds)
    if not isinstance(store, CheckpointStore):
        raise InvalidInput(f"store is a {type(store).__name__}, it is an open store or a URI")
    job = job_of(store)
    following = Following(
        store.uri,
        tracker,
        settle=lambda: wait_in_flight(store),
        close_seconds=close_seconds,
        goes_on=lambda: job.tier is not None and not job.is_closed,
    )
    job.at_close(following._end)
    return following


def _shown(error: Exception) -> str:
    return _without_secrets(f"{type(error).__name__}: {error}")


def _without_secrets(text: str) -> str:
    """Return a message of a tracker's client without the user and password of a URL."""
    return re.sub(r"://[^/@\s]+@", "://", text)
