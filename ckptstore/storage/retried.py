"""Wrap a storage so that its requests are retried, for direct callers: listings, manifests, deletions.

The wrapper has the powers of the storage inside, no more and no fewer. If a caller retries itself, as transfers and the
log do, its retries are the only ones: `retrying` does not multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from ckptstore.config import RetryConfig
from ckptstore.storage.base import POWERS, Disk, Storage, methods_of
from ckptstore.storage.retry import retrying

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
