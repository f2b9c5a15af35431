"""The common base of the three clouds: files below a prefix, and the client of an SDK, which is made on first use."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckptstore.errors import CkptstoreError, FileMissing
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import ProcessBound, Storage
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.bodies import Filling, part_bytes
from ckptstore.storage.cloud.chains import Giver
from ckptstore.storage.uri import Location

_DELETE_THREADS = 16
_MAX_RETIRED = 4
"""The most old clients kept for requests in flight: many doubts in a row must not use up descriptors."""

OpenedAs = tuple[Callable[..., Storage], tuple[str, Mapping[str, Any]]]
"""The function, the URI and the options by which a storage was opened, and is opened again in another process."""


class Renewals:
    """The renewals of a client whose requests are refused: one for all requests that were sent before it."""

    def __init__(self) -> None:
        self.number = 0
        """The number of renewals so far. Read it before a request is sent: at worst it goes by a newer client."""
        self._proven = 0
        """The highest number at which a request has succeeded."""
        self._was_worth_a_try = True
        self._lock = threading.Lock()

    def prove(self, number: int) -> None:
        """Note that a request has succeeded which was sent at this number."""
        if number > self._proven:
            self._proven = number

    def renew(self, number: int, forget: Callable[[], None]) -> bool:
        """Call `forget`, after the refusal of a request that was sent at this number, unless another request has done
        so. Return False if no request has succeeded since the renewal before."""
        with self._lock:
            if number != self.number:
                return self._was_worth_a_try or self._proven == self.number
            self._was_worth_a_try = self._proven == number
            forget()  # in both cases: a later request may find what is right
            self.number += 1
            return self._was_worth_a_try


class CloudFiles(ProcessBound):
    """Files below a prefix of a bucket or container. Safe for threads."""

    _has_generations = False
    """True if a version is a generation number, of which an old one is missing, not an ETag."""

    def __init__(self, location: Location, settings: Any, opened_as: OpenedAs) -> None:
        """Open no connection yet. `settings` are those of the SDK, in the form of the cloud."""
        super().__init__(location.uri)
        self._location = location
        self._settings = settings
        self._opened_as = opened_as
        self._lock = threading.Lock()
        self._client: Any = None
        self._retired: list[Any] = []
        """Old clients, which only requests in flight still use."""
        self._renewals = Renewals()

    def __reduce__(self) -> OpenedAs:
        return self._opened_as

    def full(self, key: str) -> str:
        """Return the key in the bucket or container."""
        return self._location.full_key(key)

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self._put(key, views, new=False)

    def create(self, key: str, data: bytes) -> bool:
        """See `CreatesExclusively`."""
        try:
            self._put(key, [memoryview(data)], new=True)
        except foreign.ConditionFailed:
            return False
        return True

    @abstractmethod
    def _put(self, key: str, views: Sequence[memoryview], *, new: bool) -> None:
        """Write a file; with `new` raise ConditionFailed if it exists."""

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        filling = Filling(views, key=key)
        if not filling.missing_bytes:
            return
        end = offset + filling.missing_bytes
        try:
            file_bytes = self._fill(key, filling, offset, version)
        except foreign.ConditionFailed as error:
            raise foreign.other_version(key) from error
        except FileMissing as error:
            if version and self._has_generations:
                with suppress(FileMissing):
                    self.stat(key)
                    raise foreign.other_version(key) from error
            raise
        filling.end(file_bytes=file_bytes, end_offset=end)

    @abstractmethod
    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        """Read a range, as far as the file goes, and return the size of the file, None if it is not stated."""

    def delete(self, keys: Sequence[str]) -> None:
        mapped(self._delete_one, list(dict.fromkeys(keys)), num_threads=_DELETE_THREADS, name="ckptstore-delete")

    def _delete_one(self, key: str) -> None:
        raise NotImplementedError

    @abstractmethod
    def copy(self, source_key: str, key: str, *, files: Any = None) -> None:
        """Copy a file; `files` are those of another bucket of the same account to copy from, if they are not None."""

    def copy_from(self, source: Storage, source_key: str, key: str) -> bool:
        """See `CopiesFrom`. The engines may differ; the credentials have to reach both."""
        if not isinstance(source, CloudFiles) or source.account() != self.account():
            return False
        self.copy(source_key, key, files=source)
        return True

    def account(self) -> tuple[object, ...]:
        """Return the cloud, the account and the options by which these files are reached."""
        options = {name: value for name, value in self._opened_as[1][1].items() if value is not None}
        return self._location.kind, self._location.account, options

    def part_bytes(self, size_bytes: int) -> int:
        """See `WritesParts`."""
        return part_bytes(size_bytes)

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """See `Doubts`."""
        self._renew_connections()

    @abstractmethod
    def resolved(self) -> Mapping[str, str]:
        """See `Configured`."""

    @abstractmethod
    def giver(self) -> Giver:
        """Return a function that gives the credentials for these files to another client."""

    def close(self) -> None:
        if self.is_here:
            self._renew_connections(kept=0)

    @property
    def client(self) -> Any:
        """The client of the SDK, made if there is none."""
        self.check_process()
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    @abstractmethod
    def _connect(self) -> Any:
        """Make a client."""

    def _renew_connections(self, *, kept: int = _MAX_RETIRED) -> None:
        """Send later requests by a new client with new connections; requests in flight go on with the old one, as long
        as so many are kept."""
        with self._lock:
            if self._client is not None:
                self._retired.append(self._client)
            self._client = None
            count = max(0, len(self._retired) - kept)
            old, self._retired = self._retired[:count], self._retired[count:]
        for client in old:
            client.close()

    @contextmanager
    def sdk_seam(self, what: str, key: str) -> Iterator[int]:
        """Translate errors of the SDK to those of ckptstore in a context, which gets the number of renewals."""
        what, number = f"{what} {self.uri}", self._renewals.number
        with foreign.seam(lambda error: self._translated_of_sdk(error, what=what, key=key, number=number)):
            yield number
        self._renewals.prove(number)

    @abstractmethod
    def _translated_of_sdk(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        """Translate an error of the SDK, after a request that was sent at this number of renewals."""
