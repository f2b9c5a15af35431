"""S3 by the settings and credentials of botocore.

Requests run on the calling thread, not on s3fs' one event loop, and `wire` sends them. Those of every save and load are
made and signed here, the others by botocore. botocore itself sends only what goes to a proxy by TLS, or by an option
about proxies.

The body of an upload carries a checksum, which the server checks, and is not signed as well (SHA-256 would cost more
than the transfer); without that checksum it is signed over plain HTTP.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import http.client
import inspect
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, unquote_plus, urlsplit
from xml.etree import ElementTree

from ckptstore.errors import AccessDenied, CkptstoreError, FileMissing, StorageError, StorageUnavailable
from ckptstore.format.digest import Digest
from ckptstore.runtime.beat import beat
from ckptstore.storage.base import PartWriter, StoredFile, UploadGone
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.answers import check_head, complete
from ckptstore.storage.cloud.aws_settings import AwsAddress, AwsSettings
from ckptstore.storage.cloud.bodies import (
    CHECKSUM,
    CHECKSUM_TITLE,
    PIECE_BYTES,
    Filling,
    ViewsBody,
    checksum_of,
    checksum_text,
    part_bytes,
    total_bytes,
)
from ckptstore.storage.cloud.files import Clock, CloudFiles, OpenedAs
from ckptstore.storage.cloud.wire.http_client import HttpAnswer, HttpClient
from ckptstore.storage.cloud.wire.line import trusting
from ckptstore.storage.uri import Location

_DELETE_KEYS = 1000
_COPY_BYTES = 5 << 30
"""The most bytes of one copy request."""
_COPY_PART_BYTES = 1 << 30
_CLEARING_TRIES = 5
_FOR_THE_OWNER = {"get_bucket_versioning", "get_object_lock_configuration", "get_bucket_lifecycle_configuration"}
"""The requests for which no requester can pay: botocore refuses the parameter."""


class S3Files(CloudFiles):
    """Files below a prefix of a bucket."""

    _settings: AwsSettings

    def __init__(self, location: Location, settings: AwsSettings, opened_as: OpenedAs) -> None:
        super().__init__(location, settings, opened_as)
        self._maybe_begun: set[str] = set()
        self._http: HttpClient | None = None
        self._usual: _UsualRequests | None = None
        self.sends_checksum = settings.sends_checksum
        self.put_options: dict[str, Any] = dict(settings.options.get("s3_additional_kwargs") or {})
        """Further parameters of requests that make an object, such as its encryption."""
        self._payer = {"RequestPayer": "requester"} if settings.options.get("requester_pays") else {}

    def call(self, operation: str, *, file: str, **parameters: Any) -> Any:
        """Make one request; `file` is the key that an error names."""
        with self.seam(foreign.sized(operation, parameters.get("ContentLength", 0)), file):
            return self._answer(operation, parameters if operation in _FOR_THE_OWNER else self._payer | parameters)

    def _answer(self, operation: str, parameters: dict[str, Any]) -> Any:
        client = self.client
        if self._usual is not None and operation in _METHODS and parameters.keys() <= _KNOWN:
            return self._usual.answer(operation, parameters)
        return getattr(client, operation)(Bucket=self._location.container, **parameters)

    def _put(self, key: str, views: Sequence[memoryview], *, new: bool) -> None:
        body = ViewsBody(views)
        self.call(
            "put_object",
            file=key,
            Key=self.full(key),
            Body=body,
            ContentLength=len(body),
            **self.checksum(views),
            **self.put_options,
            **({"IfNoneMatch": "*"} if new else {}),
        )

    def checksum(self, views: Sequence[memoryview], digest: Digest | None = None) -> dict[str, str]:
        """Return the checksum to send with a body, none if that is off; `digest` is its digest, if that is known."""
        if not self.sends_checksum:
            return {}
        return {f"Checksum{CHECKSUM_TITLE}": checksum_text(checksum_of(views, digest))}

    def read(self, key: str) -> bytes:
        answer = self.call("get_object", file=key, Key=self.full(key))
        with self.seam("read", key), answer["Body"] as body:
            check_head(key, *_head(answer))
            return bytes(body.read())

    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        pin = {"IfMatch": version} if version else {}
        end = offset + filling.missing_bytes
        answer = self.call("get_object", file=key, Key=self.full(key), Range=f"bytes={offset}-{end - 1}", **pin)
        with self.seam("read", key), answer["Body"] as body:
            file_bytes = check_head(key, *_head(answer), offset=offset, version=version)
            filling.read_from(body.readinto, filling.missing_bytes if isinstance(body, HttpAnswer) else PIECE_BYTES)
        return file_bytes

    def stat(self, key: str) -> StoredFile:
        from botocore.exceptions import ClientError

        place = {"Key": self.full(key), **self._payer}
        with self.seam("stat", key):
            try:
                answer = self._answer("head_object", place)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (400, 403):
                    raise
                answer = self._answer("get_object", place)  # a refusal of it has the reason, that of a HEAD has none
                answer["Body"].close()
        _, head = _head(answer)
        with complete(key):
            modified = parsedate_to_datetime(head["last-modified"]).timestamp()
            return StoredFile(key, int(head["content-length"]), modified, head["etag"])

    def list(self, prefix: str) -> Iterator[StoredFile]:
        cut = len(self.full(""))
        token: dict[str, str] = {}
        while True:
            page = self.call("list_objects_v2", file=prefix, Prefix=self.full(prefix), **token)
            with complete(prefix):
                files = [
                    StoredFile(item["Key"][cut:], item["Size"], item["LastModified"].timestamp(), item["ETag"])
                    for item in page.get("Contents", ())
                    if not item["Key"].endswith("/")  # some tools leave such a key for a directory
                ]
                token = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else {}
            yield from files
            if not token:
                return

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_KEYS):
            batch = [{"Key": self.full(key)} for key in dict.fromkeys(keys[start : start + _DELETE_KEYS])]
            answer = self.call("delete_objects", file=keys[start], Delete={"Objects": batch, "Quiet": True})
            for refused in answer.get("Errors", ()):
                if refused.get("Code") != "NoSuchKey":
                    raise _refusal(refused, cut=len(self.full("")))
            beat()

    def source_of_copy(self, key: str) -> dict[str, str]:
        """Return a file in the form for a request that copies it."""
        return {"Bucket": self._location.container, "Key": self.full(key)}

    def copy(self, source_key: str, key: str, *, files: S3Files | None = None) -> None:
        files = files or self
        source = files.source_of_copy(source_key)
        size_bytes = files.stat(source_key).size_bytes
        if size_bytes <= _COPY_BYTES:
            self.call("copy_object", file=source_key, Key=self.full(key), CopySource=source, **self.put_options)
            return
        try:
            self._copy_in_parts(source, key, size_bytes)
        except UploadGone:
            self._copy_in_parts(source, key, size_bytes)

    def _copy_in_parts(self, source: dict[str, str], key: str, size_bytes: int) -> None:
        upload = _Upload(self, key, size_bytes, checksum=False)
        try:
            for number, start in enumerate(range(0, size_bytes, _COPY_PART_BYTES), start=1):
                last = min(start + _COPY_PART_BYTES, size_bytes) - 1
                upload.copy_part(number, source, f"bytes={start}-{last}")
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        try:
            return _Upload(self, key, size_bytes, checksum=self.sends_checksum)
        except StorageUnavailable:
            self._maybe_begun.add(key)
            raise

    def drop_other_uploads(self, key: str) -> None:
        """Abort uploads of a key whose begin got no response. Best effort; only ckptstore writes to the key."""
        for _ in range(_CLEARING_TRIES):
            if key not in self._maybe_begun:
                return
            with suppress(CkptstoreError):  # if one response was lost, the next may be too
                for found, upload_id in self.unfinished(key):
                    if found == key:
                        self.abort_unfinished(key, upload_id)
                self._maybe_begun.discard(key)

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        cut = len(self.full(""))
        found: list[tuple[str, str]] = []
        marker: dict[str, str] = {}
        while True:
            page = self.call("list_multipart_uploads", file=prefix, Prefix=self.full(prefix), **marker)
            found += [(item["Key"][cut:], item["UploadId"]) for item in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return found
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        with suppress(FileMissing, UploadGone):
            self.call("abort_multipart_upload", file=key, Key=self.full(key), UploadId=upload_id)

    def rules(self) -> dict[str, str]:
        """See `Bucket`. Each rule needs its own permission; rules without permission are left out."""
        found = {"upload checksum": CHECKSUM_TITLE if self.sends_checksum else ""}
        with suppress(AccessDenied):
            status = self.call("get_bucket_versioning", file="").get("Status", "")
            found["versioning"] = "" if status in ("", "Suspended") else str(status)
        with suppress(AccessDenied):
            found["object lock"] = self._object_lock()
        with suppress(AccessDenied):
            found["unfinished uploads"] = self._lifecycle()
        return found

    def _object_lock(self) -> str:
        with suppress(FileMissing):
            answer = self.call("get_object_lock_configuration", file="")["ObjectLockConfiguration"]
            kept = answer.get("Rule", {}).get("DefaultRetention", {})
            days = kept.get("Days") or 365 * kept.get("Years", 0)
            return f"{kept.get('Mode', '')} for {days} days" if kept else ""
        return ""

    def _lifecycle(self) -> str:
        with suppress(FileMissing):
            for rule in self.call("get_bucket_lifecycle_configuration", file="").get("Rules", ()):
                days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
                if days and rule.get("Status") == "Enabled":
                    return f"aborted after {days} days"
        return ""

    def resolved(self) -> dict[str, str]:
        return self._settings.resolved()

    def close(self) -> None:
        super().close()
        if self.is_here:
            with self._lock:
                http_client, self._http = self._http, None
            if http_client is not None:
                http_client.close()

    def _connect(self) -> Any:
        client = self._settings.client()
        if self._http is None:
            self._http = _http_client(client.meta, self._settings.route.verify)
        if self._http is not None:
            client.meta.events.register_first("before-send.s3", functools.partial(_sent, self._http))
        if self._clock.ahead_seconds:
            sign_by(self._clock, client)
        self._usual = None
        address, s3_options = self._settings.address, client.meta.config.s3
        is_usual = address.signature in ("", "AWS4-HMAC-SHA256") and address.service in ("", "s3")
        if (
            self._http is not None
            and is_usual
            and not (address.virtual is None or s3_options["payload_signing_enabled"])
        ):
            self._usual = _UsualRequests(client, self._http, address, self._location.container, self._clock)
        return client

    def _renew_connections(self, **options: int) -> None:
        super()._renew_connections(**options)
        with self._lock:
            http_client = self._http
        if http_client is not None:
            http_client.drop_idle()

    @property
    def _keys_may_change(self) -> bool:
        return not self._settings.given_keys and not self._settings.is_anonymous

    def _renew_credentials(self) -> bool | None:
        found_others = self._settings.renew_credentials()
        self._renew_connections()
        return found_others

    def _translated(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        from botocore import exceptions

        if isinstance(error, exceptions.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(error.response.get("Error", {}).get("Code") or "")
            code = "" if code.isdigit() else code
            date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
            text = str(error.response.get("Error", {}).get("Message", ""))
            again = self.remedy(status, code, text, what=what, key=key, number=number, date=date)
            if again is not None:
                return again
            is_malformed = code == "AuthorizationHeaderMalformed" and "Region" in error.response["Error"]
            if is_malformed or status in (301, 302, 307, 308):
                return self._elsewhere(what, key, number)
            storage_class = str(error.response.get("Error", {}).get("StorageClass", ""))
            more: dict[str, Any] = {
                "storage_class": storage_class,
                "text": text,
                "anonymous": self._settings.is_anonymous,
            }
            head = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            by = head.get("via") or head.get("server") or ""
            return foreign.from_status(status, code, key=key, what=what, by=by, **more)
        had = self._renewals.has_worked
        refused = chains.aws_refusal(error, what=what, key=key, profile=self._settings.profile, had=had)
        if refused is not None:
            self._renew_credentials()  # the client found no credentials when it was made, and would not look again
            return refused
        broken = (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
            exceptions.FlexibleChecksumError,
            http.client.HTTPException,
            OSError,
        )
        if isinstance(error, broken) or type(error).__module__.startswith("urllib3"):
            url, through = self._settings.address.endpoint_url, self._settings.route.through
            return foreign.broken_off(error, what=what, key=key, url=url, through=through)
        return foreign.unexpected(error, what=what, key=key)

    def _elsewhere(self, what: str, key: str, number: int) -> StorageError:
        """Return the error for a bucket in another region, after S3 was asked for the region."""

        def relocate() -> None:
            self._settings.relocate()
            self._renew_connections()

        region = self._settings.address.region
        kind = StorageUnavailable if self._renewals.renew(number, relocate) else StorageError
        hint = "Name its region in AWS_REGION or in client_kwargs.region_name"
        return kind(f"{what}: the bucket is not in the region {region}", file=key, hint=hint)


_METHODS = {"get_object": "GET", "head_object": "HEAD", "list_objects_v2": "GET", "put_object": "PUT"}
_HEADERS = {
    f"Checksum{CHECKSUM_TITLE}": f"x-amz-checksum-{CHECKSUM}",
    "ContentLength": "content-length",
    "IfMatch": "if-match",
    "IfNoneMatch": "if-none-match",
    "Range": "range",
    "RequestPayer": "x-amz-request-payer",
}
_FIELDS = {"ContinuationToken": "continuation-token", "Prefix": "prefix"}
_KNOWN = frozenset([*_HEADERS, *_FIELDS, "Body", "Key"])
_ERROR = re.compile(rb"\s*(<\?xml[^>]*>\s*)?<Error[\s>]")
_PAYLOAD = "UNSIGNED-PAYLOAD"


class _UsualRequests:
    """The requests of every save and load, with the parameters, answers and errors that botocore has for them.

    botocore's events and models cost four times the processor time of such a request.
    """

    def __init__(self, client: Any, http_client: HttpClient, address: AwsAddress, bucket: str, clock: Clock) -> None:
        """Use the credentials, the parser and the name of a client of botocore."""
        self._client = client
        self._http = http_client
        self._address = address
        self._clock = clock
        place = urlsplit(address.endpoint_url)
        host = place.netloc.rpartition("@")[2].removesuffix({"https": ":443", "http": ":80"}[place.scheme])
        self._host = f"{bucket}.{host}" if address.virtual else host
        self._path = place.path if address.virtual else f"{place.path}/{bucket}"
        self._origin = f"{place.scheme}://{self._host}"

    def answer(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request. Raises ClientError of botocore for a refusal."""
        method, key, query = _METHODS[operation], parameters.get("Key"), ""
        path = f"{self._path}/{quote(key)}" if key else self._path or "/"
        if not key:
            fields = {field: parameters[name] for name, field in _FIELDS.items() if name in parameters}
            fields |= {"encoding-type": "url", "list-type": "2"}
            query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(fields.items()))
        headers = {header: str(parameters[name]) for name, header in _HEADERS.items() if name in parameters}
        headers["host"] = self._host
        if self._address.signature:
            self._sign(method, f"{path}\n{query}", headers)
        headers["user-agent"] = self._client.meta.config.user_agent
        views = parameters["Body"].views if "Body" in parameters else ()
        answer = self._http.send(method, f"{self._origin}{path}{query and '?'}{query}", headers, views)
        metadata = {"HTTPStatusCode": answer.status, "HTTPHeaders": answer.headers}
        if operation == "get_object" and answer.status < 300:
            return {"ResponseMetadata": metadata, "Body": answer}
        return self._parsed(operation, metadata, answer.read())

    def _sign(self, method: str, target: str, headers: dict[str, str]) -> None:
        """Add the signature of AWS, of version 4."""
        from botocore.exceptions import NoCredentialsError

        found: Any = getattr(self._client._request_signer, "_credentials", None)
        if found is None:
            raise NoCredentialsError
        keys, region = found.get_frozen_credentials(), self._address.region
        now = datetime.now(UTC) + timedelta(seconds=self._clock.ahead_seconds)
        when = f"{now:%Y%m%dT%H%M%SZ}"
        headers |= {"x-amz-content-sha256": _PAYLOAD, "x-amz-date": when}
        if keys.token:
            headers["x-amz-security-token"] = keys.token
        names = sorted(headers)
        signed, lines = ";".join(names), "".join(f"{name}:{headers[name]}\n" for name in names)
        request = hashlib.sha256(f"{method}\n{target}\n{lines}\n{signed}\n{_PAYLOAD}".encode()).hexdigest()
        parts = (when[:8], region, "s3", "aws4_request")
        scope, key = "/".join(parts), _signing_key(keys.secret_key, parts)
        signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{request}".encode(), "sha256").hex()
        head = f"Credential={keys.access_key}/{scope}, SignedHeaders={signed}, Signature={signature}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 {head}"

    def _parsed(self, operation: str, metadata: dict[str, Any], data: bytes) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        # S3 may notice an error after it has sent a status of success.
        status = 500 if metadata["HTTPStatusCode"] < 300 and _ERROR.match(data) else metadata["HTTPStatusCode"]
        if status >= 300:
            answer = {"status_code": max(status, 301), "headers": metadata["HTTPHeaders"], "body": data}
            raise ClientError(self._client._response_parser.parse(answer, None), operation)
        return {"ResponseMetadata": metadata, **(_page_of(data) if operation == "list_objects_v2" else {})}


