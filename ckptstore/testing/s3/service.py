"""Answer S3 requests, without sockets and without waiting, so each one is atomic.

Known: buckets, PUT (conditional, copy), GET and HEAD (ranges, conditions), DELETE (conditional, in batches), multipart
uploads (parts, copied parts, listing, conditional completion, abort), ListObjects in both versions, checksums. Not
known: signatures (only the access key is checked), versions, access rules; multipart listings have one page.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate

from ckptstore.testing.s3 import checksums, listing
from ckptstore.testing.s3.messages import (
    Answer,
    HttpRequest,
    check_conditions,
    copy_result,
    kept_headers,
    put_headers,
    range_of,
    stored_from,
)
from ckptstore.testing.s3.objects import Objects, S3Error, StoredObject
from ckptstore.testing.s3.uploads import Uploads, copy_source

_SKEW_SECONDS = 900.0
"""The most by which the time of a signature may differ from the server's."""


class Service:
    """The operations on the contents."""

    def __init__(self, objects: Objects, *, access_keys: frozenset[str] | None, min_part_bytes: int | None) -> None:
        self.objects = objects
        self.access_keys = access_keys
        """The access keys let in now, None for all."""
        self.clock_ahead_seconds = 0.0
        """The seconds by which its clock is ahead of that of this machine."""
        self._uploads = Uploads(objects, min_part_bytes=min_part_bytes)

    def answer(self, request: HttpRequest) -> Answer:
        """Carry out a request. Raises S3Error."""
        self._authorize(request)
        if not request.bucket:
            return self._list_buckets(request)
        if not request.key:
            return self._on_bucket(request)
        if "uploadId" in request.query or "uploads" in request.query:
            return self._uploads.answer(request)
        if request.method in ("GET", "HEAD"):
            return self._get(request)
        if request.method == "PUT":
            return self._copy(request) if "x-amz-copy-source" in request.headers else self._put(request)
        if request.method == "DELETE":
            return self._delete(request)
        raise S3Error(501, "NotImplemented", f"{request.method} {request.path}")

    def _authorize(self, request: HttpRequest) -> None:
        signed = request.headers.get("x-amz-date", "")
        if signed:
            signed_at = datetime.strptime(signed, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
            if abs(signed_at - self.now()) > _SKEW_SECONDS:
                raise S3Error(403, "RequestTimeTooSkewed", "The difference between the times is too large")
        if self.access_keys is None:
            return
        match = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        key = match[1] if match else request.query.get("X-Amz-Credential", "").partition("/")[0]
        if key not in self.access_keys:
            raise S3Error(403, "InvalidAccessKeyId", "The access key you provided does not exist in our records")

    def now(self) -> float:
        """Return the time by its clock."""
        return time.time() + self.clock_ahead_seconds

    # Buckets

    def _list_buckets(self, request: HttpRequest) -> Answer:
        request.operation = "ListBuckets"
        date = listing.timestamp(0)
        found = [listing.wrapped("Bucket", ("Name", name), ("CreationDate", date)) for name in self.objects.buckets]
        body = listing.document("ListAllMyBucketsResult", f"<Buckets>{''.join(found)}</Buckets>")
        return Answer.of(body)

    def _on_bucket(self, request: HttpRequest) -> Answer:
        name, query = request.bucket, request.query
        if request.method == "PUT" and not query:
            request.operation = "CreateBucket"
            self.objects.buckets.setdefault(name, {})
            return Answer(headers={"location": f"/{name}"})
        objects = self.objects.bucket(name)
        if request.method == "HEAD":
            request.operation = "HeadBucket"
            return Answer(headers={"x-amz-bucket-region": "us-east-1"})
        if request.method == "DELETE":
            request.operation = "DeleteBucket"
            if objects:
                raise S3Error(409, "BucketNotEmpty", name)
            del self.objects.buckets[name]
            return Answer(204)
        if request.method == "POST" and "delete" in query:
            return self._delete_many(request, objects)
        if request.method == "GET":
            return self._describe_bucket(request, objects)
        raise S3Error(501, "NotImplemented", f"{request.method} {name}?{dict(query)}")

    def _describe_bucket(self, request: HttpRequest, objects: Mapping[str, StoredObject]) -> Answer:
        query = request.query
        if "location" in query:
            request.operation = "GetBucketLocation"
            return Answer.of(listing.document("LocationConstraint"))
        if "versioning" in query:
            request.operation = "GetBucketVersioning"
            return Answer.of(listing.document("VersioningConfiguration"))
        if "uploads" in query:
            request.operation = "ListMultipartUploads"
            page = listing.uploads_page(request.bucket, self.objects.uploads, query.get("prefix", ""))
            return Answer.of(page)
        for name, missing in (
            ("lifecycle", "NoSuchLifecycleConfiguration"),
            ("object-lock", "ObjectLockConfigurationNotFoundError"),
        ):
            if name in query:
                raise S3Error(404, missing)
        if query.keys() & {"acl", "policy", "versions", "cors", "tagging"}:
            raise S3Error(501, "NotImplemented", str(dict(query)))
        request.operation = "ListObjects"
        return Answer.of(listing.bucket_page(request.bucket, objects, query))

    def _delete_many(self, request: HttpRequest, objects: dict[str, StoredObject]) -> Answer:
        request.operation = "DeleteObjects"
        keys = [item.findtext("Key") or "" for item in request.xml.iter("Object")]
        if len(keys) > 1000:
            raise S3Error(400, "MalformedXML", "More than 1000 keys")
        for key in keys:
            objects.pop(key, None)
        deleted = [listing.wrapped("Deleted", ("Key", key)) for key in keys]
        return Answer.of(listing.document("DeleteResult", *deleted))

    # Objects

    def _get(self, request: HttpRequest) -> Answer:
        request.operation = "GetObject" if request.method == "GET" else "HeadObject"
        stored = self.objects.bucket(request.bucket).get(request.key)
        if stored is None:
            raise S3Error(404, "NoSuchKey", request.key)
        check_conditions(request, stored)
        headers = {
            "content-type": "binary/octet-stream",
            **stored.headers,
            "etag": f'"{stored.etag}"',
            "last-modified": formatdate(stored.modified, usegmt=True),
            "accept-ranges": "bytes",
        }
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if match:
            first, last = range_of(match[1], match[2], stored.size_bytes)
            headers["content-range"] = f"bytes {first}-{last}/{stored.size_bytes}"
            size_bytes = last - first + 1
            return Answer(206, headers, stored.slice(first, size_bytes), size_bytes)
        if request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED" and stored.checksums:
            headers |= {checksums.HEADER + name: value for name, value in stored.checksums.items()}
            headers["x-amz-checksum-type"] = stored.checksum_type
        return Answer(200, headers, stored.slice(0, stored.size_bytes), stored.size_bytes)

    def _put(self, request: HttpRequest) -> Answer:
        request.operation = "PutObject"
        objects = self.objects.bucket(request.bucket)
        check_conditions(request, objects.get(request.key))
        stored = stored_from(request, headers=kept_headers(request))
        objects[request.key] = stored
        return Answer(headers=put_headers(stored))

    def _copy(self, request: HttpRequest) -> Answer:
        request.operation = "CopyObject"
        source, pieces, size_bytes = copy_source(self.objects, request)
        objects = self.objects.bucket(request.bucket)
        check_conditions(request, objects.get(request.key))
        stored = StoredObject(
            pieces=pieces,
            size_bytes=size_bytes,
            etag=source.etag,
            headers=source.headers,
            checksums=source.checksums,
            checksum_type=source.checksum_type,
        )
        objects[request.key] = stored
        return Answer.of(copy_result("CopyObjectResult", stored))

    def _delete(self, request: HttpRequest) -> Answer:
        request.operation = "DeleteObject"
        objects = self.objects.bucket(request.bucket)
        if request.key in objects:
            check_conditions(request, objects[request.key])
            del objects[request.key]
        return Answer(204)
