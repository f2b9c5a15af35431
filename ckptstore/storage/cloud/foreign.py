"""Translate foreign errors by type and status, for all object stores, so that all engines agree. Pure.

    404                        FileMissing
    NoSuchUpload, ...          UploadGone: the file can be written from the beginning
    412                        ConditionFailed, which the callers of conditional requests expect
    InvalidObjectState, ...    StorageArchived
    401, 403                   AccessDenied
    416                        CheckpointDamaged (the file ends before the range begins)
    507, QuotaExceeded         StorageFull
    429, 503, SlowDown         StorageThrottled: worth another try, with fewer requests at once
    408, 409, 5xx, none        StorageUnavailable: in conflict, broken off; worth another try
    501                        Unsupported
    any other                  StorageError

A network failure (refused, reset, a name that does not resolve, a handshake that breaks off) is passing.

Only the status, the store's own code and a cause in ckptstore's words go into a message, and only types into the chain
of causes: the text of an SDK may hold a URL with a signature, a token, or an option that somebody filled with a key.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    StorageArchived,
    StorageError,
    StorageFull,
    StorageThrottled,
    StorageUnavailable,
)
from ckptstore.storage.base import MAY_NOT_LIST, Unsupported, UploadGone
from ckptstore.storage.cloud.wire.http_client import ProxyRefused


class ConditionFailed(StorageUnavailable):
    """412: the condition of a request does not hold. Callers of conditional requests expect it; for any other request
    it is a passing error of something on the way."""


class TooLarge(StorageError):
    """413: the body of a request is larger than somebody on the way takes."""


_LARGE_BYTES = 1 << 20
_SMALLER = "CKPTSTORE_PART_BYTES makes parts, and so requests, smaller, for proxies that take no large ones"


def sized(what: str, size_bytes: int) -> str:
    """Return the words for a request, with the size of its body if that is large."""
    return f"{what} of {size_bytes / (1 << 20):.1f} MiB," if size_bytes >= _LARGE_BYTES else what


def hint_of_size(what: str) -> str | None:
    """Return what may help where a request broke off that `sized` says is large."""
    return _SMALLER if " MiB," in what else None


class ForeignError(Exception):
    """A stand-in in a chain of causes for an error of an SDK, with its types and its traceback, without its text."""


@contextmanager
def seam(translate: Callable[[Exception], CkptstoreError]) -> Iterator[None]:
    """Translate foreign errors in this context, and let nothing else of them out."""
    try:
        yield
        return
    except CkptstoreError:
        raise
    except Exception as error:
        ours = translate(error)
        names = [f"{type(item).__module__}.{type(item).__qualname__}" for item in chain_of(error)]
        ours.__cause__ = ForeignError(", from ".join(names)).with_traceback(error.__traceback__)
    try:
        raise ours
    finally:
        ours.__context__ = None  # else the foreign error, which Python adds when ours is raised


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, as far as they can be found: SDKs keep them in many places."""
    found = [error]
    for item in found:
        named = (getattr(item, "reason", None), getattr(item, "inner_exception", None))  # of urllib3, of Azure
        inside = [item.__cause__, item.__context__, *named, *item.args]
        keywords = getattr(item, "kwargs", None)
        inside += keywords.values() if isinstance(keywords, dict) else ()
        found += [other for other in inside if isinstance(other, BaseException) and other not in found]
    return found


_PASSING: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "the name of the server does not resolve"),
    (ConnectionRefusedError, "the connection was refused"),
    (ConnectionError, "the connection broke off"),
    (http.client.HTTPException, "the connection broke off"),
    (TimeoutError, "it took too long"),
    (ssl.SSLError, "TLS broke off"),
)
_BAD_CERTIFICATES = {
    9: "is not valid yet",
    10: "has expired",
    62: "is for another name",
    64: "is for another address",
}
"""The codes of OpenSSL for certificates of a trusted authority that are refused nevertheless."""


_BAD_URLS = frozenset({"InvalidSchema", "InvalidURL", "LocationParseError", "MissingSchema"})
"""The names of errors for wrong URLs in http.client, urllib3 and requests."""


def passing_trouble(error: BaseException) -> str | None:
    """Return the fault of the network in a few words; None if no error in the chain is one of the network."""
    chain = chain_of(error)
    if any(isinstance(item, ssl.SSLCertVerificationError) for item in chain):
        return None
    return next((words for kind, words in _PASSING for item in chain if isinstance(item, kind)), None)


