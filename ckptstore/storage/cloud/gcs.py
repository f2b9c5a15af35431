"""Google Cloud Storage over its JSON API: the fsspec engine on GCS, and the parts of the obstore engine.

The only importer of google-auth (beside `chains`) and of requests, SDKs of gcsfs. Requests run on the calling thread,
not on gcsfs' one event loop. Each upload carries a checksum, which GCS checks before it makes the object visible.

GCS has no parts in its JSON API: a large file goes up as temporary objects beside it (".part-..."), which are composed
and deleted. A process that is killed meanwhile leaves them in the attempt's directory, which `gc` removes whole.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import quote

from ckptstore.errors import AccessDenied, CkptstoreError, FileMissing, StorageUnavailable
from ckptstore.format.digest import Digest
from ckptstore.storage.base import PartWriter, StoredFile
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.answers import AnswerHead, complete, wrong
from ckptstore.storage.cloud.bodies import (
    CHECKSUM,
    CHECKSUM_TITLE,
    Filling,
    ViewsBody,
    checksum_of,
    checksum_text,
    total_bytes,
)
from ckptstore.storage.cloud.client_options import (
    GOOGLE,
    gcs_endpoint,
    gcs_route,
    seconds_of,
)
from ckptstore.storage.cloud.lazy_client import MAX_CONNECTIONS, CloudFiles, LazyClient
from ckptstore.storage.cloud.routes import CONNECT_TIMEOUT_SECONDS, DIRECT, READ_TIMEOUT_SECONDS, Environment, Route
from ckptstore.storage.uri import Location

_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
_LIST_FILES = 1000
_MAX_COMPOSED = 32
_PART_BYTES = 16 << 20
_MIB = 1 << 20


class GcsConnection(LazyClient):
    """An HTTP session with credentials."""

    def __init__(
        self,
        *,
        endpoint_url: str,
        credentials: Callable[[], Any],
        route: Route = DIRECT,
        said: Mapping[str, str] | None = None,
        read_seconds: float = READ_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__()
        self._endpoint = endpoint_url.rstrip("/")
        self._credentials = credentials
        self._route = route
        self._said = said or {}
        self._timeout = (CONNECT_TIMEOUT_SECONDS, read_seconds)

    def request(self, method: str, path: str, *, what: str, key: str, **options: Any) -> Any:
        """Make one request; the body of its response is not read yet."""
        with self.seam(what, key):
            answer = self.client.request(
                method, f"{self._endpoint}{path}", timeout=self._timeout, stream=True, **options
            )
            if answer.status_code < 200:  # an interim response; the final one is still to come
                with answer:
                    raise wrong(key, f"its status is {answer.status_code}")
            if answer.status_code >= 300:
                with answer:
                    raise self._refused(answer, what=what, key=key)
        self.succeeded()
        return answer

    def _connect(self) -> Any:
        import requests
        import requests.adapters
        from google.auth.transport.requests import AuthorizedSession

        credentials = self._credentials()
        session = requests.Session() if credentials is None else AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=MAX_CONNECTIONS, max_retries=0)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        session.headers["Accept-Encoding"] = "identity"
        session.trust_env = False  # the settings of the environment are in the route
        session.proxies = self._route.proxies(self._endpoint)
        session.verify = self._route.verify
        return session

    def resolved(self) -> dict[str, str]:
        endpoint = f"{foreign.server_of(self._endpoint)} ({self._said.get('endpoint', 'of Google')})"
        credentials = self._said.get("credentials", "the SDK's own chain")
        return {"endpoint": endpoint, "credentials": credentials, **self._route.told(self._endpoint)}

    def giver(self) -> chains.Giver:
        """See `LazyClient.giver`."""
        return chains.google_giver(self._credentials())

    def _refused(self, answer: Any, *, what: str, key: str) -> CkptstoreError:
        try:
            reason = str(answer.json()["error"]["errors"][0]["reason"])
        except (ValueError, LookupError, TypeError):
            reason = ""
        if answer.status_code == 401 and self._renewal.begin():
            self.close()
            return StorageUnavailable(f"{what}: the credentials had expired and were looked up anew", file=key)
        return foreign.from_status(answer.status_code, reason, key=key, what=what)

    def _translated(self, error: Exception, *, what: str, key: str) -> CkptstoreError:
        import google.auth.exceptions
        import requests

        if isinstance(error, google.auth.exceptions.GoogleAuthError):
            return chains.google_refusal(error, what=what, key=key)
        is_broken = isinstance(error, requests.RequestException | OSError)
        if is_broken or type(error).__module__.startswith("urllib3"):
            return foreign.broken_off(error, what=what, key=key, url=self._endpoint, through=self._route.through)
        return foreign.unexpected(error, what=what, key=key)


class GcsFiles(CloudFiles[GcsConnection]):
    """Files below a prefix of a bucket."""

    def __init__(self, location: Location, connection: GcsConnection) -> None:
        super().__init__(location, connection)
        self._bucket = f"/b/{quote(location.container, safe='')}"

    def call(self, method: str, path: str, *, what: str, key: str, **options: Any) -> Any:
        """Make one request, and return its response from JSON."""
        with self._stream(method, f"/storage/v1{path}", what=what, key=key, **options) as answer:
            return self._json(answer, what=what, key=key)

    def _stream(self, method: str, path: str, *, what: str, key: str, **options: Any) -> Any:
        self.check_process()
        return self._connection.request(method, path, what=f"{what} {self.uri}", key=key, **options)

    def _json(self, answer: Any, *, what: str, key: str) -> Any:
        with self._connection.seam(f"{what} {self.uri}", key):
            data = answer.content
        with complete(key):
            return {} if answer.status_code == 204 else json.loads(data)

    def rules(self) -> dict[str, str]:
        """See `Bucket`."""
        fields = "versioning,softDeletePolicy,retentionPolicy"
        try:
            answer = self.call("GET", self._bucket, what="rules", key="", params={"fields": fields})
        except AccessDenied:  # this needs storage.buckets.get, and no other request does
            return {"upload checksum": CHECKSUM_TITLE}
        soft = int(answer.get("softDeletePolicy", {}).get("retentionDurationSeconds") or 0)
        kept = int(answer.get("retentionPolicy", {}).get("retentionPeriod") or 0)
        return {
            "versioning": "Enabled" if answer.get("versioning", {}).get("enabled") else "",
            "soft delete": f"kept for {soft} s" if soft else "",
            "object lock": f"kept for {kept} s" if kept else "",
            "unfinished uploads": "none are left",
            "upload checksum": CHECKSUM_TITLE,
        }

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        """Return nothing: an unfinished upload costs nothing, and ends by itself."""
        return ()

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        """Do nothing: there is nothing to drop."""

    def object(self, key: str) -> str:
        """Return the path of an object in the API."""
        return f"{self._bucket}/o/{quote(self._location.full_key(key), safe='')}"

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self.put(key, views)

    def create(self, key: str, data: bytes) -> bool:
        try:
            self.put(key, [memoryview(data)], ifGenerationMatch="0")
        except foreign.ConditionFailed:
            return False
        return True

    def put(self, key: str, views: Sequence[memoryview], *, digest: Digest | None = None, **condition: str) -> Digest:
        """Upload an object in one request, and return its checksum."""
        checksum = checksum_of(views, digest)
        resource = {"name": self._location.full_key(key), CHECKSUM: checksum_text(checksum)}
        border = uuid.uuid4().hex
        head = (
            f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
            f"--{border}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        body = ViewsBody([memoryview(head.encode()), *views, memoryview(f"\r\n--{border}--\r\n".encode())])
        with self._stream(
            "POST",
            f"/upload/storage/v1{self._bucket}/o",
            what="write",
            key=key,
            params={"uploadType": "multipart", "fields": f"size,{CHECKSUM}", **condition},
            data=body,
            headers={"Content-Type": f"multipart/related; boundary={border}"},
        ) as answer:
            stored = self._json(answer, what="write", key=key)
            self._check(stored, key=key, size_bytes=total_bytes(views), checksum=checksum)
        return checksum

    def _check(self, stored: Mapping[str, Any], *, key: str, size_bytes: int, checksum: Digest) -> None:
        expected = checksum_text(checksum)
        with complete(key):
            is_same = stored.get(CHECKSUM, expected) == expected
            is_same = is_same and int(stored["size"]) == size_bytes
        if not is_same:
            raise StorageUnavailable("The bytes arrived damaged", file=key)

    def read(self, key: str) -> bytes:
        with (
            self._stream(
                "GET", f"/storage/v1{self.object(key)}", what="read", key=key, params={"alt": "media"}
            ) as answer,
            self._connection.seam(f"read {self.uri}", key),
        ):
            _told(key, answer).check(key)
            return bytes(answer.content)

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        filling = Filling(views, key=key)
        if not filling.missing_bytes:
            return
        end = offset + filling.missing_bytes
        params = {"alt": "media", **({"generation": version} if version else {})}
        headers = {"Range": f"bytes={offset}-{end - 1}"}
        path = f"/storage/v1{self.object(key)}"
        try:
            answer = self._stream("GET", path, what="read", key=key, params=params, headers=headers)
        except FileMissing as error:
            if version and self._exists(key):
                raise foreign.other_version(key) from error
            raise
        with answer, self._connection.seam(f"read {self.uri}", key):
            told = _told(key, answer)
            told.check(key, offset=offset, version=version)
            while filling.missing_bytes:
                count = answer.raw.readinto(filling.next())
                if not count:
                    break
                filling.advance(count)
        filling.end(file_bytes=told.total_bytes, end_offset=end)

    def _exists(self, key: str) -> bool:
        with suppress(FileMissing):
            self.stat(key)
            return True
        return False

    def stat(self, key: str) -> StoredFile:
        item = self.call("GET", self.object(key), what="stat", key=key)
        return _stored(key, item)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        cut = len(self._location.full_key(""))
        params = {
            "prefix": self._location.full_key(prefix),
            "maxResults": str(_LIST_FILES),
            "fields": "nextPageToken,items(name,size,updated,generation)",
        }
        while True:
            page = self.call("GET", f"{self._bucket}/o", what="list", key=prefix, params=params)
            with complete(prefix):
                items = [item for item in page.get("items", ()) if not item["name"].endswith("/")]
                params["pageToken"] = page.get("nextPageToken", "")
            for item in items:
                yield _stored(item["name"][cut:], item)
            if not params["pageToken"]:
                return

    def _delete_one(self, key: str) -> None:
        with suppress(FileMissing):
            self._stream("DELETE", f"/storage/v1{self.object(key)}", what="delete", key=key).close()

    def copy(self, source_key: str, key: str, *, files: GcsFiles | None = None) -> None:
        """Copy a file, from the bucket of `files` if that is not None."""
        path = f"{(files or self).object(source_key)}/rewriteTo{self.object(key)}"
        params: dict[str, str] = {}
        while True:
            answer = self.call("POST", path, what="copy", key=source_key, params=params, json={})
            if answer.get("done", True):
                return
            params["rewriteToken"] = answer["rewriteToken"]

    def part_bytes(self, size_bytes: int) -> int:
        """Return 16 MiB, or more if two rounds of composing 32 objects would not be enough."""
        return max(_PART_BYTES, -(-size_bytes // (_MAX_COMPOSED - 1) ** 2 // _MIB) * _MIB)

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        return _Composition(self, key, size_bytes)

    def compose(self, sources: Sequence[str], key: str, *, size_bytes: int, checksum: Digest) -> None:
        """Make an object of up to 32 others."""
        body = {
            "sourceObjects": [{"name": self._location.full_key(source)} for source in sources],
            "destination": {"contentType": "application/octet-stream"},
        }
        answer = self.call("POST", f"{self.object(key)}/compose", what="compose", key=key, json=body)
        self._check(answer, key=key, size_bytes=size_bytes, checksum=checksum)


_Part = tuple[str, int, Digest]
"""The key, size and checksum of a temporary object."""


class _Composition:
    """Temporary objects that are joined to one."""

    def __init__(self, files: GcsFiles, key: str, size_bytes: int) -> None:
        self._files = files
        self._key = key
        self._part_bytes = files.part_bytes(size_bytes)
        directory, slash, _ = key.rpartition("/")
        self._name = f"{directory}{slash}.part-{uuid.uuid4().hex[:16]}"
        self._parts: dict[int, _Part] = {}
        self._joined: list[str] = []

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        name = f"{self._name}-{offset // self._part_bytes:05d}"
        self._parts[offset] = name, total_bytes(views), self._files.put(name, views, digest=digest)

    def finish(self) -> None:
        """Join the parts. May be called again after an error: the parts stay until the file is whole."""
        parts = [part for _, part in sorted(self._parts.items())]
        while len(parts) > _MAX_COMPOSED:
            groups = [parts[start : start + _MAX_COMPOSED] for start in range(0, len(parts), _MAX_COMPOSED)]
            parts = [self._join(group, f"{self._name}-joined-{index:05d}") for index, group in enumerate(groups)]
            self._joined += [name for name, _, _ in parts]
        self._join(parts, self._key)
        self.abort()

    def _join(self, parts: Sequence[_Part], key: str) -> _Part:
        (_, total_bytes, checksum), *others = parts
        for _, size_bytes, other in others:
            total_bytes, checksum = total_bytes + size_bytes, checksum.followed_by(other, size_bytes)
        self._files.compose([name for name, _, _ in parts], key, size_bytes=total_bytes, checksum=checksum)
        return key, total_bytes, checksum

    def abort(self) -> None:
        """Remove the temporary objects."""
        with suppress(CkptstoreError):
            self._files.delete([*(name for name, _, _ in self._parts.values()), *self._joined])


def connect(names: Mapping[str, Any], environ: Environment) -> GcsConnection:
    """Return a connection with gcsfs' options."""
    endpoint = gcs_endpoint(names, environ)
    token = names.get("token") or ("anon" if endpoint else None)
    url = endpoint or GOOGLE
    said = {"endpoint": "endpoint_url" if names.get("endpoint_url") else "STORAGE_EMULATOR_HOST"} if endpoint else {}
    if token is not None:
        said["credentials"] = "none: anonymous" if token == "anon" else "token"
    return GcsConnection(
        endpoint_url=url,
        credentials=credentials_of(token),
        route=gcs_route(url, environ),
        said=said,
        read_seconds=seconds_of(names.get("timeout") or None, READ_TIMEOUT_SECONDS, "The timeout"),
    )


