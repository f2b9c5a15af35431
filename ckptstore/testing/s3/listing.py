"""Write the XML of listings and of errors."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Mapping
from urllib.parse import quote
from xml.sax.saxutils import escape

from ckptstore.testing.s3.objects import MultipartUpload, S3Error, StoredObject

_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_PAGE_KEYS = 1000


def document(name: str, *fields: tuple[str, object] | str) -> bytes:
    """Return an XML document; a field is a name and a text, or XML as it is."""
    inner = "".join(field if isinstance(field, str) else element(*field) for field in fields)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {_NAMESPACE}>{inner}</{name}>'.encode()


def element(name: str, *content: object) -> str:
    """Return an element with escaped text in it."""
    return f"<{name}>{''.join(escape(str(item), {chr(34): '&quot;'}) for item in content)}</{name}>"


def wrapped(name: str, *fields: tuple[str, object]) -> str:
    """Return an element with elements in it."""
    return f"<{name}>{''.join(element(*field) for field in fields)}</{name}>"


def timestamp(seconds: float) -> str:
    """Format a time as S3 does."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def error_document(error: S3Error, path: str) -> bytes:
    """Return the body of an error."""
    fields = [("Code", error.code), ("Message", error.message), ("Resource", path)]
    if error.condition:
        fields.append(("Condition", error.condition))
    return ('<?xml version="1.0" encoding="UTF-8"?>\n' + wrapped("Error", *fields)).encode()


def bucket_page(name: str, objects: Mapping[str, StoredObject], query: Mapping[str, str]) -> bytes:
    """Return one page of ListObjectsV2, or of its older form."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = min(_PAGE_KEYS, int(query.get("max-keys", _PAGE_KEYS)))
    token = query.get("continuation-token")
    after = base64.b64decode(token).decode() if token else query.get("start-after", query.get("marker", ""))
    keys, folders, last = _page(objects, prefix=prefix, delimiter=delimiter, after=after, limit=limit)

    def shown(text: str) -> str:
        return quote(text) if query.get("encoding-type") == "url" else text

    fields: list[tuple[str, object] | str] = [
        ("Name", name),
        ("Prefix", shown(prefix)),
        ("KeyCount", len(keys) + len(folders)),
        ("MaxKeys", limit),
        ("IsTruncated", str(last is not None).lower()),
    ]
    if "encoding-type" in query:
        fields.append(("EncodingType", query["encoding-type"]))
    if last is not None:
        fields.append(("NextContinuationToken", base64.b64encode(last.encode()).decode()))
        fields.append(("NextMarker", shown(last)))
    fields += [
        wrapped(
            "Contents",
            ("Key", shown(key)),
            ("LastModified", timestamp(objects[key].modified)),
            ("ETag", f'"{objects[key].etag}"'),
            ("Size", objects[key].size_bytes),
            ("StorageClass", "STANDARD"),
        )
        for key in keys
    ]
    fields += [wrapped("CommonPrefixes", ("Prefix", shown(folder))) for folder in folders]
    return document("ListBucketResult", *fields)


def _page(
    objects: Iterable[str], *, prefix: str, delimiter: str, after: str, limit: int
) -> tuple[list[str], list[str], str | None]:
    keys: list[str] = []
    folders: list[str] = []
    last = ""
    for key in sorted(key for key in objects if key.startswith(prefix) and key > after):
        border = key.find(delimiter, len(prefix)) if delimiter else -1
        folder = key[: border + len(delimiter)] if border >= 0 else ""
        if folder and folders[-1:] == [folder]:
            last = key
            continue
        if folder and after.startswith(folder):
            continue
        if len(keys) + len(folders) >= limit:
            return keys, folders, last
        if folder:
            folders.append(folder)
        else:
            keys.append(key)
        last = key
    return keys, folders, None


def uploads_page(bucket: str, uploads: Mapping[str, MultipartUpload], prefix: str) -> bytes:
    """Return every unfinished upload below a prefix, on one page."""
    found = [
        wrapped("Upload", ("Key", upload.key), ("UploadId", upload_id), ("Initiated", timestamp(upload.begun)))
        for upload_id, upload in sorted(uploads.items(), key=lambda item: item[1].key)
        if upload.bucket == bucket and upload.key.startswith(prefix)
    ]
    return document("ListMultipartUploadsResult", ("Bucket", bucket), ("IsTruncated", "false"), *found)


def parts_page(upload_id: str, upload: MultipartUpload) -> bytes:
    """Return every part of an unfinished upload."""
    found = [
        wrapped(
            "Part",
            ("PartNumber", number),
            ("LastModified", timestamp(part.modified)),
            ("ETag", f'"{part.etag}"'),
            ("Size", part.size_bytes),
        )
        for number, part in sorted(upload.parts.items())
    ]
    head = (("Bucket", upload.bucket), ("Key", upload.key), ("UploadId", upload_id), ("IsTruncated", "false"))
    return document("ListPartsResult", *head, *found)