def server_of(url: object) -> str:
    """Return the host and the port of a URL, for messages: without user, path or query, which may hold secrets."""
    try:
        split = urlsplit(str(url or ""))
        return f"{split.hostname or ''}:{split.port}" if split.port else split.hostname or ""
    except ValueError:
        return ""


def broken_off(error: Exception, *, what: str, key: str, url: object = None, through: str = "") -> StorageError:
    """Return the error for a request without a response; `url` is its server, if that is known, and `through` the words
    about a proxy."""
    chain = chain_of(error)
    server = server_of(url)
    what = f"{what} at {server}{through}" if server else what
    certificate = next((item for item in chain if isinstance(item, ssl.SSLCertVerificationError)), None)
    if certificate is not None:
        return bad_certificate(_BAD_CERTIFICATES.get(certificate.verify_code, ""), what=what, key=key)
    proxy = next((item for item in chain if isinstance(item, ProxyRefused)), None)
    if proxy is not None and proxy.status < 500:
        hint = "Put a user and a password into its URL" if proxy.status == 407 else "Ask whoever runs it"
        return StorageError(f"{what}: the proxy refuses with {proxy.status}", file=key, hint=hint)
    if any(type(item).__name__ in _BAD_URLS for item in chain):
        return StorageError(f"{what}: the URL of the server cannot be used", file=key, hint="Check the endpoint")
    words = passing_trouble(error)
    name = type(error).__name__
    shown = f"{words} ({name})" if words else name
    return StorageUnavailable(f"{what}: {shown}", file=key, hint=hint_of_size(what))


def bad_certificate(fault: str, *, what: str, key: str) -> StorageError:
    """Return the error for the certificate of a server; `fault` says what is wrong with it, "" if nobody trusts it."""
    hint = "Give the client the certificate of whoever signed it: AWS_CA_BUNDLE for S3, REQUESTS_CA_BUNDLE for others"
    if fault:
        hint = "Check the endpoint, and the clock of this machine" if "valid" in fault else "Check the endpoint"
    return StorageError(f"{what}: the certificate of the server {fault or 'is not trusted'}", file=key, hint=hint)


def unexpected(error: Exception, *, what: str, key: str) -> StorageError:
    """Return the error for any other error of an SDK, most often about an option that it cannot use."""
    hint = "Check storage_options, the environment and the configuration of the SDK"
    return StorageError(f"{what}: {type(error).__name__}", file=key, hint=hint)


EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
"""The codes of S3, with 400 or 403, for expired credentials: new ones may work."""
KEY_CODES = frozenset(
    {
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
"""The codes of S3 for credentials that it does not know: those that took their place may work."""
_SKEWED_CODES = frozenset({"RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"})
_SKEWED = re.compile(
    r"signature (has )?expired|signature not yet current|request has expired|date header (too|is)|reasonable timeframe",
    re.IGNORECASE,
)


def is_out_of_time(code: str, text: str) -> bool:
    """Return True if a request was refused for its date: its signature grew old on the way, or the clocks differ.
    `text` is that of the refusal, since AWS, Azure and Google have no code of its own for it everywhere."""
    return code in _SKEWED_CODES or _SKEWED.search(text) is not None


_FULL_CODES = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "EntityQuotaExceeded"})
_THROTTLED_CODES = frozenset(
    {
        "BandwidthLimitExceeded",
        "RequestLimitExceeded",
        "ServerBusy",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
        "rateLimitExceeded",
        "userRateLimitExceeded",
    }
)
"""The codes by which a store wants fewer requests, with any status: some use 400 or 500."""
_BUSY_CODES = frozenset(
    {
        "BadDigest",
        "IncompleteBody",
        "RequestTimeout",
        "XAmzContentSHA256Mismatch",
    }
)
"""The codes of 400 in some stores for a damaged or late body, after which the same request may succeed later."""
_DIGEST_CODES = frozenset({"BadDigest", "XAmzContentSHA256Mismatch"})
_OTHER_BYTES = (
    "The bytes were damaged on their way, or changed while they were saved: nothing may write to a state that is saved"
)


_GONE_CODES = frozenset({"InvalidBlockList", "InvalidPart", "NoSuchUpload"})
_ARCHIVED_CODES = frozenset({"BlobArchived", "BlobBeingRehydrated", "InvalidObjectState"})
_ARCHIVED_HINT = (
    "Restore it from there, and leave log/, store.json and the checkpoints that you want to load out of the rules that "
    "move objects to an archive class"
)


