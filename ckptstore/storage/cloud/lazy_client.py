"""The common base of the three clouds: a client that is made on first use, and the files that it reaches."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from ckptstore.errors import CkptstoreError
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import ProcessBound
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.chains import Giver
from ckptstore.storage.uri import Location

MAX_CONNECTIONS = 64
_DELETE_THREADS = 16
_MAX_RETIRED = 4
"""The most old clients kept for requests in flight: many doubts in a row must not use up descriptors."""


class LazyClient(ABC):
    """The client of an SDK, made in the process that uses it, when it is first used. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._retired: list[Any] = []
        """Old clients, which only requests in flight still use."""
        self._renewal = foreign.Renewal()

    @property
    def client(self) -> Any:
        """The client, made if there is none. Safe for threads."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        """Close the connections."""
        self.renew_connections()
        with self._lock:
            retired, self._retired = self._retired, []
        for client in retired:
            client.close()

    def succeeded(self) -> None:
        """Note that a request succeeded."""
        self._renewal.succeeded()

    def seam(self, what: str, key: str) -> AbstractContextManager[None]:
        """Translate foreign errors to those of ckptstore in a context."""
        return foreign.seam(lambda error: self._translated(error, what=what, key=key))

    def renew_connections(self) -> None:
        """Send later requests by a new client with new connections; requests in flight go on with the old one."""
        with self._lock:
            if self._client is not None:
                self._retired.append(self._client)
            self._client = None
            old, self._retired = self._retired[:-_MAX_RETIRED], self._retired[-_MAX_RETIRED:]
        for client in old:
            client.close()

    @abstractmethod
    def resolved(self) -> dict[str, str]:
        """See `Configured`."""

    @abstractmethod
    def giver(self) -> Giver:
        """Return a function that gives the credentials of this client to another one."""

    @abstractmethod
    def _connect(self) -> Any:
        """Make the client. Called once until it is closed or forgotten."""

    @abstractmethod
    def _translated(self, error: Exception, *, what: str, key: str) -> CkptstoreError:
        """Translate an error of the SDK."""


C = TypeVar("C", bound=LazyClient)


class CloudFiles(ProcessBound, Generic[C]):
    """Files below a prefix of a bucket or container."""

    def __init__(self, location: Location, connection: C) -> None:
        super().__init__()
        self._location = location
        self._connection = connection

    @property
    def uri(self) -> str:
        return self._location.uri

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """See `Doubts`."""
        self._connection.renew_connections()

    def resolved(self) -> dict[str, str]:
        """See `Configured`."""
        return self._connection.resolved()

    def giver(self) -> Giver:
        """Return a function that gives the credentials for these files to another client."""
        return self._connection.giver()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def delete(self, keys: Sequence[str]) -> None:
        unique = list(dict.fromkeys(keys))
        if len(unique) == 1:
            self._delete_one(unique[0])
        elif unique:
            mapped(self._delete_one, unique, num_threads=_DELETE_THREADS, name="ckptstore-delete")

    def _delete_one(self, key: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.is_here:
            self._connection.close()
