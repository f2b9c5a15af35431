"""The SDKs' own chains of credentials, and the translation of their errors.

A credential service that does not respond is a passing error, like a storage that does not respond. For a metadata
service in trouble the SDKs report only that they found no credentials. So this module asks it once more: one that
responds with an error or breaks off is in trouble; an unreachable one exists only if the configuration names it.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from ckptstore.errors import AccessDenied, CkptstoreError, StorageUnavailable
from ckptstore.storage.cloud import foreign
from ckptstore.storage.uri import Kind

_ASK_SECONDS = 2.0
_METADATA = "http://169.254.169.254"
_WAYS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; all ways: "
    "https://docs.aws.amazon.com/sdkref/latest/guide/access.html",
    "gcs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; all ways: "
    "https://cloud.google.com/docs/authentication/application-default-credentials",
    "azure": "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET, or run "
    "`az login`; all ways: https://learn.microsoft.com/azure/developer/python/sdk/authentication/overview",
}
"""The ways to set credentials, and the cloud's own page on them."""


def _refusal(kind: Kind, trouble: str | None, *, what: str, key: str) -> CkptstoreError:
    if trouble:
        return StorageUnavailable(f"{what}: the service of credentials gives none: {trouble}", file=key or None)
    return AccessDenied(f"{what}: no usable credentials were found", file=key or None, hint=_WAYS[kind])


