"""The common base of the three clouds: files below a prefix, and the client of an SDK, which is made on first use."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from ckptstore.errors import CkptstoreError, FileMissing
from ckptstore.runtime.beat import beat
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import ProcessBound, Storage
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.bodies import Filling, part_bytes
from ckptstore.storage.uri import Location

logger = logging.getLogger("ckptstore")

_DELETE_THREADS = 16
_MAX_RETIRED = 4
"""The most old clients kept for requests in flight: many doubts in a row must not use up descriptors."""

_CLOCK_SECONDS = 30.0
"""The difference of two clocks that is not the time of a request on its way."""
_MOST_IN_VAIN = 8
"""The most renewals in a row without a request that succeeded, though each one found something new."""

OpenedAs = tuple[Callable[..., Storage], tuple[str, Mapping[str, Any]]]
"""The function, the URI and the options by which a storage was opened, and is opened again in another process."""


class Renewals:
    """The renewals of all clients of a storage whose requests are refused: one for all requests sent before it."""

    def __init__(self) -> None:
        self.number = 0
        """The number of renewals so far. Read it before a request is sent: at worst it goes by a newer client."""
        self._proven = -1
        """The highest number at which a request has succeeded."""
        self._was_worth_a_try = True
        self._lock = threading.Lock()

    @property
    def has_worked(self) -> bool:
        """True once a request has succeeded."""
        return self._proven >= 0

    def prove(self, number: int) -> None:
        """Note that a request has succeeded which was sent at this number."""
        if number > self._proven:
            self._proven = number

    def renew(self, number: int, forget: Callable[[], bool | None], *, at_first: bool = True) -> bool:
        """Call `forget`, after the refusal of a request that was sent at this number, unless another request has done
        so. It returns True if it has found something else than what was refused.

        Return True if the request is worth another try: something else was found, or a request has succeeded since the
        renewal before, for which at first none is needed unless `at_first` is False.
        """
        with self._lock:
            if number != self.number:
                return self._was_worth_a_try or self._proven == self.number
            has_worked = self._proven == number or (at_first and number == 0)
            found_other = forget()  # in any case: a later request may find what is right
            in_vain = number - max(0, self._proven)
            self._was_worth_a_try = has_worked or (bool(found_other) and in_vain < _MOST_IN_VAIN)
            self.number += 1
            return self._was_worth_a_try


class Clock:
    """The clock of a server, by which requests are signed once it is known to differ from that of this machine."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0
        """The seconds by which the server's clock is ahead of this machine's."""

    def correct(self, date: str | None, *, server: str) -> bool:
        """Take over the time in the header `Date` of a response. Return True if it is not what was known."""
        ahead_seconds = self.ahead_seconds if date is None else _seconds_ahead(date)
        if abs(ahead_seconds - self.ahead_seconds) <= _CLOCK_SECONDS:
            return False
        self.ahead_seconds = ahead_seconds
        logger.warning(
            "the clock of %s is %+.0f seconds from that of this machine, and requests are signed by it from now on. "
            "Set the clock of this machine",
            server,
            ahead_seconds,
        )
        return True


def _seconds_ahead(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return 0.0


class Renewing(ProcessBound):
    """A storage whose requests may be refused for what goes out of date: the credentials, the time of a signature."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._renewals = Renewals()
        self._clock = Clock()

    @property
    def _keys_may_change(self) -> bool:
        """True if other credentials than those that were refused may be found."""
        return False

    @abstractmethod
    def _renew_connections(self) -> None:
        """Send later requests by new clients, with credentials that are looked up again."""

    def _renew_credentials(self) -> bool | None:
        """Look up the credentials again, for all clients. Return True if others were found, None if that is unknown."""
        self._renew_connections()
        return None

    def remedy(
        self,
        status: int | None,
        code: str,
        text: str,
        *,
        what: str,
        key: str,
        number: int,
        date: str | None = None,
    ) -> CkptstoreError | None:
        """Do what may make a refused request succeed when it is made anew, and return the error for another try; None
        if the refusal is final. `date` is the server's time, if that is known."""

        def correct_clock() -> bool:
            is_other = self._clock.correct(date, server=self.uri)
            self._renew_connections()
            return is_other

        if foreign.is_out_of_time(code, text):
            return foreign.signed_again(what, key) if self._renewals.renew(number, correct_clock) else None
        is_expired = code in foreign.EXPIRED_CODES or (status == 401 and not self.uri.startswith("s3:"))
        if is_expired or (self._keys_may_change and code in foreign.KEY_CODES):
            is_worth_a_try = self._renewals.renew(number, self._renew_credentials, at_first=is_expired)
            return foreign.renewed(what, key) if is_worth_a_try else None
        return None


class CloudFiles(Renewing):
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

    def __reduce__(self) -> OpenedAs:
        return self._opened_as

    def full(self, key: str) -> str:
        """Return the key in the bucket or container."""
        return self._location.full_key(key)

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self._put(key, views, new=False)

    def create(self, key: str, data: bytes) -> bool:
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
        def delete(key: str) -> None:
            self._delete_one(key)
            beat()

        mapped(delete, list(dict.fromkeys(keys)), num_threads=_DELETE_THREADS, name="ckptstore-delete")

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
        return part_bytes(size_bytes)

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        self._renew_connections()

    def close(self) -> None:
        if self.is_here:
            self._renew_connections(retained=0)

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

    def _renew_connections(self, *, retained: int = _MAX_RETIRED) -> None:
        """Send later requests by a new client with new connections; requests in flight go on with the old one, as long
        as `retained` of them stay."""
        with self._lock:
            if self._client is not None:
                self._retired.append(self._client)
            self._client = None
            count = max(0, len(self._retired) - retained)
            old, self._retired = self._retired[:count], self._retired[count:]
        for client in old:
            client.close()

    @contextmanager
    def seam(self, what: str, key: str) -> Iterator[int]:
        """Translate errors of the SDK to those of ckptstore in a context, which gets the number of renewals."""
        what, number = f"{what} {self.uri}", self._renewals.number
        with foreign.seam(lambda error: self._translated(error, what=what, key=key, number=number)):
            yield number
        self._renewals.prove(number)

    @abstractmethod
    def _translated(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        """Translate an error of the SDK, after a request that was sent at this number of renewals."""