def _page_of(data: bytes) -> dict[str, Any]:
    """Return a page of a listing in the form of botocore, whose parser takes milliseconds for it."""
    with complete(""):
        root = ElementTree.fromstring(data)
        for node in root.iter():
            node.tag = node.tag.rpartition("}")[2]
        found = [{field.tag: field.text or "" for field in item} for item in root.findall("Contents")]
        is_encoded = root.findtext("EncodingType") == "url"
        for item in found:
            item["Key"] = unquote_plus(item["Key"]) if is_encoded else item["Key"]
        is_truncated = root.findtext("IsTruncated") == "true"
        token = root.findtext("NextContinuationToken")
        files = [
            {**item, "Size": int(item["Size"]), "LastModified": datetime.fromisoformat(item["LastModified"])}
            for item in found
        ]
        return {"Contents": files, "IsTruncated": is_truncated, **({"NextContinuationToken": token} if token else {})}


@functools.lru_cache(maxsize=8)
def _signing_key(secret_key: str, scope: tuple[str, ...]) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def sign_by(clock: Clock, client: Any) -> None:
    """Have a client of botocore, or of aiobotocore, sign its requests by a clock: botocore itself has that of this
    machine alone."""
    from botocore.auth import S3SigV4Auth

    class ByClock(S3SigV4Auth):  # type: ignore[misc]
        def _modify_request_before_signing(self, request: Any) -> None:
            now = datetime.now(UTC) + timedelta(seconds=clock.ahead_seconds)
            request.context["timestamp"] = now.strftime("%Y%m%dT%H%M%SZ")
            super()._modify_request_before_signing(request)

    def with_clock(auth: Any) -> Any:
        if type(auth).__name__ not in ("S3SigV4Auth", "CrtS3SigV4Auth"):
            return auth
        return ByClock(auth.credentials, auth._service_name, auth._region_name)

    async def get_later(*arguments: Any, **keywords: Any) -> Any:
        return with_clock(await get(*arguments, **keywords))

    def get_now(*arguments: Any, **keywords: Any) -> Any:
        return with_clock(get(*arguments, **keywords))

    signer = client._request_signer
    get = signer.get_auth_instance
    signer.get_auth_instance = signer.get_auth = get_later if inspect.iscoroutinefunction(get) else get_now


