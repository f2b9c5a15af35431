"""Foreign errors become ours by type and status, here for all object stores, so that both engines agree. Pure.

    404                        FileMissing
    412                        ConditionFailed, which the callers of conditional requests expect
    401, 403                   AccessDenied
    416                        CheckpointDamaged (the file ends before the range begins)
    507, QuotaExceeded         StorageFull
    429, 503, SlowDown         StorageThrottled: worth another try, with fewer requests at once
    408, 409, 5xx, none        StorageUnavailable: in conflict, broken off; worth another try
    any other                  StorageError

Only the status and the store's own code go into a message: a URL may carry a signature or a token.
"""

from __future__ import annotations

from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    StorageError,
    StorageFull,
    StorageThrottled,
    StorageUnavailable,
)


class ConditionFailed(Exception):
    """412: the file is not as a conditional request wants it. Its callers expect it; it never leaves this package."""


EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
"""What S3 answers, with 400 or 403, when credentials have run out: new ones may work."""

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
"""How a store asks for fewer requests, whatever the status: some say it with a 400 or a 500."""
_BUSY_CODES = frozenset(
    {
        "BadDigest",
        "IncompleteBody",
        "RequestTimeout",
        "XAmzContentSHA256Mismatch",
    }
)
"""Answered with a 400 by some stores, though the same request may go through later: the body was damaged or late."""
_DIGEST_CODES = frozenset({"BadDigest", "XAmzContentSHA256Mismatch"})
_OTHER_BYTES = (
    "The bytes were damaged on their way, or changed while they were saved: nothing may write to a state that is saved"
)


def from_status(status: int | None, code: str, *, key: str, what: str) -> CkptstoreError | ConditionFailed:
    """The error for an HTTP status (None: there was no answer) and the store's own code for it."""
    shown = " ".join(str(part) for part in (status, code) if part) or "no answer"
    message = f"{what}: {shown}"
    if status == 404:
        if code in ("NoSuchBucket", "ContainerNotFound"):
            return StorageError(f"{what}: the bucket or container does not exist", file=key)
        return FileMissing(f"{what}: it is not there", file=key)
    if status == 507 or code in _FULL_CODES:
        return StorageFull(message, file=key)
    if status in (429, 503) or code in _THROTTLED_CODES:  # GCS has a 403 for it
        return StorageThrottled(message, file=key)
    if status in (401, 403) or code in EXPIRED_CODES:
        return AccessDenied(message, file=key, hint=_hint(status, code))
    if status == 412:
        return ConditionFailed(message)
    if status == 416:
        return CheckpointDamaged(f"{what}: the file ends before the range begins", file=key)
    is_temporary = status is None or status in (408, 409, 429) or (status >= 500 and status != 501)
    if is_temporary or code in _BUSY_CODES:
        return StorageUnavailable(message, file=key, hint=_OTHER_BYTES if code in _DIGEST_CODES else None)
    return StorageError(message, file=key)


def _hint(status: int | None, code: str) -> str:
    if code in ("RequestTimeTooSkewed",):
        return "The clock of this machine is wrong"
    if code in EXPIRED_CODES:
        return "The credentials have expired, and new ones were not found"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed") or status == 401:
        return "Check the credentials"
    return "Check the permissions; without the one to list the bucket, S3 also answers 403 for a file that is not there"


def other_version(key: str) -> CheckpointDamaged:
    """The error of a pinned read of a file that was replaced."""
    return CheckpointDamaged("The file is not the one that was recorded: it has another version", file=key)


class Renewal:
    """Expired credentials are looked up anew once; then they have to work before it is done again."""

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> bool:
        """Whether to look them up anew now."""
        begun, self._begun = self._begun, True
        return not begun

    def succeeded(self) -> None:
        """A request went through."""
        self._begun = False