def aws_refusal(
    error: Exception, *, what: str, key: str, profile: str | None, had: bool = False
) -> CkptstoreError | None:
    """Translate an error of AWS' chain; return None if it is not one of credentials. `had` is True if there were some
    before: then somebody is about to write new ones."""
    from botocore import exceptions

    half = (exceptions.ConfigParseError, exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
    if had and isinstance(error, half):
        return StorageUnavailable(f"{what}: the credentials that there were are gone, or only in part there", file=key)
    if isinstance(error, exceptions.NoCredentialsError):
        return _refusal("s3", _aws_metadata_trouble(profile), what=what, key=key)
    if isinstance(error, exceptions.MetadataRetrievalError | exceptions.CredentialRetrievalError):
        return _refusal("s3", foreign.passing_trouble(error) or type(error).__name__, what=what, key=key)
    final = (
        exceptions.PartialCredentialsError,
        exceptions.ProfileNotFound,
        exceptions.SSOError,
        exceptions.TokenRetrievalError,
    )
    return _refusal("s3", None, what=what, key=key) if isinstance(error, final) else None


def _aws_metadata_trouble(profile: str | None) -> str | None:
    import botocore.session

    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    named = botocore.session.Session(profile=profile).get_config_variable("ec2_metadata_service_endpoint")
    base = str(named or _METADATA).rstrip("/")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token, trouble = _ask(f"{base}/latest/api/token", lifetime, method="PUT", named=bool(named))
    if trouble:
        return trouble
    headers = {"X-aws-ec2-metadata-token": token} if token else {}
    role, trouble = _ask(f"{base}/latest/meta-data/iam/security-credentials/", headers, named=bool(named))
    return trouble or ("it was in trouble a moment ago" if role else None)


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET", named: bool) -> tuple[str, str | None]:
    """Return the response of a metadata service, "" for a refusal, and its trouble in words, None if it has none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        with opener.open(request, timeout=_ASK_SECONDS) as answer:
            return answer.read().decode(errors="replace"), None
    except urllib.error.HTTPError as refusal:
        with refusal:
            return "", f"it answered {refusal.code}" if _is_passing(refusal.code) else None
    except urllib.error.URLError as error:  # could not be reached
        return "", (foreign.passing_trouble(error) or "it cannot be reached") if named else None
    except (OSError, http.client.HTTPException) as error:  # was reached, and broke off
        return "", foreign.passing_trouble(error) or "the connection broke off"
    except ValueError:
        return "", None


def _is_passing(status: int | None) -> bool:
    return status is not None and (status in (408, 410, 429) or status >= 500)


def google_refusal(error: Exception, *, what: str, key: str) -> CkptstoreError:
    """Translate an error of google-auth."""
    from google.auth import exceptions

    if foreign.is_out_of_time("", str(error)):
        return AccessDenied(f"{what}: the credentials are refused for their date", file=key, hint=foreign.WRONG_CLOCK)
    trouble = None
    if isinstance(error, exceptions.DefaultCredentialsError):
        host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_ROOT")
        if host and os.environ.get("NO_GCE_CHECK") != "true":  # without the variable, google-auth trusts the hardware
            found, trouble = _ask(f"http://{host}/computeMetadata/v1/", {"Metadata-Flavor": "Google"}, named=True)
            trouble = trouble or ("it was in trouble a moment ago" if found else None)
    elif isinstance(error, exceptions.GoogleAuthError):
        # A metadata server's RefreshError has the TransportError inside, and is not marked as passing.
        inner = next((item for item in (error, error.__cause__) if isinstance(item, exceptions.TransportError)), None)
        status = getattr(inner.args[-1], "status", None) if inner and inner.args else None
        if error.retryable or (inner is not None and (status is None or _is_passing(status))):
            trouble = foreign.passing_trouble(error) or type(error).__name__
    else:
        trouble = foreign.passing_trouble(error)
    return _refusal("gcs", trouble, what=what, key=key)


class AzureTokens:
    """A credential of azure-identity without its warnings. Keeps the errors of the members of a chain, of which the
    chain makes one text."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._heard = inner, threading.local()
        for member in getattr(inner, "credentials", ()):
            member.get_token = partial(self._hear, member.get_token)

    def get_token(self, *scopes: str, **options: Any) -> Any:
        """See `azure.core.credentials.TokenCredential`."""
        self._heard.errors = []
        try:
            with _without_warnings():
                return self._inner.get_token(*scopes, **options)
        except Exception as error:
            error.args = (*error.args, *self._heard.errors)
            raise
        finally:
            self._heard.errors = []

    def _hear(self, get_token: Callable[..., Any], *scopes: str, **options: Any) -> Any:
        try:
            return get_token(*scopes, **options)
        except Exception as error:
            self._heard.errors.append(error)
            raise


_AZURE_LOGGERS = ("azure.identity", "msal")
_is_asking = ContextVar("_is_asking", default=False)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING or not _is_asking.get()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drop the warnings of azure-identity and msal on this thread while the context lasts.

    Records below warnings still reach loggers that are set to them.
    """
    # With a traceback for each try, the warnings quote the response of a credential service, which may repeat secrets
    # of the request. The raised error has the reason.
    for name, logger in [*logging.root.manager.loggerDict.items()]:  # a filter does not hold for the loggers below
        if name.startswith(_AZURE_LOGGERS) and isinstance(logger, logging.Logger):
            logger.addFilter(_is_wanted)
    token = _is_asking.set(True)
    try:
        yield
    finally:
        _is_asking.reset(token)


def azure_refusal(error: Exception, *, what: str, key: str) -> CkptstoreError:
    """Translate an error of azure-identity."""
    from azure.core import exceptions

    members = [item for item in error.args if isinstance(item, Exception)] or [error]
    if any(_timed_out(member) for member in members):
        return _refusal("azure", "it took too long", what=what, key=key)
    asked_machine = [member for member in members if "IMDS" in str(member)]
    for member in members:
        for item in foreign.chain_of(member) if member not in asked_machine else ():
            if isinstance(item, exceptions.ServiceRequestError | exceptions.ServiceResponseError):
                return _refusal("azure", foreign.passing_trouble(item) or type(item).__name__, what=what, key=key)
            if isinstance(item, exceptions.HttpResponseError) and _is_passing(item.status_code):
                return _refusal("azure", f"it answered {item.status_code}", what=what, key=key)
    return _refusal("azure", _azure_metadata_trouble() if asked_machine else None, what=what, key=key)


def _timed_out(error: Exception) -> bool:
    """Return True if an existing service did not respond in time. For one that may not exist, azure-identity raises
    CredentialUnavailableError."""
    from azure.core.exceptions import ClientAuthenticationError
    from azure.identity import CredentialUnavailableError

    is_refused = isinstance(error, ClientAuthenticationError) and not isinstance(error, CredentialUnavailableError)
    return is_refused and re.search(r"time[d]?[ -]?out", str(error), re.IGNORECASE) is not None


def _azure_metadata_trouble() -> str | None:
    named = os.environ.get("AZURE_POD_IDENTITY_AUTHORITY_HOST")
    query = "api-version=2018-02-01&resource=https%3A%2F%2Fstorage.azure.com"
    url = f"{(named or _METADATA).rstrip('/')}/metadata/identity/oauth2/token?{query}"
    found, trouble = _ask(url, {"Metadata": "true"}, named=bool(named))
    return trouble or ("it was in trouble a moment ago" if found else None)
