"""Multipart uploads: begin, parts, copied parts, listing, conditional completion, abort."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from ckptstore.testing.s3 import checksums, listing
from ckptstore.testing.s3.messages import (
    XML,
    Answer,
    HttpRequest,
    check_conditions,
    copy_result,
    kept_headers,
    put_headers,
    stored_from,
)
from ckptstore.testing.s3.objects import MultipartUpload, Objects, S3Error, StoredObject, new_id

_MIN_PART_BYTES = 5 << 20


class Uploads:
    """The operations on unfinished uploads."""

    def __init__(self, objects: Objects, *, min_part_bytes: int | None) -> None:
        self.objects = objects
        self._min_part_bytes = _MIN_PART_BYTES if min_part_bytes is None else min_part_bytes

    def answer(self, request: HttpRequest) -> Answer:
        """Carry out a request. Raises S3Error."""
        if request.method == "POST" and "uploads" in request.query:
            return self._begin_upload(request)
        upload_id = request.query.get("uploadId", "")
        upload = self.objects.upload(upload_id, request.bucket, request.key)
        if request.method == "GET":
            request.operation = "ListParts"
            return Answer.of(listing.parts_page(upload_id, upload))
        if request.method == "PUT":
            return self._put_part(request, upload)
        if request.method == "DELETE":
            request.operation = "AbortMultipartUpload"
            del self.objects.uploads[upload_id]
            return Answer(204)
        return self._complete(request, upload_id, upload)

    def _begin_upload(self, request: HttpRequest) -> Answer:
        request.operation = "CreateMultipartUpload"
        self.objects.bucket(request.bucket)
        algorithm = request.headers.get("x-amz-checksum-algorithm", "").lower()
        default_type = "FULL_OBJECT" if algorithm == "crc64nvme" else "COMPOSITE"
        upload_id = new_id()
        self.objects.uploads[upload_id] = MultipartUpload(
            bucket=request.bucket,
            key=request.key,
            algorithm=algorithm,
            checksum_type=request.headers.get("x-amz-checksum-type", default_type),
            headers=kept_headers(request),
        )
        headers = {**XML, **({"x-amz-checksum-algorithm": algorithm.upper()} if algorithm else {})}
        names = (("Bucket", request.bucket), ("Key", request.key), ("UploadId", upload_id))
        return Answer.of(listing.document("InitiateMultipartUploadResult", *names), headers=headers)

    def _put_part(self, request: HttpRequest, upload: MultipartUpload) -> Answer:
        number = int(request.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument", "Part number must be an integer between 1 and 10000")
        if "x-amz-copy-source" in request.headers:
            request.operation = "UploadPartCopy"
            _, pieces, size_bytes = copy_source(self.objects, request)
            part = StoredObject(pieces=pieces, size_bytes=size_bytes, etag=new_id())
            upload.parts[number] = part
            return Answer.of(copy_result("CopyPartResult", part))
        request.operation = "UploadPart"
        part = stored_from(request, headers={})
        upload.parts[number] = part
        return Answer(headers=put_headers(part))

    def _complete(self, request: HttpRequest, upload_id: str, upload: MultipartUpload) -> Answer:
        request.operation = "CompleteMultipartUpload"
        objects = self.objects.bucket(request.bucket)
        check_conditions(request, objects.get(request.key))
        parts = self._listed_parts(request, upload)
        pieces = [piece for part in parts for piece in part.pieces or ()]
        complete = all(part.pieces is not None for part in parts)
        etag = checksums.digest("md5", [memoryview(bytes.fromhex("".join(part.etag for part in parts)))]).hex()
        stored = StoredObject(
            pieces=pieces if complete else None,
            size_bytes=sum(part.size_bytes for part in parts),
            etag=f"{etag}-{len(parts)}",
            headers=upload.headers,
            checksums=_whole_checksum(upload, parts, pieces) if complete else {},
            checksum_type=upload.checksum_type,
        )
        objects[request.key] = stored
        del self.objects.uploads[upload_id]
        names = (("Bucket", request.bucket), ("Key", request.key), ("ETag", f'"{stored.etag}"'))
        digests = [(f"Checksum{name.upper()}", value) for name, value in stored.checksums.items()]
        return Answer.of(listing.document("CompleteMultipartUploadResult", *names, *digests))

    def _listed_parts(self, request: HttpRequest, upload: MultipartUpload) -> list[StoredObject]:
        wanted = [
            (int(item.findtext("PartNumber") or 0), (item.findtext("ETag") or "").strip('"'))
            for item in request.xml.iter("Part")
        ]
        numbers = [number for number, _ in wanted]
        if not numbers:
            raise S3Error(400, "MalformedXML", "You must specify at least one part")
        if numbers != sorted(set(numbers)):
            raise S3Error(400, "InvalidPartOrder", "The list of parts was not in ascending order")
        parts = [upload.parts.get(number) for number in numbers]
        found = [part for part, (_, etag) in zip(parts, wanted, strict=True) if part is not None and part.etag == etag]
        if len(found) != len(wanted):
            raise S3Error(400, "InvalidPart", "A part could not be found, or its entity tag did not match")
        if any(part.size_bytes < self._min_part_bytes for part in found[:-1]):
            raise S3Error(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
        return found


def copy_source(objects: Objects, request: HttpRequest) -> tuple[StoredObject, Sequence[memoryview] | None, int]:
    """Return the object of x-amz-copy-source, and the requested bytes of it."""
    bucket, _, key = unquote(request.headers["x-amz-copy-source"].lstrip("/")).partition("/")
    source = objects.bucket(bucket).get(key)
    if source is None:
        raise S3Error(404, "NoSuchKey", key)
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("x-amz-copy-source-range", ""))
    first, last = (int(match[1]), int(match[2])) if match else (0, source.size_bytes - 1)
    size_bytes = last - first + 1
    return source, None if source.pieces is None else source.slice(first, size_bytes), size_bytes


def _whole_checksum(
    upload: MultipartUpload, parts: Sequence[StoredObject], pieces: Sequence[memoryview]
) -> dict[str, str]:
    algorithm = upload.algorithm
    if not algorithm:
        return {}
    if upload.checksum_type == "FULL_OBJECT":
        return {algorithm: checksums.as_header(checksums.digest(algorithm, pieces))}
    if not all(algorithm in part.checksums for part in parts):
        return {}
    raw = b"".join(checksums.from_header(part.checksums[algorithm]) for part in parts)
    return {algorithm: f"{checksums.as_header(checksums.digest(algorithm, [memoryview(raw)]))}-{len(parts)}"}
