"""Call a client that may block for ever (its server's machine is gone), and wait until a deadline only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptstore.runtime.parallel import started

logger = logging.getLogger("ckptstore.group")

T = TypeVar("T")

_LAST_CALLS_SECONDS = 5.0

_Call = tuple[Callable[[], Any], "Future[Any] | None"]


class Caller:
    """A daemon thread that runs calls one after another, and does not keep the process from ending.

    Where no thread can start, as at the end of an interpreter, `call` runs them itself: then they have no deadline.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        self.given_up: str | None = None
        """The reason for which calls have stopped; None while all is well."""
        self._timeout_seconds = timeout_seconds
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = started(partial(_run, self._calls), name="ckptstore-group")

    def call(self, function: Callable[[], T]) -> T:
        """Call the function, and return or raise its result. Raises TimeoutError at the deadline, and at once after
        `give_up`."""
        if self.given_up is not None:
            raise TimeoutError(self.given_up)
        future: Future[T] = Future()
        self._calls.put((function, future))
        if self._thread is None:
            self._calls.put(None)
            _run(self._calls)
        try:
            return future.result(self._timeout_seconds)
        except TimeoutError:
            if not future.done():
                self.give_up(f"it gave no answer for {self._timeout_seconds:g} s")
            raise

    def later(self, function: Callable[[], object]) -> None:
        """Run the function later, and log its error."""
        if self.given_up is None:
            self._calls.put((function, None))

    def give_up(self, reason: str) -> None:
        """Stop all further calls; the thread ends with the present call. The first reason is kept."""
        if self.given_up is None:
            self.given_up = reason
            self._calls.put(None)

    def close(self) -> None:
        """Wait a few seconds at most for the remaining calls, and stop."""
        if self.given_up is None:
            self.give_up("it is closed")
            if self._thread is None:
                _run(self._calls)
            else:
                self._thread.join(_LAST_CALLS_SECONDS)


def _run(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        function, future = call
        try:
            result = function()
        except BaseException as error:
            if future is None:
                logger.debug("a request to the key-value store failed: %s", error)
            else:
                future.set_exception(error)
        else:
            if future is not None:
                future.set_result(result)
        del call, function, future  # frees a large payload before the next call
