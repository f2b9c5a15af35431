"""The native engine: S3 with botocore, GCS with google-auth and requests, Azure with azure-storage-blob.

The names of the options are those of s3fs, gcsfs and adlfs, none of which it needs. An option that it does not know, or
could not obey, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.runtime.extras import needs
from ckptstore.storage.base import Storage
from ckptstore.storage.cloud.aws import S3Files
from ckptstore.storage.cloud.aws_settings import AwsSettings
from ckptstore.storage.cloud.azure import VARIABLES, AzureFiles
from ckptstore.storage.cloud.gcs import GcsFiles
from ckptstore.storage.uri import Kind, Location, parse_uri

INSIDE_FSSPEC = frozenset(
    [
        "asynchronous",
        "batch_size",
        "block_size",
        "cache_options",
        "cache_regions",
        "cache_timeout",
        "check_connection",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "default_location",
        "dircache",
        "fixed_upload_size",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    ]
)
"""Options that concern only the inside of fsspec, not the place of the bytes or the access to them."""
_KNOWN: Mapping[Kind, frozenset[str]] = {
    "s3": frozenset(["anon", "endpoint_url", "key", "password", "profile", "secret", "token", "use_ssl", "username"])
    | {"client_kwargs", "config_kwargs", "requester_pays", "s3_additional_kwargs"},
    "gcs": frozenset(["access", "consistency", "endpoint_url", "project", "timeout", "token"]),
    "azure": frozenset([*VARIABLES, "account_host", "anon", "assume_container_exists", "blocksize", "location_mode"])
    | {"connection_timeout", "credential", "read_timeout", "socket_timeout"},
}
_ONLY_OFF: Mapping[Kind, frozenset[str]] = {
    "s3": frozenset({"session", "version_aware"}),
    "gcs": frozenset({"requester_pays", "requests_timeout", "secure_serialize", "session_kwargs", "version_aware"}),
    "azure": frozenset({"request_session", "version_aware"}),
}
"""Options of those packages that are not obeyed here: a program may give them to say that it does not want them."""


def open_native(uri: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage at an s3, gs or az URI. It connects on its first use.

    Raises InvalidInput for options that it does not know, and for an SDK that is not installed.
    """
    options = dict(storage_options or {})
    location = parse_uri(uri)
    kind: Kind = location.kind or "s3"
    needs(kind, what=repr(location.uri))
    _check_names(location, kind, options)
    opened_as = (open_native, (uri, options))
    if kind == "s3":
        return S3Files(location, AwsSettings(location, options), opened_as)
    if kind == "gcs":
        return GcsFiles(location, options, opened_as)
    if inspect.iscoroutinefunction(getattr(options.get("credential"), "get_token", None)):
        raise InvalidInput("The credential is asynchronous", hint="Take it from azure.identity, not its aio")
    return AzureFiles(location, options, opened_as)


def _check_names(location: Location, kind: Kind, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        is_off = name in _ONLY_OFF[kind] and not value
        if not is_off and name not in _KNOWN[kind] | INSIDE_FSSPEC:
            package = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}[kind]
            hint = f'Compare it with the page of this cloud; engine="fsspec" gives all options to {package}'
            raise InvalidInput(f"storage_options[{name!r}] cannot be used with {location.scheme}://", hint=hint)
