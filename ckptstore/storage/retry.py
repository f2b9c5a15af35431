"""Retry requests in one small layer, bounded in tries and in time, with full jitter. The only importer of tenacity.

Only errors whose class is `retryable` are retried. A create-if-absent never is: the log settles its outcome.
`RetryConfig(retry_attempts=1)` switches retries off, in tests for instance. Retries within retries do not multiply: the
outermost call on a thread is the one that tries again.

`with_retries` wraps a storage for direct callers: listings, manifests, deletions. The wrapper has the powers of the
storage inside, no more and no fewer.
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

ONCE = RetryConfig(retry_attempts=1)
"""For whoever tries again himself, by a deadline of his own."""


class _Here(threading.local):
    is_inside = False
    """True if this thread is inside a request that is retried."""


_here = _Here()


_HURRIED_SHARE = 0.1
_limited: ContextVar[Callable[[RetryConfig], RetryConfig]] = ContextVar("ckptstore-retries", default=lambda it: it)
"""The limit to the retries of the present work, on all its threads."""


@contextmanager
def hurried() -> Iterator[None]:
    """Retry requests for only a tenth of the deadline while the context lasts. For requests after a failure, which may
    mean that the storage has been unreachable for a whole deadline already."""
    with _limiting(lambda it: replace(it, retry_deadline_seconds=it.retry_deadline_seconds * _HURRIED_SHARE)):
        yield


@contextmanager
def briefly() -> Iterator[None]:
    """Try each request twice at most, the second time soon, while the context lasts. For what follows a commit."""
    with _limiting(lambda it: replace(it, retry_attempts=min(2, it.retry_attempts))):
        yield


@contextmanager
def _limiting(limit: Callable[[RetryConfig], RetryConfig]) -> Iterator[None]:
    token = _limited.set(limit)
    try:
        yield
    finally:
        _limited.reset(token)


def is_retryable(error: BaseException) -> bool:
    """Return True if the same request may succeed later."""
    return isinstance(error, CkptstoreError) and error.retryable


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

    def once() -> T:
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
        retry=tenacity.retry_if_exception(is_retryable),
        before_sleep=told,
        reraise=True,
    )
    return retryer(once)


_AGAIN = frozenset(
    ["abort_unfinished", "copy", "copy_from", "delete", "read", "read_into", "stat", "unfinished", "write"]
)
"""The methods with the same outcome when they run twice. A create is none: its caller settles an unknown outcome."""


def with_retries(storage: Storage, config: RetryConfig) -> Storage:
    """Return the storage with retries. A disk is returned as it is, for its errors are final."""
    if isinstance(storage, Disk) or config.retry_attempts == 1:
        return storage
    names = methods_of(Storage).union(*(methods_of(power) for power in POWERS if isinstance(storage, power)))
    methods = {name: _passed_on(name) for name in names - {"list", "uri"}}
    retried = type(f"Retried{type(storage).__name__}", (_Retried,), methods)(storage, config)
    return cast(Storage, retried)


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


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: _Retried, *arguments: Any, **keywords: Any) -> Any:
        arguments = tuple(item.inner if isinstance(item, _Retried) else item for item in arguments)
        request = partial(getattr(self.inner, name), *arguments, **keywords)
        if name not in _AGAIN:
            return request()
        shown = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        return retrying(self.config, f"{name} {shown}".rstrip(), request)

    return call
