"""Object stores through obstore (Rust's object_store): off the interpreter lock, one copy in, none out.

Whole files, ranges, listings and deletions go through obstore. It has no call for one part of an upload, none that
finds unfinished uploads, and fewer ways to find credentials than the SDK of each cloud: those come from the SDK, which
has to be installed as well (`aws`, `gcs`, `azure`, `chains`).

On S3 each body carries a CRC64NVME, which the server checks; it is not signed as well, as SHA-256 would cost more than
the transfer. Without that checksum a body is signed over plain HTTP. `client_options` translates those of fsspec's
options that obstore can express. obstore's own retries are off.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from ckptstore.errors import AccessDenied, CkptstoreError, FileMissing, StorageError, StorageUnavailable
from ckptstore.runtime.extras import install_word
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import PartWriter, ProcessBound, Storage, StoredFile
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.answers import AnswerHead
from ckptstore.storage.cloud.bodies import Filling
from ckptstore.storage.cloud.client_options import (
    CannotExpress,
    ObstoreConfig,
    address_for_obstore,
    files_of_same_account,
    for_obstore,
)
from ckptstore.storage.uri import parse_uri

_LIST_FILES = 1000
_DELETE_THREADS = 16
_STREAM_BYTES = 256 << 10
"""The fewest bytes handed over at once: they stay in the cache until they are copied, and their memory is reused."""
_DIRECT_BYTES = 4 << 20
"""The size from which a read over plain HTTP goes straight from the socket into its views; below it, a request of
obstore costs less."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CLASS = re.compile(r"<StorageClass>(\w+)</StorageClass>")


_threads: set[int] = set()
"""The processes in which obstore has started its threads: this one, and those that it was forked from."""


def _lost_threads() -> str | None:
    """Return the reason why obstore does not work in this process, None if it does."""
    # It would wait for ever for threads that a fork has not taken along.
    lost = _threads and os.getpid() not in _threads
    return "this process was forked from one that used obstore, and its threads stayed there" if lost else None


def configured(uri: str, storage_options: Mapping[str, Any] | None) -> ObstoreConfig | str:
    """Return the configuration for `open_fast`, or the reason why obstore cannot serve the URI with these options."""
    if reason := _lost_threads():
        return reason
    try:
        kind = parse_uri(uri).kind
        if kind is not None and not chains.installed(kind):
            return f"parts and credentials need the SDK of that cloud (pip install {install_word(f'{kind},fast')})"
        return for_obstore(uri, storage_options)
    except CannotExpress as refusal:
        return str(refusal)


def open_fast(
    uri: str, storage_options: Mapping[str, Any] | None = None, config: ObstoreConfig | None = None
) -> Storage:
    """Return the storage at an s3, gs or az URI. It connects on its first use. `config` is the result of `configured`.

    Raises CannotExpress, a ValueError, for options that obstore does not have.
    """
    config = config or for_obstore(uri, storage_options)
    classes = {"s3": FastBucketStorage, "gcs": FastGcsStorage, "azure": FastStorage}
    return classes[config.location.kind or "s3"](uri, dict(storage_options or {}), config)


class _Exists(foreign.ConditionFailed):
    """A create found an existing file."""


