"""Requests whose body has arrived, answers, and helpers of the operations."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from ckptstore.testing.s3 import checksums, listing
from ckptstore.testing.s3.objects import S3Error, StoredObject, new_id

XML = {"content-type": "application/xml"}
_KEPT_HEADERS = ("content-type", "cache-control", "content-disposition", "content-encoding")


@dataclass(slots=True, kw_only=True)
class HttpRequest:
    """A request whose body has arrived."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: memoryview | None
    """None if only the number of bytes was kept."""
    body_bytes: int
    etag: str = ""
    checksums: dict[str, str] = field(default_factory=dict)
    operation: str = ""

    @property
    def bucket(self) -> str:
        return unquote(self.path[1:]).partition("/")[0]

    @property
    def key(self) -> str:
        return unquote(self.path[1:]).partition("/")[2]

    @property
    def xml(self) -> ElementTree.Element:
        """The body as XML, without namespaces."""
        try:
            root = ElementTree.fromstring(bytes(self.body or b""))
        except ElementTree.ParseError as error:
            raise S3Error(400, "MalformedXML", str(error)) from None
        for item in root.iter():
            item.tag = item.tag.rpartition("}")[2]
        return root


@dataclass(slots=True)
class Answer:
    """The answer to a request."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes | memoryview] = ()
    size_bytes: int = 0

    @classmethod
    def of(cls, body: bytes, *, status: int = 200, headers: Mapping[str, str] = XML) -> Answer:
        """Create an answer with a body in memory."""
        return cls(status, dict(headers), [body], len(body))


def check_conditions(request: HttpRequest, stored: StoredObject | None) -> None:
    """Raise S3Error unless the object satisfies If-Match and If-None-Match."""
    wanted, unwanted = request.headers.get("if-match"), request.headers.get("if-none-match")
    if wanted is not None:
        if stored is None:
            raise S3Error(404, "NoSuchKey", request.key)
        if wanted.strip('"') not in ("*", stored.etag):
            raise S3Error(412, "PreconditionFailed", "A precondition did not hold", condition="If-Match")
    if unwanted is not None and stored is not None and unwanted.strip('"') in ("*", stored.etag):
        if request.method in ("GET", "HEAD"):
            raise S3Error(304, "NotModified")
        raise S3Error(412, "PreconditionFailed", "A precondition did not hold", condition="If-None-Match")


def stored_from(request: HttpRequest, *, headers: dict[str, str]) -> StoredObject:
    """Create an object from the body of the request."""
    pieces = None if request.body is None else [request.body]
    return StoredObject(
        pieces=pieces,
        size_bytes=request.body_bytes,
        etag=request.etag or new_id(),
        headers=headers,
        checksums={} if pieces is None else request.checksums,
    )


def kept_headers(request: HttpRequest) -> dict[str, str]:
    """Return the headers that an object keeps."""
    kept = {
        name: value
        for name, value in request.headers.items()
        if name in _KEPT_HEADERS or name.startswith("x-amz-meta-")
    }
    if kept.get("content-encoding", "").strip() == "aws-chunked":
        del kept["content-encoding"]
    return kept


def put_headers(stored: StoredObject) -> dict[str, str]:
    """Return the headers of an answer to a PUT."""
    digests = {checksums.HEADER + name: value for name, value in stored.checksums.items()}
    return {"etag": f'"{stored.etag}"', **digests}


def copy_result(name: str, stored: StoredObject) -> bytes:
    """Return the body of an answer to a copy."""
    return listing.document(name, ("LastModified", listing.timestamp(stored.modified)), ("ETag", f'"{stored.etag}"'))


def range_of(first: str, last: str, size_bytes: int) -> tuple[int, int]:
    """Return the first and last byte of a Range header."""
    begin = int(first) if first else max(0, size_bytes - int(last or 0))
    end = min(size_bytes - 1, int(last) if first and last else size_bytes - 1)
    if begin > end:
        raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
    return begin, end