def _http_client(meta: Any, verify: bool | str) -> HttpClient | None:
    """Return the sender of a client's requests; None if botocore has to send them itself."""
    from botocore.httpsession import get_cert_path

    config = meta.config
    proxy_url = (config.proxies or {}).get(urlsplit(meta.endpoint_url).scheme)
    if config.proxies_config or not (proxy_url or "http://").startswith("http://"):
        return None

    def trust() -> ssl.SSLContext:
        context = trusting(get_cert_path(verify))
        if config.client_cert:
            pair = (config.client_cert,) if isinstance(config.client_cert, str) else config.client_cert
            context.load_cert_chain(*pair)
        return context

    return HttpClient(
        connect_seconds=config.connect_timeout,
        read_seconds=config.read_timeout,
        keepalive=bool(config.tcp_keepalive),
        trust=trust,
        proxy_url=proxy_url,
    )


def _sent(http_client: HttpClient, request: Any, **_: Any) -> Any:
    """Return the response to a request that botocore is about to send; None for a body that it must send itself."""
    from botocore.awsrequest import AWSResponse

    body = b"" if request.body is None else request.body
    if not isinstance(body, ViewsBody | bytes | bytearray):
        return None
    views = body.views if isinstance(body, ViewsBody) else (memoryview(body),)
    answer = http_client.send(request.method, request.url, request.headers, views)
    response = AWSResponse(request.url, answer.status, answer.headers, answer)
    if not request.stream_output:
        _ = response.content  # read now, as botocore's own session does, so that a break is an error of the request
    return response


