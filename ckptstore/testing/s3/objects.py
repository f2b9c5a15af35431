"""The contents of the server: buckets of objects, and unfinished multipart uploads."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptstore.runtime.new_memory import HUGE_BYTES, new_memory

_ZEROS = memoryview(bytes(1 << 20))


class S3Error(Exception):
    """An answer with an error, in S3's words."""

    def __init__(self, status: int, code: str, message: str = "", *, condition: str = "") -> None:
        super().__init__(f"{status} {code} {message}")
        self.status = status
        self.code = code
        self.message = message
        self.condition = condition


@dataclass(slots=True, kw_only=True)
class StoredObject:
    """An object, or a part of one."""

    pieces: Sequence[memoryview] | None
    """The bytes, None if only their number is kept; such an object reads as zeros."""
    size_bytes: int
    etag: str
    headers: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    checksum_type: str = "FULL_OBJECT"
    modified: float = field(default_factory=time.time)

    def slice(self, offset: int, size_bytes: int) -> list[memoryview]:
        """Return a range of the bytes, without a copy."""
        found: list[memoryview] = []
        if self.pieces is None:
            while size_bytes > 0:
                found.append(_ZEROS[:size_bytes])
                size_bytes -= len(found[-1])
            return found
        for piece in self.pieces:
            if size_bytes <= 0:
                break
            if offset >= len(piece):
                offset -= len(piece)
                continue
            found.append(piece[offset : offset + size_bytes])
            size_bytes -= len(found[-1])
            offset = 0
        return found


@dataclass(slots=True, kw_only=True)
class MultipartUpload:
    """A multipart upload that was begun."""

    bucket: str
    key: str
    algorithm: str
    checksum_type: str
    headers: dict[str, str]
    parts: dict[int, StoredObject] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)


@dataclass(slots=True)
class Objects:
    """The contents of the server. Only the server's loop changes them."""

    buckets: dict[str, dict[str, StoredObject]] = field(default_factory=dict)
    uploads: dict[str, MultipartUpload] = field(default_factory=dict)

    def bucket(self, name: str) -> dict[str, StoredObject]:
        """Return the objects of a bucket by key."""
        if name not in self.buckets:
            raise S3Error(404, "NoSuchBucket", name)
        return self.buckets[name]

    def upload(self, upload_id: str, bucket: str, key: str) -> MultipartUpload:
        """Return an unfinished upload."""
        upload = self.uploads.get(upload_id)
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise S3Error(404, "NoSuchUpload", upload_id)
        return upload


def new_id() -> str:
    """Return 32 hexadecimal digits, unique."""
    return uuid.uuid4().hex


def memory_for(size_bytes: int) -> memoryview:
    """Allocate memory for a body."""
    if size_bytes < HUGE_BYTES:
        return memoryview(bytearray(size_bytes))
    return memoryview(new_memory(size_bytes))


@dataclass(slots=True, kw_only=True)
class LoggedRequest:
    """One request, as the server saw it."""

    operation: str
    """S3's name for it: "PutObject", "UploadPart", ...; "" when it was cut off before that was known."""
    method: str
    path: str
    query: str
    status: int
    """The HTTP status, 0 when the connection broke before an answer."""
    received_bytes: int
    sent_bytes: int
    started: float
    ended: float
    fault: str
    """The action of the fault that hit it, or ""."""
