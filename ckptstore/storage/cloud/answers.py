"""Check that a response matches its request, for every read by every client. Pure.

A server, a proxy or a cache may leave out the range, send another one, an older object, or one in another encoding.
To treat that as the file would call a whole checkpoint damaged. So it counts as a passing error, and is retried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptstore.errors import StorageUnavailable

_RANGE = re.compile(r"bytes (\d+)-(\d+|-1)/(\d+|\*)")  # Azurite says "0--1/0" of an empty blob
_PLAIN = frozenset({"", "identity", "aws-chunked"})


def check_head(
    key: str,
    status: int,
    headers: Mapping[str, str],
    *,
    version_header: str = "etag",
    offset: int = 0,
    version: str | None = None,
) -> int | None:
    """Raise StorageUnavailable unless the head of a response fits a request for bytes from `offset` on, of `version`.
    Return the size of the file, None if it is not stated. The body may be shorter or longer: its reader counts."""
    headers = {name.lower(): value for name, value in headers.items()}
    length, first, total = headers.get("content-length", ""), 0, headers.get("content-length", "")
    if status == 206:
        match = _RANGE.fullmatch(headers.get("content-range", ""))
        if match is None:
            raise wrong(key, "it does not say which range it is")
        first, last, total = int(match[1]), int(match[2]), match[3]
        if length.isdigit() and int(length) != last - first + 1:
            raise wrong(key, f"it is said to have {length} bytes, and to be of the range {first}-{last}")
    elif status != 200:  # the whole file
        raise wrong(key, f"its status is {status}")
    encoding, found = headers.get("content-encoding", ""), headers.get(version_header)
    if encoding.strip().lower() not in _PLAIN:
        raise wrong(key, f"it is encoded as {encoding}")
    if first != offset:
        raise wrong(key, f"it begins at byte {first}, and {offset} was asked for")
    if version is not None and found is not None and found.strip('"') != version.strip('"'):
        raise wrong(key, "it is of another version than was asked for")
    return int(total) if total.isdigit() else None


@contextmanager
def complete(key: str) -> Iterator[None]:
    """Raise StorageUnavailable if a response, parsed in this context, lacks a field or has one of a wrong type."""
    try:
        yield
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:  # SyntaxError is that of XML
        raise wrong(key, f"something in it is missing or has another form ({type(error).__name__}: {error})") from None


def wrong(key: str, what: str) -> StorageUnavailable:
    """Return the error for a response that does not match its request."""
    return StorageUnavailable(
        f"The answer is not one to the request: {what}",
        file=key,
        hint="A proxy, a cache or the server does not keep to HTTP; `ckptstore doctor` says which way requests go",
    )
