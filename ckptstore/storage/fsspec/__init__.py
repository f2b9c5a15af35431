"""Object stores, and everything else that has a URL, through fsspec. The only importer of fsspec.

s3fs, gcsfs and adlfs define the meaning of their options, configuration and environment. The requests then go through
the SDK below each of them, file by file: their own calls for whole files retry nothing while a body is read, leave
files with holes behind, and hold hundreds of megabytes. Any other URL is served by fsspec's calls for one file.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.storage.base import Storage
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.aws import S3Files
from ckptstore.storage.cloud.aws_settings import AwsSettings
from ckptstore.storage.cloud.azure import AzureFiles
from ckptstore.storage.cloud.gcs import GcsFiles
from ckptstore.storage.fsspec.generic import GenericStorage
from ckptstore.storage.uri import parse_uri

_S3_NAMES = (
    "anon",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "requester_pays",
    "s3_additional_kwargs",
    "secret",
    "token",
    "use_ssl",
)


def open_remote(uri: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage at any fsspec URL. It connects on its first use.

    Raises ValueError for a scheme that fsspec does not know, ImportError if its package is missing, InvalidInput
    for options that the package does not accept.
    """
    options = dict(storage_options or {})
    location = parse_uri(uri)
    opened_as = (open_remote, (uri, options))
    if location.kind is None:
        return GenericStorage(uri, options)
    if location.kind == "s3":
        system = _instance(uri, options)
        names = {name: getattr(system, name) for name in _S3_NAMES}
        names["profile"] = system.kwargs.get("profile")
        return S3Files(location, AwsSettings(location, names), opened_as)
    _class_of(uri, options)
    if location.kind == "azure":
        if inspect.iscoroutinefunction(getattr(options.get("credential"), "get_token", None)):
            raise InvalidInput("The credential is asynchronous", hint="Take it from azure.identity, not its aio")
        return AzureFiles(location, options, opened_as)
    names = dict(options)
    if isinstance(names.get("token"), str) and names["token"] not in ("anon", "cloud", "google_default"):
        # a file, a raw token, or credentials that gcsfs keeps
        with foreign.seam(lambda error: _refused(error, uri)):
            names["token"] = _instance(uri, options).credentials.credentials
    return GcsFiles(location, names, opened_as)


_FSSPEC_NAMES = frozenset(
    [
        "asynchronous",
        "batch_size",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    ]
)
"""Options of every file system. They concern fsspec's own calls, and have no effect on the requests of this package."""
_NOT_DONE = {
    "s3": {"session"},
    "gcs": {"requester_pays", "session_kwargs"},
    "azure": {"request_session", "version_aware"},
}
"""Options of a package that have no effect on the requests of this package: better refused than ignored."""


def _class_of(uri: str, options: Mapping[str, Any]) -> Any:
    """Return the file system class of a scheme; raise ImportError if its package is missing, InvalidInput for wrong
    options."""
    # gcsfs reads this at import: with it, it asks Google over gRPC about each bucket, and hangs where that is blocked.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    location = parse_uri(uri)
    cls = fsspec.get_filesystem_class(location.scheme)
    known = _FSSPEC_NAMES | inspect.signature(cls.__init__).parameters.keys() | {"profile"}
    refused = _NOT_DONE[location.kind or "s3"]
    for name, value in options.items():
        if name not in known or (name in refused and value):
            raise InvalidInput(f"storage_options[{name!r}] cannot be used with {location.scheme}://")
    return cls


def _instance(uri: str, options: Mapping[str, Any]) -> Any:
    """Return a file system, only for the meaning that it gives to options. It makes no request."""
    cls = _class_of(uri, options)
    with foreign.seam(lambda error: _refused(error, uri)):
        return cls(**{**options, "skip_instance_cache": True})


def _refused(error: Exception, uri: str) -> CkptstoreError:
    """Return the error for options that a package does not accept, without its own text, which may hold values."""
    what = f"storage_options of {parse_uri(uri).scheme}:// cannot be used"
    if foreign.passing_trouble(error):
        return foreign.broken_off(error, what=what, key="")
    return InvalidInput(f"{what}: {type(error).__name__}", hint="Compare them with what the package takes")
