"""The generic engine on s3fs, gcsfs and adlfs, which can create-if-absent: by a condition that the server decides.

fsspec's own `mode="create"` is no such thing: it looks first and then writes, so two writers may both win. Therefore
only these three have the power, and a store tries it on the server before its first commit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckptstore.errors import CkptstoreError, FileMissing, InvalidInput, InvalidName, StorageError, StorageUnavailable
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import Storage, StoredFile, UploadGone
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.aws import sign_by
from ckptstore.storage.cloud.aws_settings import keys_of
from ckptstore.storage.cloud.bodies import PART_BYTES, part_bytes, total_bytes
from ckptstore.storage.cloud.files import Renewals, Renewing
from ckptstore.storage.cloud.native import INSIDE_FSSPEC
from ckptstore.storage.fsspec.generic import GenericStorage, class_for, stored
from ckptstore.storage.uri import parse_uri

_CLOUDS = {"s3fs": "S3FileSystem", "gcsfs": "GCSFileSystem", "adlfs": "AzureBlobFileSystem"}
_DAMAGED = frozenset({"ChecksumError", "FlexibleChecksumError", "ClientPayloadError", "ResponseParserError"})
"""The names of the packages' errors for answers that are not what was sent."""
_DELETE_THREADS = 16
_WHOLE_BYTES = 2 * PART_BYTES
"""The most bytes of a file that goes up in one request, from one buffer."""
_GCSFS_BORDER = b"--==0=="
"""The border that gcsfs sets between the parts of an upload in one request; a file that has it would be cut there. A
resumable upload has none."""


def open_fsspec(uri: str, storage_options: Mapping[str, Any] | None = None, fs: Any = None) -> Storage:
    """Return the storage at any URL of fsspec, by the file system `fs` if it is given. It connects on its first use.

    Raises ValueError for a scheme that fsspec does not know, ImportError if its package is missing, InvalidInput for
    options that the package does not accept, and for a file system that does not serve the URL.
    """
    family: type = class_for(uri) if fs is None else type(fs)
    options = storage_options or {}
    is_cloud = any(_comes_from(package, family) for package in _CLOUDS)
    if is_cloud:  # their keywords are open, and what nobody knows of them fails at the first request, or never
        accepted = [inspect.signature(base.__init__).parameters for base in family.__mro__]  # type: ignore[misc]
        unknown = [name for name in options if name not in INSIDE_FSSPEC.union({"profile"}, *accepted)]
        if unknown:
            raise InvalidInput(f"storage_options[{unknown[0]!r}] cannot be used with {parse_uri(uri).scheme}://")
    return (CloudStorage if is_cloud else GenericStorage)(uri, options, fs)


def _comes_from(package: str, family: type) -> bool:
    return any(
        (base.__module__.partition(".")[0], base.__name__) == (package, _CLOUDS[package]) for base in family.__mro__
    )


