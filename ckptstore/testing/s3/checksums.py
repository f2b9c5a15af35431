"""Check the digests that a request carries, and decode aws-chunked bodies.

Real S3 answers BadDigest when a body does not match; moto and several other servers do not, so they miss a client's
wrong digest, and a body damaged on its way.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping

from ckptstore.testing.s3.incoming import MAX_LINE_BYTES
from ckptstore.testing.s3.objects import S3Error

ALGORITHMS = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")
HEADER = "x-amz-checksum-"


def _crc32c(data: memoryview, previous: int) -> int:
    from awscrt import checksums

    return int(checksums.crc32c(data, previous))


def _crc64nvme(data: memoryview, previous: int) -> int:
    from awscrt import checksums

    return int(checksums.crc64nvme(data, previous))


_CRCS: dict[str, tuple[Callable[[memoryview, int], int], str]] = {
    "crc32": (zlib.crc32, ">I"),
    "crc32c": (_crc32c, ">I"),
    "crc64nvme": (_crc64nvme, ">Q"),
}


def digest(algorithm: str, pieces: Iterable[memoryview]) -> bytes:
    """Return the digest of the pieces, one after another."""
    if algorithm in _CRCS:
        function, layout = _CRCS[algorithm]
        value = 0
        for piece in pieces:
            value = function(piece, value)
        return struct.pack(layout, value)
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def as_header(value: bytes) -> str:
    """Encode a digest as S3 does."""
    return base64.b64encode(value).decode()


def carried(headers: Mapping[str, str], body: memoryview | None, *, verify: bool) -> dict[str, str]:
    """Return the checksums in the headers (or trailers), by algorithm, after comparing each with the body."""
    found: dict[str, str] = {}
    for algorithm in ALGORITHMS:
        value = headers.get(HEADER + algorithm)
        if value is None:
            continue
        found[algorithm] = value
        if verify and body is not None and as_header(digest(algorithm, [body])) != value:
            raise S3Error(400, "BadDigest", f"The {algorithm.upper()} you specified did not match the calculated one")
    if verify and body is not None:
        _verify_body(headers, body)
    return found


def _verify_body(headers: Mapping[str, str], body: memoryview) -> None:
    md5 = headers.get("content-md5")
    if md5 is not None and as_header(digest("md5", [body])) != md5:
        raise S3Error(400, "BadDigest", "The Content-MD5 you specified did not match what we received")
    signed = headers.get("x-amz-content-sha256", "")
    if len(signed) == 64 and digest("sha256", [body]).hex() != signed:
        raise S3Error(400, "XAmzContentSHA256Mismatch", "The body is not the one that was signed")


def is_aws_chunked(headers: Mapping[str, str]) -> bool:
    """True if the body is framed in chunks with signatures or trailers."""
    return headers.get("x-amz-content-sha256", "").startswith("STREAMING-") or "aws-chunked" in headers.get(
        "content-encoding", ""
    )


def decode_aws_chunked(body: memoryview) -> tuple[memoryview, dict[str, str]]:
    """Return the payload and the trailers of an aws-chunked body. The payload is moved within the body's own memory."""
    size_bytes = position = 0
    while True:
        line_bytes = bytes(body[position : position + MAX_LINE_BYTES]).index(b"\r\n")
        chunk_bytes = int(bytes(body[position : position + line_bytes]).partition(b";")[0], 16)
        position += line_bytes + 2
        if chunk_bytes == 0:
            break
        body[size_bytes : size_bytes + chunk_bytes] = body[position : position + chunk_bytes]
        size_bytes += chunk_bytes
        position += chunk_bytes + 2
    trailers: dict[str, str] = {}
    for line in bytes(body[position:]).decode("latin-1").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            trailers[name.strip().lower()] = value.strip()
    return body[:size_bytes], trailers


def from_header(value: str) -> bytes:
    """Decode the result of `as_header`."""
    return base64.b64decode(value)
