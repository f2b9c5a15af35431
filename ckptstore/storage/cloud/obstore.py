"""Object stores through obstore (Rust's object_store): off the interpreter lock, one copy in, none out.

Whole files, ranges, listings and deletions go through obstore. It has no call for one part of an upload, none that
finds unfinished uploads, and fewer ways to find credentials than the SDK of each cloud: those come from the SDK, which
has to be installed as well (`aws`, `gcs`, `azure`, `chains`).

On S3 each body carries a CRC64NVME, which the server checks; it is not signed as well, as SHA-256 would cost more than
the transfer. Without that checksum a body is signed over plain HTTP. `client_options` translates those of fsspec's
options that obstore can express. obstore's own retries are off.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar, cast

from ckptstore.errors import AccessDenied, CkptstoreError, FileMissing, StorageError, StorageUnavailable
from ckptstore.runtime.extras import install_command, installed
from ckptstore.storage.base import Storage, StoredFile
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.answers import check_answer
from ckptstore.storage.cloud.aws import S3Files
from ckptstore.storage.cloud.azure import AzureFiles
from ckptstore.storage.cloud.bodies import Filling
from ckptstore.storage.cloud.client_options import CannotExpress, ObstoreConfig, address_for_obstore, for_obstore
from ckptstore.storage.cloud.files import CloudFiles, OpenedAs
from ckptstore.storage.cloud.gcs import GcsFiles
from ckptstore.storage.uri import parse_uri

_LIST_FILES = 1000
_STREAM_BYTES = 256 << 10
"""The fewest bytes handed over at once: they stay in the cache until they are copied, and their memory is reused."""
_DIRECT_BYTES = 4 << 20
"""The size from which a read goes from the socket into its views; below it, a request of obstore costs less."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_URL = re.compile(r"https?://[^\s<]+")
_ELSEWHERE = re.compile("redirect without LOCATION|<Code>AuthorizationHeaderMalformed</Code>.*<Region>", re.DOTALL)
"""The parts of obstore's texts for a bucket in another region; botocore and s3fs follow it by themselves."""
_CLASS = re.compile(r"<StorageClass>(\w+)</StorageClass>")


Method = TypeVar("Method", bound=Callable[..., Any])


def _by_own_clock(method: Method) -> Method:
    """Leave a call to the SDK, the next class in the order of resolution, unless requests may be signed by the clock of
    this machine: obstore has no other."""

    @functools.wraps(method)
    def call(self: ObstoreFiles, *arguments: Any, **keywords: Any) -> Any:
        if self._clock.is_own:
            return method(self, *arguments, **keywords)
        return getattr(super(ObstoreFiles, self), method.__name__)(*arguments, **keywords)

    return cast(Method, call)


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
        if kind is not None and not installed(kind):
            return f"parts and credentials need the SDK of that cloud ({install_command(f'{kind},fast')})"
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
    options = dict(storage_options or {})
    opened_as = (open_fast, (uri, options))
    if config.aws is not None:
        return FastS3(config, config.aws, opened_as)
    return (FastGcs if config.location.kind == "gcs" else FastAzure)(config, options, opened_as)