def credentials_of(token: Any) -> Callable[[], Any]:
    """Return a function that makes google-auth credentials from gcsfs' `token`, or None for anonymous access."""

    def make() -> Any:
        import google.auth
        import google.auth.compute_engine
        import google.auth.credentials

        if token == "anon":
            return None
        if isinstance(token, google.auth.credentials.Credentials):
            return token
        if token == "cloud":
            return google.auth.compute_engine.Credentials()  # type: ignore[no-untyped-call]
        if isinstance(token, dict):
            return google.auth.load_credentials_from_dict(token, scopes=_SCOPES)[0]  # type: ignore[no-untyped-call]
        if isinstance(token, str) and token != "google_default":
            return google.auth.load_credentials_from_file(token, scopes=_SCOPES)[0]  # type: ignore[no-untyped-call]
        return google.auth.default(scopes=_SCOPES)[0]

    return make


def _stored(key: str, item: Mapping[str, Any]) -> StoredFile:
    with complete(key):
        modified = datetime.fromisoformat(item["updated"]).timestamp()
        generation = item.get("generation")
        return StoredFile(key, int(item["size"]), modified, str(generation) if generation else None)


def _told(key: str, answer: Any) -> AnswerHead:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return AnswerHead.of(key, answer.status_code, headers, version=headers.get("x-goog-generation"))