class CloudStorage(GenericStorage, Renewing):
    """Files below a prefix of a bucket or container."""

    def __init__(self, uri: str, options: Mapping[str, Any], fs: Any = None) -> None:
        """See `GenericStorage`. s3fs makes one try of each request, unless `fs` is somebody else's."""
        super().__init__(uri, options, fs)
        self._renewals = Renewals()  # to have opened it is no request that has succeeded
        self._leave_retries()

    def reopen(self) -> None:
        super().reopen()
        self._leave_retries()
        if self._clock.ahead_seconds and _comes_from("s3fs", type(self.system)):
            sign_by(self._clock, self.system.connect())

    def _renew_connections(self) -> None:
        self.reopen()

    def _renew_credentials(self) -> bool | None:
        before = self._keys()
        self.reopen()
        return self._keys_may_change and (before is None or self._keys() != before)

    def _keys(self) -> tuple[Any, ...] | None:
        """Return the credentials in use of s3fs, None if they are refreshed, or not known."""
        if _comes_from("s3fs", type(self.system)) and self._keys_may_change:
            with suppress(Exception):  # half a file, for one
                return keys_of(self.system.connect())
        return None

    @property
    def _keys_may_change(self) -> bool:
        return not any(self._opened_as[1].get(name) for name in ("anon", "key", "secret", "session", "token"))

    @contextmanager
    def seam(self, what: str, key: str) -> Iterator[None]:
        what, number = f"{what} {self.uri}", self._renewals.number
        with foreign.seam(lambda error: self.translated(error, what=what, key=key, number=number)):
            yield
        self._renewals.prove(number)

    def _leave_retries(self) -> None:
        """Leave retries to the layer above, which has deadlines. s3fs tries 5 times, and botocore in each 5 times."""
        if self._opened_as[2] is None and _comes_from("s3fs", type(self.system)):
            self.system.retries = 1
            self.system.config_kwargs = {"retries": {"total_max_attempts": 1}, **self.system.config_kwargs}

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        try:
            self._write_once(key, views)
        except (FileMissing, UploadGone):  # gcsfs raises the first for a session of an upload that is gone
            self._write_once(key, views)

    def _write_once(self, key: str, views: Sequence[memoryview]) -> None:
        path, size_bytes = self.path(key), total_bytes(views)
        least_bytes = part_bytes(0)
        with self.seam(foreign.sized("write", size_bytes), key):
            if size_bytes <= (_WHOLE_BYTES if least_bytes == PART_BYTES else least_bytes):
                data = b"".join(views)
                resumable = {"chunksize": len(data)} if self._has_border(data) else {}
                self.system.pipe_file(path, data, **resumable)
            else:
                self.stream(path, views, block_size=part_bytes(size_bytes))

    def create(self, key: str, data: bytes) -> bool:
        """See `CreatesExclusively`. Raises StorageError for what does not fit into one request."""
        if len(data) > _WHOLE_BYTES or self._has_border(data):
            raise StorageError("An upload in several requests may overwrite a file that exists", file=key)
        try:
            with self.seam("create", key):
                self.system.pipe_file(self.path(key), data, mode="create")
        except foreign.ConditionFailed:
            return False
        return True

    def _has_border(self, data: bytes) -> bool:
        return _comes_from("gcsfs", type(self.system)) and _GCSFS_BORDER in data

    def list(self, prefix: str) -> Iterator[StoredFile]:
        container, _, rest = self.root.partition("/")
        cut = len(self.root) + 1
        with self.seam("list", prefix):
            self.system.invalidate_cache()
            found = self.system.find(container, prefix=f"{rest}/{prefix}" if rest else prefix, detail=True)
        for path, item in found.items():
            key = str(path)[cut:]
            if item["type"] == "file" and f"{path}".startswith(f"{self.root}/{prefix}") and not key.endswith("/"):
                yield stored(key, item)

    def delete(self, keys: Sequence[str]) -> None:
        mapped(self._delete_one, list(dict.fromkeys(keys)), num_threads=_DELETE_THREADS, name="ckptstore-delete")

    def _delete_one(self, key: str) -> None:
        with suppress(FileMissing), self.seam("delete", key):
            self.system.rm_file(self.path(key))

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        self.reopen()

    def path(self, key: str) -> str:
        path = super().path(key)
        container, name, _ = self.system.split_path(path)
        if f"{container}/{name}" != path:  # they cut off the version that they take the end of a name for
            raise InvalidName(f"{key!r} is another name to the file system of {self.uri}", hint="Rename the file")
        return path

    def translated(self, error: Exception, *, what: str, key: str, number: int = 0) -> CkptstoreError:
        if isinstance(error, FileExistsError):
            return foreign.ConditionFailed(f"{what}: it exists", file=key)
        if any(type(item).__name__ in _DAMAGED for item in foreign.chain_of(error)):
            return StorageUnavailable(f"{what}: the bytes were damaged on their way", file=key)
        status, code, text, date = _refusal_of(error)
        for item in foreign.chain_of(error) if _comes_from("s3fs", type(self.system)) else ():
            refused = chains.aws_refusal(item, what=what, key=key, profile=None, had=self._renewals.has_worked)  # type: ignore[arg-type]
            if refused is not None:
                self.reopen()
                return refused
        if status is None:
            return super().translated(error, what=what, key=key)
        if status == 410 and what.startswith("write"):  # the session of an upload, to gcsfs
            return foreign.upload_gone(what, key)
        if status in (400, 403) and not code and _comes_from("s3fs", type(self.system)):
            # a response to HEAD, which s3fs sends before most others, gives no reason: one to GET does
            try:
                self.system.cat_file(self.path(key), start=0, end=1)
            except Exception as reason:
                said = _refusal_of(reason)
                status, code, text, date = said if said[0] in (400, 403) else (status, code, text, date)
            if not code and number != self._renewals.number:
                return foreign.renewed(what, key)
        again = self.remedy(status, code, text, what=what, key=key, number=number, date=date)
        is_anonymous = bool(self._opened_as[1].get("anon"))
        return again or foreign.from_status(status, code, key=key, what=what, text=text, anonymous=is_anonymous)


def _refusal_of(error: Exception) -> tuple[int | None, str, str, str | None]:
    """Return the status of a response, the store's code for it, its text and its date, from the errors of the three
    packages."""
    for item in foreign.chain_of(error):
        answer = getattr(item, "response", None)
        if isinstance(answer, Mapping):  # of botocore
            head, refusal = answer.get("ResponseMetadata", {}), answer.get("Error", {})
            code = str(refusal.get("Code") or "")
            text, date = str(refusal.get("Message", "")), head.get("HTTPHeaders", {}).get("date")
            return head.get("HTTPStatusCode"), "" if code.isdigit() else code, text, date
        if type(item).__name__ == "HttpError":  # of gcsfs
            code = str(getattr(item, "code", ""))
            return (int(code) if code.isdigit() else None), "", " ".join(map(str, foreign.chain_of(error))), None
        status = getattr(item, "status_code", None)
        if isinstance(status, int):  # of Azure
            named = getattr(item, "error_code", None)
            date = getattr(answer, "headers", {}).get("date")
            return status, str(getattr(named, "value", None) or named or ""), str(item), date
    is_refusal = type(error) is OSError and str(error).startswith("Forbidden")  # of gcsfs
    return (403 if is_refusal else None), "", "", None