class FastStorage(ProcessBound):
    """Files below a prefix of a bucket or container."""

    def __init__(self, uri: str, options: Mapping[str, Any], config: ObstoreConfig) -> None:
        super().__init__()
        self.opened_as = (uri, dict(options))
        self._config = config
        self._lock = threading.Lock()
        self._files = _files_of(config, options)
        self._is_plain = config.location.kind == "s3" and config.client["allow_http"]
        self._store: Any = None
        self._provider: chains.Provider | None = None
        self._renewal = foreign.Renewal()

    @property
    def uri(self) -> str:
        return self._config.location.uri

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_fast, self.opened_as

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        with self._seam("write", key):
            self._put(key, views)

    def create(self, key: str, data: bytes) -> bool:
        try:
            with self._seam("create", key):
                self._put(key, [memoryview(data)], mode="create")
        except _Exists:
            return False
        return True

    def _put(
        self, key: str, views: Sequence[memoryview], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        import obstore

        views = [view for view in views if len(view)]
        body = views[0] if len(views) == 1 else (views or b"")
        obstore.put(self._connected(), self._full(key), body, mode=mode, use_multipart=False)

    def read(self, key: str) -> bytes:
        import obstore

        with self._seam("read", key):
            answer = obstore.get(self._connected(), self._full(key))
            AnswerHead(encoding=answer.attributes.get("Content-Encoding")).check(key)
            data = bytes(answer.bytes())
        if len(data) != answer.meta["size"]:
            raise StorageUnavailable(f"The answer has {len(data)} bytes of {answer.meta['size']}", file=key)
        return data

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        import obstore

        filling = Filling(views, key=key)
        if not filling.missing_bytes:
            return
        if self._is_plain and filling.missing_bytes >= _DIRECT_BYTES:
            self._files.read_into(key, offset, views, version=version)
            return
        end = offset + filling.missing_bytes
        options: Any = {"range": (offset, end), **self._pin(version)}
        try:
            with self._seam("read", key):
                answer = obstore.get(self._connected(), self._full(key), options=options)
                file_bytes = answer.meta["size"]
                AnswerHead(
                    first=answer.range[0],
                    encoding=answer.attributes.get("Content-Encoding"),
                    version=self._stored(key, answer.meta).version,
                ).check(key, offset=offset, version=version)
                if filling.missing_bytes <= _STREAM_BYTES:
                    filling.take(memoryview(answer.bytes()))
                else:
                    for chunk in answer.stream(min_chunk_size=_STREAM_BYTES):
                        filling.take(chunk)
        except foreign.ConditionFailed as error:
            raise foreign.other_version(key) from error
        except StorageUnavailable as error:
            if type(error) is StorageUnavailable:  # obstore did not understand a response: is the file too short?
                with suppress(StorageError):
                    filling.end(file_bytes=self.stat(key).size_bytes, end_offset=end)
            raise
        except FileMissing as error:
            if version and self._generations and self._exists(key):
                raise foreign.other_version(key) from error
            raise
        filling.end(file_bytes=file_bytes, end_offset=end)

    def _pin(self, version: str | None) -> dict[str, str]:
        if not version:
            return {}
        if self._generations:
            return {"version": version}
        return {"if_match": f'"{version}"' if self._config.location.kind == "azure" else version}

    @property
    def _generations(self) -> bool:
        """True if a version is a generation number (GCS), not an ETag."""
        return self._config.location.kind == "gcs"

    def _exists(self, key: str) -> bool:
        with suppress(FileMissing):
            self.stat(key)
            return True
        return False

    def _stored(self, key: str, meta: Mapping[str, Any]) -> StoredFile:
        version = meta["version"] if self._generations else meta["e_tag"]
        if version and self._config.location.kind == "azure":
            version = version.strip('"')  # a listing has it without quotes
        return StoredFile(key, meta["size"], meta["last_modified"].timestamp(), version)

    def stat(self, key: str) -> StoredFile:
        import obstore

        with self._seam("stat", key):
            return self._stored(key, obstore.head(self._connected(), self._full(key)))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        import obstore

        full = self._full(prefix)
        directory, slash, _ = full.rpartition("/")  # obstore lists whole directories
        cut = len(self._full(""))
        with self._seam("list", prefix):
            pages = iter(obstore.list(self._connected(), prefix=f"{directory}{slash}", chunk_size=_LIST_FILES))
        while True:
            with self._seam("list", prefix):
                page = next(pages, None)
            if page is None:
                return
            for item in page:
                if item["path"].startswith(full):
                    yield self._stored(item["path"][cut:], item)

    def delete(self, keys: Sequence[str]) -> None:
        import obstore

        if not keys:
            return
        paths = [self._full(key) for key in dict.fromkeys(keys)]
        try:
            with self._seam("delete", keys[0]):
                obstore.delete(self._connected(), paths)
        except FileMissing:  # not on S3: one that is missing ends the batch
            mapped(self._delete_one, paths, num_threads=_DELETE_THREADS, name="ckptstore-delete")

    def _delete_one(self, path: str) -> None:
        import obstore

        with suppress(FileMissing), self._seam("delete", path):
            obstore.delete(self._connected(), path)

    def copy(self, source_key: str, key: str) -> None:
        self._files.copy(source_key, key)

    def copy_from(self, source: Storage, source_key: str, key: str) -> bool:
        files = files_of_same_account(self, source)
        if files is None:
            return False
        self._files.copy(source_key, key, files=files)
        return True

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """See `Doubts`."""
        with self._lock:
            self._store = None
        self._files.doubt(key)

    def resolved(self) -> Mapping[str, str]:
        """See `Configured`."""
        found: Mapping[str, str] = self._files.resolved()
        return found

    def part_bytes(self, size_bytes: int) -> int:
        return int(self._files.part_bytes(size_bytes))

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        writer: PartWriter = self._files.open_parts(key, size_bytes)
        return writer

    def close(self) -> None:
        if self.is_here:
            with self._lock:
                self._store = None
            self._files.close()

    def _full(self, key: str) -> str:
        return self._config.location.full_key(key)

    def _connected(self) -> Any:
        self.check_process()
        with self._lock:
            if self._store is None:
                if reason := _lost_threads():
                    raise StorageError(f"obstore cannot be used: {reason}", hint='Open it with engine="fsspec"')
                _threads.add(os.getpid())
                self._provider, self._store = _connect(self._config, self._files)
            return self._store

    @contextmanager
    def _seam(self, what: str, key: str) -> Iterator[None]:
        """Translate foreign errors to those of ckptstore in a context."""
        with foreign.seam(lambda error: self._translated(error, what=f"{what} {self.uri}", key=key)):
            yield
        self._renewal.succeeded()

    def _translated(self, error: Exception, *, what: str, key: str) -> CkptstoreError:
        import obstore.exceptions as foreign_errors

        text = str(error)
        code = (_CODE.findall(text) or [""])[0]
        status = _status_of(error)
        if code in foreign.EXPIRED_CODES and self._renewal.begin():
            with self._lock:
                self._store = None
            return StorageUnavailable(f"{what}: the credentials had expired and were looked up anew", file=key)
        refused = self._provider.error if self._provider and _ASKED in text else None
        if refused is not None:
            return type(refused)(f"{what}: {refused.message}", file=key, hint=refused.hint)
        if isinstance(error, FileNotFoundError):
            return foreign.from_status(404, code, key=key, what=what)
        if isinstance(error, foreign_errors.PreconditionError):
            return foreign.ConditionFailed(f"{what}: {code}", file=key)
        if isinstance(error, foreign_errors.PermissionDeniedError | foreign_errors.UnauthenticatedError):
            storage_class = (_CLASS.findall(text) or [""])[0]
            return foreign.from_status(status or 403, code, key=key, what=what, storage_class=storage_class)
        if isinstance(error, foreign_errors.AlreadyExistsError):
            if self._config.location.kind == "s3" and status == 409:
                # two creates met, and this one was refused; the other one may have been as well
                return foreign.from_status(409, code, key=key, what=what)
            return _Exists(f"{what}: {code}", file=key)
        if isinstance(error, foreign_errors.GenericError):
            if "source: Header" in text:  # a retry changes nothing
                return StorageError(
                    f"{what}: obstore does not understand the server", file=key, hint='Open it with engine="fsspec"'
                )
            if status:
                return foreign.from_status(status, code, key=key, what=what)
            server = foreign.server_of(self._config.config.get("endpoint") or self._config.config.get("base_url"))
            return _unanswered(text, f"{what} at {server}{self._config.route.through}", key)
        return foreign.unexpected(error, what=f"{what}: {status or ''} {code}".rstrip(": "), key=key)


_ASKED = "credential provider"
"""A part of obstore's text for an error of a provider of credentials."""
_NETWORK = (
    ("dns error", "the name of the server does not resolve"),
    ("Connection refused", "the connection was refused"),
    ("InvalidCertificate", ""),
    ("invalid peer certificate", ""),
    ("TimedOut", "it took too long"),
    ("HTTP error", "the connection broke off"),
)
"""The meanings of parts of obstore's texts, in order of precedence; "" for a certificate, which is no passing error."""


def _unanswered(text: str, what: str, key: str) -> CkptstoreError:
    words = next((words for sign, words in _NETWORK if sign in text), None)
    if words == "":
        return StorageError(f"{what}: the certificate of the server is not trusted", file=key)
    if words is None and re.search("redential|token", text):
        return AccessDenied(f"{what}: no usable credentials were found", file=key)
    return StorageUnavailable(f"{what}: {words or 'no answer'}", file=key)


class FastBucketStorage(FastStorage):
    """S3, and the base for GCS, which has rules and unfinished uploads too."""

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        """Return (key, upload id) of every unfinished upload below the prefix."""
        found: Sequence[tuple[str, str]] = self._files.unfinished(prefix)
        return found

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        """Drop one; no error if it is gone."""
        self._files.abort_unfinished(key, upload_id)

    def rules(self) -> Mapping[str, str]:
        """See `Bucket`."""
        found: Mapping[str, str] = self._files.rules()
        return found


class FastGcsStorage(FastBucketStorage):
    """GCS, with uploads and listings over the JSON API, where an upload has a checksum and a listing has versions.
    obstore uses the XML API, which has neither."""

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self._files.write(key, views)

    def create(self, key: str, data: bytes) -> bool:
        return bool(self._files.create(key, data))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        found: Iterator[StoredFile] = self._files.list(prefix)
        return found


def _files_of(config: ObstoreConfig, options: Mapping[str, Any]) -> Any:
    location = config.location
    if location.kind == "s3":
        from ckptstore.storage.cloud import aws, aws_client

        assert config.aws is not None  # as for_obstore makes it
        return aws.S3Files(location, aws_client.AwsConnection(config.aws))
    if location.kind == "gcs":
        from ckptstore.storage.cloud import gcs

        return gcs.GcsFiles(location, gcs.connect(options, os.environ))
    from ckptstore.storage.cloud import azure

    return azure.AzureFiles(location, azure.AzureConnection(location, options, os.environ))


def _connect(config: ObstoreConfig, files: Any) -> tuple[chains.Provider | None, Any]:
    """Return the provider of credentials and obstore's store, for the same place and credentials as those of
    `files`."""
    from obstore.store import AzureStore, GCSStore, S3Store

    location, options = config.location, dict(config.config)
    profile = None
    if config.aws is not None:
        profile = config.aws.profile
        options |= address_for_obstore(config.aws.located(), location)
    provider = None
    if config.chain and location.kind:
        # Only the SDK looks for credentials: obstore would call metadata services that may have been switched off.
        provider = options["credential_provider"] = chains.Provider(location.kind, files.giver, profile=profile)
    store = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}[location.kind or "s3"]
    made = store(location.container, client_options=config.client, retry_config={"max_retries": 0}, **options)
    return provider, made


def _status_of(error: BaseException | None) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None