def from_status(
    status: int | None,
    code: str,
    *,
    key: str,
    what: str,
    storage_class: str = "",
    text: str = "",
    by: str = "",
    anonymous: bool = False,
) -> CkptstoreError:
    """Return the error for an HTTP status (None: no response) and the store's own code for it. `storage_class` is that
    of an object that cannot be read, `text` the store's own sentence, `by` the name of whoever answered, if they are
    known; `anonymous` is True if the request had no credentials."""
    shown = " ".join(str(part) for part in (status, code) if part) or "no answer"
    message = f"{what}: {shown}"
    if code in _GONE_CODES:
        return upload_gone(what, key)
    if status == 404:
        if code in ("NoSuchBucket", "ContainerNotFound"):
            return StorageError(f"{what}: the bucket or container does not exist", file=key)
        return FileMissing(f"{what}: it is not there", file=key)
    if code in _ARCHIVED_CODES:
        where = f"the archive class {storage_class}" if storage_class else "an archive class"
        return StorageArchived(f"{what}: it lies in {where}", file=key, hint=_ARCHIVED_HINT)
    if status == 413 or code == "EntityTooLarge":
        return TooLarge(
            f"{message}: too large for {spoken(by) or 'the server, or for a proxy'}", file=key, hint=_SMALLER
        )
    if status == 507 or code in _FULL_CODES:
        return StorageFull(message, file=key)
    if status in (429, 503) or code in _THROTTLED_CODES:  # GCS has a 403 for it
        return StorageThrottled(message, file=key)
    if status in (401, 403) or code in EXPIRED_CODES | _SKEWED_CODES:
        return AccessDenied(message, file=key, hint=_UNSIGNED if anonymous else _hint(status, code, text))
    if status == 412:
        return ConditionFailed(message, file=key)
    if status == 416:
        return CheckpointDamaged(f"{what}: the file ends before the range begins", file=key)
    if status == 501:
        return Unsupported(message, file=key)
    return _other(status, code, message, key=key, text=text)


def _other(status: int | None, code: str, message: str, *, key: str, text: str) -> CkptstoreError:
    is_temporary = status is None or status in (408, 409, 429) or status >= 500
    if is_temporary or code in _BUSY_CODES:
        return StorageUnavailable(message, file=key, hint=_OTHER_BYTES if code in _DIGEST_CODES else None)
    said = spoken(text) if code in _SPOKEN_CODES else ""
    hint = _WANTS_CHECKSUMS if re.search("content-md5|checksum", said, re.IGNORECASE) else None
    return StorageError(f'{message}: "{said}"' if said else message, file=key, hint=hint)


_WANTS_CHECKSUMS = "Leave request_checksum_calculation out, or set it to when_supported: this bucket wants checksums"
_UNSIGNED = "The requests have no credentials (anon): give some, or ask whether the bucket is public"
_SPOKEN_CODES = frozenset(
    {"InvalidArgument", "InvalidDigest", "InvalidRequest", "MissingContentMD5", "MissingSecurityHeader"}
)
"""The codes that say nothing without the sentence beside them."""
_SAID_CHARACTERS = 200


def spoken(text: str) -> str:
    """Return the sentence of a store for a message: on one line, without URLs and without whatever may be a secret."""
    words = (word for word in text.split() if "://" not in word and len(word) <= 30 and "=" not in word)
    return " ".join(words)[:_SAID_CHARACTERS]


def upload_gone(what: str, key: str) -> UploadGone:
    """Return the error for a part, or a completion, of an upload that is gone."""
    hint = "Look for what aborts unfinished uploads: a rule of the bucket, or somebody who cleans up"
    return UploadGone(f"{what}: the upload, or a part of it, is gone", file=key, hint=hint)


WRONG_CLOCK = "The clock of this machine is wrong"


def _hint(status: int | None, code: str, text: str) -> str:
    if is_out_of_time(code, text):
        return WRONG_CLOCK
    if code in EXPIRED_CODES:
        return "The credentials have expired, and new ones were not found"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed") or status == 401:
        return "Check the credentials"
    return MAY_NOT_LIST


def other_version(key: str) -> CheckpointDamaged:
    """Return the error for a read of a fixed version of a file that was replaced."""
    return CheckpointDamaged("The file is not the one that was recorded: it has another version", file=key)


def renewed(what: str, key: str) -> StorageUnavailable:
    """Return the error for expired credentials that the next try looks up again."""
    return StorageUnavailable(f"{what}: the credentials had expired and were looked up anew", file=key)


def signed_again(what: str, key: str) -> StorageUnavailable:
    """Return the error for a request that was refused for its date, and that the next try signs again."""
    return StorageUnavailable(f"{what}: the signature was too old or too new to the server, and is made anew", file=key)