class ObstoreFiles(CloudFiles):
    """Files below a prefix of a bucket or container, by obstore where it has a call, else by the SDK of the cloud."""

    def __init__(self, config: ObstoreConfig, settings: Any, opened_as: OpenedAs) -> None:
        super().__init__(config.location, settings, opened_as)
        self._config = config
        self._store_lock = threading.Lock()
        self._store: Any = None
        self._provider: chains.Provider | None = None

    @_by_own_clock
    def _put(self, key: str, views: Sequence[memoryview], *, new: bool) -> None:
        import obstore

        views = [view for view in views if len(view)]
        body = views[0] if len(views) == 1 else (views or b"")
        mode: Literal["create", "overwrite"] = "create" if new else "overwrite"
        with self._seam(foreign.sized("create" if new else "write", sum(map(len, views))), key):
            obstore.put(self._connected(), self.full(key), body, mode=mode, use_multipart=False)

    @_by_own_clock
    def read(self, key: str) -> bytes:
        import obstore

        with self._seam("read", key):
            answer = obstore.get(self._connected(), self.full(key))
            check_answer(key, encoding=answer.attributes.get("Content-Encoding"))
            data = bytes(answer.bytes())
        if len(data) != answer.meta["size"]:
            raise StorageUnavailable(f"The answer has {len(data)} bytes of {answer.meta['size']}", file=key)
        return data

    @_by_own_clock
    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        import obstore

        end = offset + filling.missing_bytes
        options: Any = {"range": (offset, end), **self._pin(version)}
        try:
            with self._seam("read", key):
                answer = obstore.get(self._connected(), self.full(key), options=options)
                check_answer(
                    key,
                    first=answer.range[0],
                    encoding=answer.attributes.get("Content-Encoding"),
                    found=self._stored(key, answer.meta).version,
                    offset=offset,
                    version=version,
                )
                if filling.missing_bytes <= _STREAM_BYTES:
                    filling.take(memoryview(answer.bytes()))
                else:
                    for chunk in answer.stream(min_chunk_size=_STREAM_BYTES):
                        filling.take(chunk)
        except StorageUnavailable as error:
            if type(error) is StorageUnavailable:  # obstore did not understand a response: is the file too short?
                with suppress(StorageError):
                    filling.end(file_bytes=self.stat(key).size_bytes, end_offset=end)
            raise
        return int(answer.meta["size"])

    def _pin(self, version: str | None) -> dict[str, str]:
        if not version:
            return {}
        if self._has_generations:
            return {"version": version}
        return {"if_match": f'"{version}"' if self._location.kind == "azure" else version}

    def _stored(self, key: str, meta: Mapping[str, Any]) -> StoredFile:
        version = meta["version"] if self._has_generations else meta["e_tag"]
        if version and self._location.kind == "azure":
            version = version.strip('"')  # a listing has it without quotes
        return StoredFile(key, meta["size"], meta["last_modified"].timestamp(), version)

    @_by_own_clock
    def stat(self, key: str) -> StoredFile:
        import obstore

        with self._seam("stat", key):
            return self._stored(key, obstore.head(self._connected(), self.full(key)))

    @_by_own_clock
    def list(self, prefix: str) -> Iterator[StoredFile]:
        import obstore

        full = self.full(prefix)
        directory, slash, _ = full.rpartition("/")  # obstore lists whole directories
        cut = len(self.full(""))
        with self._seam("list", prefix):  # one for all pages, which all come with the same credentials
            for page in obstore.list(self._connected(), prefix=f"{directory}{slash}", chunk_size=_LIST_FILES):
                for item in page:
                    if item["path"].startswith(full):
                        yield self._stored(item["path"][cut:], item)

    @_by_own_clock
    def delete(self, keys: Sequence[str]) -> None:
        import obstore

        if not keys:
            return
        try:
            with self._seam("delete", keys[0]):
                obstore.delete(self._connected(), [self.full(key) for key in dict.fromkeys(keys)])
        except FileMissing:  # not on S3: one that is missing ends the batch
            super().delete(keys)

    @_by_own_clock
    def _delete_one(self, key: str) -> None:
        import obstore

        with suppress(FileMissing), self._seam("delete", key):
            obstore.delete(self._connected(), self.full(key))

    def _renew_connections(self, **options: int) -> None:
        """Make a new store of obstore too for the next request, with the credentials of the new client."""
        with self._store_lock:
            self._store = None
        super()._renew_connections(**options)

    def _connected(self) -> Any:
        self.check_process()
        with self._store_lock:
            if self._store is None:
                if reason := _lost_threads():
                    raise StorageError(f"obstore cannot be used: {reason}", hint='Open it with engine="sdk"')
                _threads.add(os.getpid())
                self._make_store()
            return self._store

    def _make_store(self) -> None:
        """Make obstore's store, for the same place and credentials as those of the SDK."""
        from obstore.store import AzureStore, GCSStore, S3Store

        location, options, profile = self._location, dict(self._config.config), None
        if location.kind == "s3":
            profile = self._settings.profile
            options |= address_for_obstore(self._settings.located(), location)
        if self._config.chain and location.kind:
            # Only the SDK looks for credentials: obstore would call metadata services that may have been switched off.
            had = self._renewals.has_worked
            self._provider = chains.Provider(location.kind, self.giver, profile=profile, had=had)
            options["credential_provider"] = self._provider
        store = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}[location.kind or "s3"]
        client = self._config.client
        self._store = store(location.container, client_options=client, retry_config={"max_retries": 0}, **options)

    @contextmanager
    def _seam(self, what: str, key: str) -> Iterator[None]:
        """Translate foreign errors to those of ckptstore in a context."""
        what, number = f"{what} {self.uri}", self._renewals.number
        with foreign.seam(lambda error: self._translated(error, what=what, key=key, number=number)):
            yield
        self._renewals.prove(number)

    def _translated(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        import obstore.exceptions as foreign_errors

        text = _URL.sub("", str(error))  # a name in it may be any of the words below
        code = (_CODE.findall(text) or [""])[0]
        match = _STATUS.search(text)
        status = int(match[1]) if match else None
        again = self.remedy(status, code, text, what=what, key=key, number=number)
        if again is not None:
            return again
        refused = self._provider.error if self._provider and _ASKED in text else None
        if refused is not None:
            return type(refused)(f"{what}: {refused.message}", file=key, hint=refused.hint)
        if isinstance(error, FileNotFoundError):
            return foreign.from_status(404, code, key=key, what=what)
        if isinstance(error, foreign_errors.PreconditionError):
            return foreign.ConditionFailed(f"{what}: {code}", file=key)
        if isinstance(error, foreign_errors.PermissionDeniedError | foreign_errors.UnauthenticatedError):
            storage_class = (_CLASS.findall(text) or [""])[0]
            more: dict[str, Any] = {"storage_class": storage_class, "anonymous": self._config.config["skip_signature"]}
            return foreign.from_status(status or 403, code, key=key, what=what, **more)
        if isinstance(error, foreign_errors.AlreadyExistsError):
            if self._location.kind == "s3" and status == 409:
                # two creates met, and this one was refused; the other one may have been as well
                return foreign.from_status(409, code, key=key, what=what)
            return foreign.ConditionFailed(f"{what}: {code}", file=key)
        if isinstance(error, foreign_errors.GenericError):
            if "source: Header" in text:  # a retry changes nothing
                return StorageError(
                    f"{what}: obstore does not understand the server", file=key, hint='Open it with engine="sdk"'
                )
            if status:
                said = (_MESSAGE.findall(text) or [""])[0]
                return foreign.from_status(status, code, key=key, what=what, text=said)
            server = foreign.server_of(self._config.config.get("endpoint") or self._config.config.get("base_url"))
            return _unanswered(text, f"{what} at {server}{self._config.route.through}", key)
        return foreign.unexpected(error, what=f"{what}: {status or ''} {code}".rstrip(": "), key=key)


_ASKED = "credential provider"
"""A part of obstore's text for an error of a provider of credentials."""
_NETWORK = (
    ("dns error", "the name of the server does not resolve"),
    ("Connection refused", "the connection was refused"),
    ("TimedOut", "it took too long"),
    ("HTTP error", "the connection broke off"),
)
"""The meanings of parts of obstore's texts, in order of precedence."""
_CERTIFICATE = ("InvalidCertificate", "invalid peer certificate")
_BAD_CERTIFICATES = (
    ("NotValidYet", "is not valid yet"),
    ("Expired", "has expired"),
    ("NotValidForName", "is for another name"),
)


def _unanswered(text: str, what: str, key: str) -> CkptstoreError:
    if any(sign in text for sign in _CERTIFICATE):
        fault = next((words for sign, words in _BAD_CERTIFICATES if sign in text), "")
        return foreign.bad_certificate(fault, what=what, key=key)
    words = next((words for sign, words in _NETWORK if sign in text), None)
    if words is None and re.search("redential|token", text):
        return AccessDenied(f"{what}: no usable credentials were found", file=key)
    return StorageUnavailable(f"{what}: {words or 'no answer'}", file=key, hint=foreign.hint_of_size(what))


class FastS3(ObstoreFiles, S3Files):
    """S3. The SDK does large reads."""

    def _put(self, key: str, views: Sequence[memoryview], *, new: bool) -> None:
        try:
            super()._put(key, views, new=new)
        except foreign.TooLarge:  # whose error does not say who has answered
            S3Files._put(self, key, views, new=new)

    def stat(self, key: str) -> StoredFile:
        try:
            return super().stat(key)
        except StorageError as error:  # a response to HEAD gives no reason, for which the SDK asks
            if type(error) not in (AccessDenied, StorageError):
                raise
            return S3Files.stat(self, key)

    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        by = S3Files if filling.missing_bytes >= _DIRECT_BYTES else ObstoreFiles
        return by._fill(self, key, filling, offset, version)

    def _translated(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        if not _ELSEWHERE.search(str(error)):
            return super()._translated(error, what=what, key=key, number=number)
        region = self._settings.address.region
        kind = StorageUnavailable if self._renewals.renew(number, self._relocate) else StorageError
        hint = "Name its region in AWS_REGION or in client_kwargs.region_name"
        return kind(f"{what}: the bucket is not in the region {region}", file=key, hint=hint)

    def _relocate(self) -> None:
        self._settings.relocate()
        self._renew_connections()


class FastGcs(ObstoreFiles, GcsFiles):
    """GCS, with uploads and listings over the JSON API, where an upload has a checksum and a listing has versions.
    obstore uses the XML API, which has neither. The SDK does large reads."""

    _put = GcsFiles._put
    list = GcsFiles.list

    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        by = GcsFiles if filling.missing_bytes >= _DIRECT_BYTES else ObstoreFiles
        return by._fill(self, key, filling, offset, version)


class FastAzure(ObstoreFiles, AzureFiles):
    """Azure."""
