"""Check that a response matches its request, for every read by every client. Pure.

A server, a proxy or a cache may leave out the range, send another one, an older object, or one in another encoding.
To treat that as the file would call a whole checkpoint damaged. So it counts as a passing error, and is retried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ckptstore.errors import StorageUnavailable

_RANGE = re.compile(r"bytes (\d+)-(\d+|-1)/(\d+|\*)")  # Azurite says "0--1/0" of an empty blob
_PLAIN = frozenset({"", "identity", "aws-chunked"})


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The facts about the body of a response in its head."""

    first: int = 0
    """The offset of its first byte in the file."""
    total_bytes: int | None = None
    """The size of the file, None if it is not stated."""
    encoding: str | None = None
    version: str | None = None

    @staticmethod
    def of(key: str, status: int, headers: Mapping[str, str], *, version: str | None = None) -> AnswerHead:
        """Read the headers of a response, their names in small letters. Raises StorageUnavailable for headers that no
        range can have."""
        encoding, length = headers.get("content-encoding"), headers.get("content-length", "")
        if status == 206:
            match = _RANGE.fullmatch(headers.get("content-range", ""))
            if match is None:
                raise wrong(key, "it does not say which range it is")
            first, last, total = match.groups()
            if length.isdigit() and int(length) != int(last) - int(first) + 1:
                raise wrong(key, f"it is said to have {length} bytes, and to be of the range {first}-{last}")
            return AnswerHead(int(first), int(total) if total.isdigit() else None, encoding, version)
        if status == 200:  # the whole file
            return AnswerHead(0, int(length) if length.isdigit() else None, encoding, version)
        raise wrong(key, f"its status is {status}")

    def check(self, key: str, *, offset: int = 0, version: str | None = None) -> None:
        """Raise StorageUnavailable unless this may be the response to a request for bytes from `offset` on, of that
        version. It may have more or fewer bytes than requested: the reader counts them."""
        if (self.encoding or "").strip().lower() not in _PLAIN:
            raise wrong(key, f"it is encoded as {self.encoding}")
        if self.first != offset:
            raise wrong(key, f"it begins at byte {self.first}, and {offset} was asked for")
        if version is not None and self.version is not None and self.version.strip('"') != version.strip('"'):
            raise wrong(key, "it is of another version than was asked for")


@contextmanager
def complete(key: str) -> Iterator[None]:
    """Raise StorageUnavailable if a response, parsed in this context, lacks a field or has one of a wrong type."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise wrong(key, f"something in it is missing or has another form ({type(error).__name__}: {error})") from None


def wrong(key: str, what: str) -> StorageUnavailable:
    """Return the error for a response that does not match its request."""
    return StorageUnavailable(
        f"The answer is not one to the request: {what}",
        file=key,
        hint="A proxy, a cache or the server does not keep to HTTP; `ckptstore doctor` says which way requests go",
    )
