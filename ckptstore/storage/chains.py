"""The SDKs' own chains of credentials, as obstore takes them, where the SDK is installed.

obstore knows keys from the environment, web identities and the metadata services. The chains of the SDKs know more:
profiles, single sign-on, `credential_process`, workload identity federation, `az login`. They are asked again whenever
a credential is about to expire, so nothing is frozen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from ckptstore.storage.uri import Kind

Provider = Callable[[], dict[str, Any]]

_LIFE = timedelta(minutes=10)
"""How long a credential is used before the chain is asked again; the chains keep and refresh their own."""


def installed(kind: Kind) -> bool:
    """Whether the SDK of that cloud is there to find credentials."""
    module = {"s3": "botocore", "gcs": "google.auth", "azure": "azure.identity"}[kind]
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def provider(kind: Kind, *, profile: str | None = None) -> Provider | None:
    """What gives obstore its credentials; None when the SDK finds none."""
    if kind == "s3":
        return _aws(profile)
    return _google() if kind == "gcs" else _azure()


def aws_region(profile: str | None) -> str | None:
    """The region of the AWS configuration, None where there is none."""
    import botocore.session

    region = botocore.session.Session(profile=profile).get_config_variable("region")
    return str(region) if region else None


def _aws(profile: str | None) -> Provider | None:
    import botocore.session

    credentials = botocore.session.Session(profile=profile).get_credentials()
    if credentials is None:
        return None

    def give() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _LIFE,
        }

    return give


def _google() -> Provider | None:
    import google.auth
    import google.auth.exceptions
    import google.auth.transport.requests

    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except google.auth.exceptions.DefaultCredentialsError:
        return None

    def give() -> dict[str, Any]:
        if not credentials.valid or (credentials.expiry and credentials.expiry - _LIFE < _naive_now()):
            credentials.refresh(google.auth.transport.requests.Request())  # type: ignore[no-untyped-call]
        expiry = credentials.expiry.replace(tzinfo=UTC) if credentials.expiry else None
        return {"token": credentials.token, "expires_at": expiry}

    return give


def _naive_now() -> datetime:
    """google-auth keeps its times in UTC without saying so."""
    return datetime.now(UTC).replace(tzinfo=None)


def _azure() -> Provider:
    from azure.identity import DefaultAzureCredential

    credential = DefaultAzureCredential()

    def give() -> dict[str, Any]:
        token = credential.get_token("https://storage.azure.com/.default")
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

    return give
