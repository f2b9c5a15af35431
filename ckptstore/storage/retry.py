"""Retry requests in one small layer, bounded in tries and in time, with full jitter. The only importer of tenacity.

Only errors whose class is `retryable` are retried. Retries within retries do not multiply: the outermost call on a
thread is the one that tries again. `open_place` wraps every storage by `with_retries`, so that its errors are final.
A transfer retries around the storage, and stops when another thread of it has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError
from ckptstore.events import RequestRetried, emit
from ckptstore.runtime.beat import Beat, alive, no_beat
from ckptstore.storage.base import POWERS, Disk, Storage, methods_of
from ckptstore.storage.traffic import traffic_here

T = TypeVar("T")


class _Here(threading.local):
    is_inside = False
    """True if this thread is inside a request that is retried."""


_here = _Here()


_limited: ContextVar[Callable[[RetryConfig], RetryConfig]] = ContextVar("ckptstore-retries", default=lambda it: it)
"""The limit to the retries of the present work, on all its threads."""


@contextmanager
def _limiting(limit: Callable[[RetryConfig], RetryConfig]) -> Iterator[None]:
    token = _limited.set(limit)
    try:
        yield
    finally:
        _limited.reset(token)


hurried = partial(_limiting, lambda it: replace(it, retry_deadline_seconds=it.retry_deadline_seconds / 10))
"""A context in which requests are retried for a tenth of the deadline: something has failed for all of it before."""
briefly = partial(_limiting, lambda it: replace(it, retry_attempts=min(2, it.retry_attempts)))
"""A context in which each request is tried twice at most, the second time soon. For what follows a commit."""
once = partial(_limiting, lambda it: replace(it, retry_attempts=1))
"""A context in which no request is tried again. For whoever tries again himself, by a deadline of his own."""


def retrying(config: RetryConfig, what: str, request: Callable[[], T], *, check: Beat = no_beat) -> T:
    """Call `request` until it returns, and return its result. Each try begins with `check`.

    Raises the error of the last try; errors that are not retryable are raised at once.
    """
    if _here.is_inside:
        check()
        return request()
    _here.is_inside = True
    traffic_here().requests += 1
    try:  # tenacity costs 30 ms to import, and most requests need no second try
        check()
        return request()
    except CkptstoreError as error:
        if not error.retryable or config.retry_attempts == 1:
            raise
        return _retry(config, what, request, error, check)
    finally:
        _here.is_inside = False


def _retry(config: RetryConfig, what: str, request: Callable[[], T], first: CkptstoreError, check: Beat) -> T:
    try:
        import tenacity
    except OSError:  # what is retried may be that no file can be opened
        raise first from None

    config = _limited.get()(config)
    failed = [first]

    def try_once() -> T:
        if failed:
            raise failed.pop()
        traffic = traffic_here()
        traffic.requests += 1
        traffic.retries += 1
        check()
        return request()

    def told(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait_seconds = state.next_action.sleep if state.next_action else 0.0
        alive()
        emit(RequestRetried(what=what, error=str(error), attempt=state.attempt_number, wait_seconds=wait_seconds))

    retryer = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(config.retry_attempts)
        | tenacity.stop_before_delay(config.retry_deadline_seconds),
        wait=tenacity.wait_random_exponential(
            multiplier=config.retry_wait_initial_seconds, max=config.retry_wait_max_seconds
        ),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, CkptstoreError) and error.retryable),
        before_sleep=told,
        reraise=True,
    )
    return retryer(try_once)


_AGAIN = {"abort_unfinished", "copy", "copy_from", "delete", "read", "read_if_there", "read_into", "stat"}
_AGAIN |= {"unfinished", "write"}
"""The methods with the same outcome when they run twice."""


def with_retries(storage: Storage, config: RetryConfig) -> Storage:
    """Return the storage with retries in place of those that it may have."""
    storage = without_retries(storage)
    if config.retry_attempts == 1:
        return storage
    names = methods_of(Storage).union(*(methods_of(power) for power in POWERS if isinstance(storage, power)))
    # A deletion whose answer was lost may come late. On a disk an upload writes files of the same names after it.
    again = _AGAIN - {"delete"} if isinstance(storage, Disk) else _AGAIN
    methods = {name: _passed_on(name, is_tried_again=name in again) for name in names - {"list", "uri"}}
    if "create" in names:
        methods["create"] = _create
    retried = type(f"Retried{type(storage).__name__}", (_Retried,), methods)(storage, config)
    return cast(Storage, retried)


def without_retries(storage: Storage) -> Storage:
    """Return the storage inside."""
    return storage.inner if isinstance(storage, _Retried) else storage


class _Retried(Storage):
    def __init__(self, inner: Storage, config: RetryConfig) -> None:
        self.inner = inner
        self.config = config

    @property
    def uri(self) -> str:
        return self.inner.uri

    def list(self, prefix: str) -> Any:
        """List all files before the first one is yielded: a listing that breaks off is started again."""
        return iter(retrying(self.config, f"list {prefix}", lambda: [*self.inner.list(prefix)]))

    def __repr__(self) -> str:
        return repr(self.inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return with_retries, (self.inner, self.config)


def _passed_on(name: str, *, is_tried_again: bool) -> Callable[..., Any]:
    def pass_on(self: _Retried, *arguments: Any, **keywords: Any) -> Any:
        if name == "copy_from":
            arguments = (without_retries(arguments[0]), *arguments[1:])
        request = partial(getattr(self.inner, name), *arguments, **keywords)
        if not is_tried_again:
            return request()
        shown = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        return retrying(self.config, f"{name} {shown}".rstrip(), request)

    return pass_on


def _create(self: Any, key: str, data: bytes) -> bool:
    """Create the file; where an answer was lost, read whose it is: `data` is its caller's own."""
    is_lost = False

    def create() -> bool:
        nonlocal is_lost
        try:
            if self.inner.create(key, data):
                return True
        except CkptstoreError:
            is_lost = True
            raise
        is_ours = bool(is_lost and self.inner.read(key) == data)
        if is_ours:
            self.inner.persist([key])  # on a disk it is perhaps not durable
        return is_ours

    return retrying(self.config, f"create {key}", create)
