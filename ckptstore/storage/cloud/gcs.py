"""Google Cloud Storage over its JSON API.

The only importer of google-auth (beside `chains`) and of requests, which gcsfs uses too. Requests run on the calling
thread, not on one event loop. Each upload carries a checksum, which GCS checks before it makes the object visible.

GCS has no parts in its JSON API: a large file goes up as temporary objects beside it (".part-..."), which are composed
and deleted. A process that is killed meanwhile leaves them in the attempt's directory, which `gc` removes whole; a
bucket that forbids deletions leaves them beside a committed file.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import quote

from ckptstore.errors import AccessDenied, CkptstoreError, FileMissing, InvalidInput, StorageUnavailable
from ckptstore.format.digest import Digest
from ckptstore.format.encoding import parse_json
from ckptstore.storage.base import PartWriter, StoredFile
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.answers import check_head, complete, wrong
from ckptstore.storage.cloud.bodies import (
    CHECKSUM,
    CHECKSUM_TITLE,
    Filling,
    ViewsBody,
    checksum_of,
    checksum_text,
    part_bytes,
    total_bytes,
)
from ckptstore.storage.cloud.files import CloudFiles, OpenedAs
from ckptstore.storage.cloud.routes import CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS, check_endpoint, requests_route
from ckptstore.storage.uri import Location

logger = logging.getLogger("ckptstore")

_GOOGLE = "https://storage.googleapis.com"
_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
_LIST_FILES = 1000
_MAX_COMPOSED = 32
_PART_BYTES = 16 << 20
_MIB = 1 << 20


class GcsFiles(CloudFiles):
    """Files below a prefix of a bucket. The client is an HTTP session with credentials."""

    _has_generations = True

    def __init__(self, location: Location, settings: Mapping[str, Any], opened_as: OpenedAs) -> None:
        super().__init__(location, settings, opened_as)
        self._bucket = f"/b/{quote(location.container, safe='')}"
        endpoint = _endpoint_of(settings)
        check_endpoint(endpoint)
        self._is_googles = endpoint is None
        self._endpoint = (endpoint or _GOOGLE).rstrip("/")
        self._token = settings.get("token") or ("anon" if endpoint else None)
        self._route = requests_route(self._endpoint)
        with foreign.seam(lambda _error: InvalidInput("The timeout is not a number of seconds")):
            read_seconds = float(settings.get("timeout") or READ_TIMEOUT_SECONDS)
        self._timeout = (CONNECT_TIMEOUT_SECONDS, read_seconds)

    def call(self, method: str, path: str, *, what: str, key: str, **options: Any) -> Any:
        """Make one request, and return its response from JSON."""
        with self._stream(method, f"/storage/v1{path}", what=what, key=key, **options) as answer:
            return self._json(answer, what=what, key=key)

    def _stream(self, method: str, path: str, *, what: str, key: str, **options: Any) -> Any:
        """Make one request; the body of its response is not read yet."""
        with self.seam(what, key) as number:
            url = f"{self._endpoint}{path}"
            answer = self.client.request(method, url, timeout=self._timeout, stream=True, **options)
            if answer.status_code < 200:  # an interim response; the final one is still to come
                with answer:
                    raise wrong(key, f"its status is {answer.status_code}")
            if answer.status_code >= 300:
                with answer:
                    raise self._refused(answer, what=f"{what} {self.uri}", key=key, number=number)
        return answer

    def _json(self, answer: Any, *, what: str, key: str) -> Any:
        with self.seam(what, key):
            data = answer.content
        with complete(key):
            return {} if answer.status_code == 204 else parse_json(data)

    def rules(self) -> dict[str, str]:
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
        return f"{self._bucket}/o/{quote(self.full(key), safe='')}"

    def _put(self, key: str, views: Sequence[memoryview], *, new: bool) -> None:
        condition: dict[str, Any] = {"ifGenerationMatch": "0"} if new else {}
        self.put(key, views, **condition)

    def put(self, key: str, views: Sequence[memoryview], *, digest: Digest | None = None, **condition: str) -> Digest:
        """Upload an object in one request, and return its checksum."""
        checksum = checksum_of(views, digest)
        resource = {"name": self.full(key), CHECKSUM: checksum_text(checksum)}
        border = uuid.uuid4().hex
        head = (
            f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
            f"--{border}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        body = ViewsBody([memoryview(head.encode()), *views, memoryview(f"\r\n--{border}--\r\n".encode())])
        with self._stream(
            "POST",
            f"/upload/storage/v1{self._bucket}/o",
            what=foreign.sized("write", len(body)),
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
        path = f"/storage/v1{self.object(key)}"
        with (
            self._stream("GET", path, what="read", key=key, params={"alt": "media"}) as answer,
            self.seam("read", key),
        ):
            check_head(key, answer.status_code, answer.headers)
            return bytes(answer.content)

    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        params = {"alt": "media", **({"generation": version} if version else {})}
        headers = {"Range": f"bytes={offset}-{offset + filling.missing_bytes - 1}"}
        path = f"/storage/v1{self.object(key)}"
        with (
            self._stream("GET", path, what="read", key=key, params=params, headers=headers) as answer,
            self.seam("read", key),
        ):
            file_bytes = check_head(
                key,
                answer.status_code,
                answer.headers,
                version_header="x-goog-generation",
                offset=offset,
                version=version,
            )
            filling.read_from(answer.raw.readinto, filling.missing_bytes)
        return file_bytes

    def stat(self, key: str) -> StoredFile:
        item = self.call("GET", self.object(key), what="stat", key=key)
        return _stored(key, item)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        cut = len(self.full(""))
        params = {
            "prefix": self.full(prefix),
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
        path = f"{(files or self).object(source_key)}/rewriteTo{self.object(key)}"
        params: dict[str, str] = {}
        while True:
            answer = self.call("POST", path, what="copy", key=source_key, params=params, json={})
            if answer.get("done", True):
                return
            params["rewriteToken"] = answer["rewriteToken"]

    def part_bytes(self, size_bytes: int) -> int:
        """Return 16 MiB, or more if two rounds of composing 32 objects would not be enough."""
        return max(min(_PART_BYTES, part_bytes(0)), -(-size_bytes // (_MAX_COMPOSED - 1) ** 2 // _MIB) * _MIB)

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        return _Composition(self, key, size_bytes)

    def compose(self, sources: Sequence[str], key: str, *, size_bytes: int, checksum: Digest) -> None:
        """Make an object of up to 32 others."""
        body = {
            "sourceObjects": [{"name": self.full(source)} for source in sources],
            "destination": {"contentType": "application/octet-stream"},
        }
        answer = self.call("POST", f"{self.object(key)}/compose", what="compose", key=key, json=body)
        self._check(answer, key=key, size_bytes=size_bytes, checksum=checksum)

    def resolved(self) -> dict[str, str]:
        named = "endpoint_url" if self._settings.get("endpoint_url") else "STORAGE_EMULATOR_HOST"
        credentials = "the SDK's own chain" if self._token is None else "token"
        return {
            "endpoint": f"{foreign.server_of(self._endpoint)} ({'of Google' if self._is_googles else named})",
            "credentials": "none: anonymous" if self._token == "anon" else credentials,
            **self._route.told(self._endpoint),
        }

    def _connect(self) -> Any:
        import requests
        from google.auth.transport.requests import AuthorizedSession

        from ckptstore.storage.cloud.wire.adapter import mounted

        credentials = self._credentials()
        session = requests.Session() if credentials is None else AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        connect_seconds, read_seconds = self._timeout
        mounted(session, self._route, connect_seconds=connect_seconds, read_seconds=read_seconds)
        session.headers["Accept-Encoding"] = "identity"
        session.proxies = self._route.proxies(self._endpoint)
        session.verify = self._route.verify
        return session

    def _credentials(self) -> Any:
        """Return google-auth's credentials from gcsfs' `token`, None for anonymous access."""
        import google.auth
        import google.auth.compute_engine
        import google.auth.credentials
        import google.oauth2.credentials

        token = self._token
        if token == "anon":
            return None
        if isinstance(token, google.auth.credentials.Credentials):
            return token
        if token == "cloud":
            return google.auth.compute_engine.Credentials()  # type: ignore[no-untyped-call]
        if isinstance(token, dict):
            return google.auth.load_credentials_from_dict(token, scopes=_SCOPES)[0]  # type: ignore[no-untyped-call]
        if token in ("browser", "cache"):
            hint = 'Run `gcloud auth application-default login` and leave it out, or take engine="fsspec"'
            raise InvalidInput(f"The token {token!r} needs gcsfs", hint=hint)
        if isinstance(token, str) and token != "google_default":
            is_path = "/" in token or token.endswith(".json") or os.path.exists(token)
            if not is_path:  # an access token itself, in which no "/" may be
                return google.oauth2.credentials.Credentials(token)  # type: ignore[no-untyped-call]
            return google.auth.load_credentials_from_file(token, scopes=_SCOPES)[0]  # type: ignore[no-untyped-call]
        return google.auth.default(scopes=_SCOPES)[0]

    def _refused(self, answer: Any, *, what: str, key: str, number: int) -> CkptstoreError:
        try:
            reason = str(answer.json()["error"]["errors"][0]["reason"])
        except (ValueError, LookupError, TypeError):
            reason = ""
        again = self.remedy(answer.status_code, reason, "", what=what, key=key, number=number)
        is_anonymous = self._token == "anon"
        return again or foreign.from_status(answer.status_code, reason, key=key, what=what, anonymous=is_anonymous)

    def _translated(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        import google.auth.exceptions
        import requests

        if isinstance(error, google.auth.exceptions.GoogleAuthError):
            again = self.remedy(None, "", str(error), what=what, key=key, number=number)
            if again is not None:
                return again
            return chains.google_refusal(error, what=what, key=key)
        is_broken = isinstance(error, requests.RequestException | OSError | http.client.HTTPException)
        if is_broken or type(error).__module__.startswith("urllib3"):
            return foreign.broken_off(error, what=what, key=key, url=self._endpoint, through=self._route.through)
        return foreign.unexpected(error, what=what, key=key)


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
        self._is_whole = False

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        name = f"{self._name}-{offset // self._part_bytes:05d}"
        self._parts[offset] = name, total_bytes(views), self._files.put(name, views, digest=digest)

    def finish(self) -> None:
        """Join the parts, and remove them. May be called again after an error: they stay until the file is whole."""
        if not self._is_whole:
            self._join_all()
            self._is_whole = True
        try:
            self._remove()
        except AccessDenied as error:  # not worth a checkpoint: a commit passes over them
            logger.warning("The parts of %s stay beside it, and cost as much as it does: %s", self._key, error)

    def _join_all(self) -> None:
        parts = [part for _, part in sorted(self._parts.items())]
        while len(parts) > _MAX_COMPOSED:
            groups = [parts[start : start + _MAX_COMPOSED] for start in range(0, len(parts), _MAX_COMPOSED)]
            parts = [self._join(group, f"{self._name}-joined-{index:05d}") for index, group in enumerate(groups)]
            self._joined += [name for name, _, _ in parts]
        self._join(parts, self._key)

    def _join(self, parts: Sequence[_Part], key: str) -> _Part:
        (_, total_bytes, checksum), *others = parts
        for _, size_bytes, other in others:
            total_bytes, checksum = total_bytes + size_bytes, checksum.followed_by(other, size_bytes)
        self._files.compose([name for name, _, _ in parts], key, size_bytes=total_bytes, checksum=checksum)
        return key, total_bytes, checksum

    def abort(self) -> None:
        """Remove the temporary objects, as far as possible."""
        with suppress(CkptstoreError):
            self._remove()

    def _remove(self) -> None:
        self._files.delete([*(name for name, _, _ in self._parts.values()), *self._joined])


def _stored(key: str, item: Mapping[str, Any]) -> StoredFile:
    with complete(key):
        modified = datetime.fromisoformat(item["updated"]).timestamp()
        generation = item.get("generation")
        return StoredFile(key, int(item["size"]), modified, str(generation) if generation else None)


def _endpoint_of(options: Mapping[str, Any]) -> str | None:
    """Return the configured endpoint, None for Google's own."""
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if not endpoint or endpoint == "default":
        return None
    return endpoint if "://" in endpoint else f"http://{endpoint}"