class _Upload:
    """A multipart upload. Parts are retried one by one; the one sent last for a number counts."""

    def __init__(self, files: S3Files, key: str, size_bytes: int, *, checksum: bool) -> None:
        self._files = files
        self._key = key
        self._size_bytes = size_bytes
        self._part_bytes = part_bytes(size_bytes)
        self._parts: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._finishing = False
        options = {"ChecksumAlgorithm": CHECKSUM_TITLE} if checksum else {}
        answer = files.call("create_multipart_upload", file=key, Key=files.full(key), **options, **files.put_options)
        with complete(key):
            self._at = {"Key": files.full(key), "UploadId": answer["UploadId"]}

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        number = offset // self._part_bytes + 1
        checksum = self._files.checksum(views, digest)
        answer = self._files.call(
            "upload_part",
            file=self._key,
            **self._at,
            PartNumber=number,
            Body=ViewsBody(views),
            ContentLength=total_bytes(views),
            **checksum,
        )
        with complete(self._key):
            self._sent(number, {"ETag": answer["ETag"], **checksum})

    def copy_part(self, number: int, source: dict[str, str], range_header: str) -> None:
        """Copy a part from another file."""
        answer = self._files.call(
            "upload_part_copy",
            file=self._key,
            **self._at,
            PartNumber=number,
            CopySource=source,
            CopySourceRange=range_header,
        )
        with complete(self._key):
            self._sent(number, {"ETag": answer["CopyPartResult"]["ETag"]})

    def _sent(self, number: int, proof: dict[str, str]) -> None:
        with self._lock:
            self._parts[number] = {"PartNumber": number, **proof}

    def finish(self) -> None:
        """Finish the upload. May be called again after an error: an upload that is gone by then has been finished by
        the first call."""
        self._finishing = True
        parts = [part for _, part in sorted(self._parts.items())]
        try:
            self._files.call("complete_multipart_upload", file=self._key, **self._at, MultipartUpload={"Parts": parts})
        except (FileMissing, UploadGone) as error:
            if not self._landed(len(parts)):
                raise foreign.upload_gone("finish", self._key) from error
        self._files.drop_other_uploads(self._key)

    def _landed(self, num_parts: int) -> bool:
        with suppress(FileMissing):
            found = self._files.stat(self._key)
            etag = (found.version or "").strip('"')
            return found.size_bytes == self._size_bytes and etag.endswith(f"-{num_parts}")
        return False

    def abort(self) -> None:
        try:
            self._files.call("abort_multipart_upload", file=self._key, **self._at)
        except CkptstoreError:
            if self._finishing:  # and gone, so perhaps visible
                with suppress(CkptstoreError):
                    self._files.delete([self._key])
        self._files.drop_other_uploads(self._key)


def _head(answer: dict[str, Any]) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of a response."""
    metadata = answer["ResponseMetadata"]
    return metadata["HTTPStatusCode"], metadata["HTTPHeaders"]


def _refusal(refused: dict[str, Any], *, cut: int) -> CkptstoreError:
    code = str(refused.get("Code", ""))
    status = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503, "ServiceUnavailable": 503}.get(code, 400)
    return foreign.from_status(status, code, key=str(refused.get("Key", ""))[cut:], what="delete")
