"""Calls into a client that may block for ever (its server's machine is gone), waited for until a deadline only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger("ckptstore.group")

T = TypeVar("T")

_LAST_CALLS_SECONDS = 5.0

_Call = tuple[Callable[[], Any], "Future[Any] | None"]


class Caller:
    """Runs calls one after another on a daemon thread, which does not keep the process from ending."""

    def __init__(self, *, timeout_seconds: float) -> None:
        self.given_up: str | None = None
        """Why nothing is called any more, None while all is well."""
        self._timeout_seconds = timeout_seconds
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="ckptstore-group", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises. TimeoutError at the deadline, and at once when given up."""
        if self.given_up is not None:
            raise TimeoutError(self.given_up)
        future: Future[T] = Future()
        self._calls.put((function, future))
        try:
            return future.result(self._timeout_seconds)
        except TimeoutError:
            if not future.done():
                self.give_up(f"it gave no answer for {self._timeout_seconds:g} s")
            raise

    def later(self, function: Callable[[], object]) -> None:
        """Run the function some time, and log what it raises."""
        if self.given_up is None:
            self._calls.put((function, None))

    def give_up(self, reason: str) -> None:
        """Call nothing any more; the thread ends when the present call does. The first reason is kept."""
        if self.given_up is None:
            self.given_up = reason
            self._calls.put(None)

    def close(self) -> None:
        """Let the calls that are left finish, for a few seconds at most."""
        if self.given_up is None:
            self.give_up("it is closed")
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
        del call, function, future  # a large payload must not stay until the next call
