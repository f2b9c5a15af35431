"""The SDKs' own chains of credentials, adapted for obstore, and the translation of their errors.

obstore knows keys from the environment, web identities and the metadata services. The chains of the SDKs know more:
profiles, single sign-on, `credential_process`, workload identity federation, `az login`. They are asked again whenever
a credential is about to expire, so nothing is frozen.

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
from datetime import UTC, datetime, timedelta
from typing import Any

from ckptstore.errors import AccessDenied, CkptstoreError, StorageUnavailable
from ckptstore.storage.cloud import foreign
from ckptstore.storage.uri import Kind

_LIFE = timedelta(minutes=10)
"""The time after which the chain is asked again for a credential; the chains keep and refresh their own."""
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


Giver = Callable[[], dict[str, Any]]
"""Returns the current credentials."""


class Provider:
    """Gives obstore its credentials, and keeps the last error: obstore reports only that there was one."""

    def __init__(self, kind: Kind, make: Callable[[], Giver], *, profile: str | None = None, had: bool = False) -> None:
        """Find the source. `had` is True if credentials were found before. Raises AccessDenied if the SDK finds none,
        StorageUnavailable if it could not look."""
        self.error: CkptstoreError | None = None
        """The error of the last try, None if it succeeded."""
        self._kind, self._profile, self._had = kind, profile, had
        with foreign.seam(self._translated):
            self._give = make()

    def __call__(self) -> dict[str, Any]:
        try:
            with foreign.seam(self._translated):
                found = self._give()
        except CkptstoreError as error:
            self.error = error
            raise
        self.error, self._had = None, True
        return found

    def _translated(self, error: Exception) -> CkptstoreError:
        what = "credentials"
        if self._kind == "s3":
            refused = aws_refusal(error, what=what, key="", profile=self._profile, had=self._had)
            return refused or _refusal("s3", foreign.passing_trouble(error), what=what, key="")
        return (google_refusal if self._kind == "gcs" else azure_refusal)(error, what=what, key="")


def _refusal(kind: Kind, trouble: str | None, *, what: str, key: str) -> CkptstoreError:
    if trouble:
        return StorageUnavailable(f"{what}: the service of credentials gives none: {trouble}", file=key or None)
    return AccessDenied(f"{what}: no usable credentials were found", file=key or None, hint=_WAYS[kind])


def aws_giver(credentials: Any) -> Giver:
    """Return a giver of botocore's credentials. Raises NoCredentialsError of botocore for None."""
    import botocore.exceptions

    if credentials is None:
        raise botocore.exceptions.NoCredentialsError

    def give() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _LIFE,
        }

    return give


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


def google_giver(credentials: Any) -> Giver:
    """Return a giver of google-auth's tokens."""
    import google.auth.transport.requests

    def give() -> dict[str, Any]:
        now = datetime.now(UTC).replace(tzinfo=None)  # as google-auth keeps its times
        if not credentials.valid or (credentials.expiry and credentials.expiry - _LIFE < now):
            credentials.refresh(google.auth.transport.requests.Request())
        expiry = credentials.expiry.replace(tzinfo=UTC) if credentials.expiry else None
        return {"token": credentials.token, "expires_at": expiry}

    return give


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


def azure_giver(credential: Any) -> Giver:
    """Return a giver of azure-identity's tokens."""

    def give() -> dict[str, Any]:
        token = credential.get_token("https://storage.azure.com/.default")
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

    return give


class AzureChain:
    """The default chain of Azure. Keeps the errors of its members, of which the chain makes one text."""

    def __init__(self) -> None:
        from azure.identity import DefaultAzureCredential

        self._heard = threading.local()
        self._chain = DefaultAzureCredential()
        self._chain.credentials = tuple(_Member.of(member, self._heard) for member in self._chain.credentials)

    def get_token(self, *scopes: str, **options: Any) -> Any:
        """See `azure.core.credentials.TokenCredential`."""
        self._heard.errors = []
        try:
            with _without_warnings():
                return self._chain.get_token(*scopes, **options)
        except Exception as error:
            error.args = (*error.args, *self._heard.errors)
            raise
        finally:
            self._heard.errors = []


class _Member:
    """One credential of a chain."""

    def __init__(self, inner: Any, heard: threading.local) -> None:
        self._inner = inner
        self._heard = heard

    @staticmethod
    def of(inner: Any, heard: threading.local) -> _Member:
        """Return a member of a class with the inner one's class name, which the chain puts into its texts."""
        made: type[_Member] = type(type(inner).__name__, (_Member,), {})
        return made(inner, heard)

    def get_token(self, *scopes: str, **options: Any) -> Any:
        try:
            return self._inner.get_token(*scopes, **options)
        except Exception as error:
            self._heard.errors.append(error)
            raise


class AzureSecret:
    """A service principal with its secret."""

    def __init__(self, tenant_id: str, client_id: str, client_secret: str) -> None:
        from azure.identity import ClientSecretCredential

        # There is one layer of retries, above.
        self._inner = ClientSecretCredential(tenant_id, client_id, client_secret, retry_total=0)

    def get_token(self, *scopes: str, **options: Any) -> Any:
        """See `azure.core.credentials.TokenCredential`."""
        with _without_warnings():
            return self._inner.get_token(*scopes, **options)


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
