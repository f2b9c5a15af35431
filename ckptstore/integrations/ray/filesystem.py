"""Translate Ray's file system, of pyarrow or of fsspec, to a storage of ckptstore at the same place.

Bytes do not go through Ray's object: pyarrow loses its retry policy between processes and uploads file after file. Its
place, endpoint and credentials are taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput, InvalidSource
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.retry import with_retries
from ckptstore.storage.uri import parse_uri

RETRIED_S3 = "ckptstore-s3"
"""pyarrow's name for the result of `ckptstore.ray.s3_filesystem`, after "py::"."""
_LOCAL = frozenset({"file", "local"})
_BUCKET_FIRST = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
_GIVE_OPTIONS = "Give storage_options, in fsspec's names"


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """A place as arguments of `open_storage`."""

    uri: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def open(self, config: StoreConfig, *, durable: bool | None = None) -> Storage:
        """Open the storage there, with retries; nothing is created. `durable` overrides the configuration."""
        durable = config.transfer.durable if durable is None else durable
        direct_io = config.transfer.direct_io
        storage = open_storage(self.uri, storage_options=self.storage_options, durable=durable, direct_io=direct_io)
        return with_retries(storage, config.retry)


def is_on_s3(filesystem: Any) -> bool:
    """True for the S3 of pyarrow, with our retries or without."""
    return filesystem.type_name in ("s3", f"py::{RETRIED_S3}")


def local_path_of(ray_checkpoint: Any) -> str:
    """Return the local path of a checkpoint of Ray's. Raises InvalidSource if it is not on this node."""
    uri = place_of(ray_checkpoint.filesystem, ray_checkpoint.path).uri
    if parse_uri(uri).scheme:
        raise InvalidSource(
            f"The checkpoint that was reported lies at {uri}, not on this node",
            hint="Report a local directory; what is in the run's directory already can be reported to Ray with "
            "CheckpointUploadMode.NO_UPLOAD",
        )
    return uri


def place_of(filesystem: Any, path: str, *, storage_options: Mapping[str, Any] | None = None) -> StoragePlace:
    """Return the place of `path` in a file system of pyarrow.

    `storage_options` replace the file system's endpoint and credentials. Raises InvalidInput for a file system that
    cannot be reopened from its own description.
    """
    if filesystem.type_name == f"py::{RETRIED_S3}":
        return place_of(filesystem.handler.inner, path, storage_options=storage_options)
    if filesystem.type_name.startswith("py::fsspec"):
        return _place_in_fsspec(filesystem.handler.fs, path, storage_options)
    kind = type(filesystem).__name__
    if kind == "LocalFileSystem":
        return StoragePlace(path)
    if kind == "SubTreeFileSystem":
        return place_of(filesystem.base_fs, _joined(filesystem.base_path, path), storage_options=storage_options)
    if kind not in _OPTIONS_OF:
        raise InvalidInput(
            f"Ray's file system is a {kind} of pyarrow, which ckptstore cannot open by itself",
            hint="Use a shared directory, S3, GCS, Azure, or a file system of fsspec",
        )
    scheme, options_of = _OPTIONS_OF[kind]
    if storage_options is None:
        storage_options = options_of(_described(filesystem))
    return StoragePlace(f"{scheme}://{path}", storage_options or None)


def _place_in_fsspec(system: Any, path: str, storage_options: Mapping[str, Any] | None) -> StoragePlace:
    protocols = [system.protocol] if isinstance(system.protocol, str) else list(system.protocol)
    if "dir" in protocols:
        return _place_in_fsspec(system.fs, _joined(system.path, path), storage_options)
    if _LOCAL & set(protocols):
        return StoragePlace(path)
    if "memory" in protocols:
        raise InvalidInput(
            "Ray's file system lives in the memory of one process", hint="Use a shared directory or an object store"
        )
    if storage_options is None:
        storage_options = {name: value for name, value in system.storage_options.items() if value is not None}
    if protocols[0] in _BUCKET_FIRST:
        path = path.lstrip("/")
    return StoragePlace(f"{protocols[0]}://{path}", storage_options or None)


def _joined(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path.lstrip('/')}"


def _described(filesystem: Any) -> dict[str, Any]:
    """Return the arguments by which pyarrow recreates a file system in another process, without empty ones."""
    (options,) = filesystem.__reduce__()[1]
    return {name: value for name, value in options.items() if value not in (None, "", False)}


def _s3(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("role_arn"):
        raise InvalidInput("Ray's S3FileSystem assumes a role, which ckptstore cannot do", hint=_GIVE_OPTIONS)
    names = {"key": "access_key", "secret": "secret_key", "token": "session_token", "anon": "anonymous"}
    options: dict[str, Any] = {name: settings[other] for name, other in names.items() if other in settings}
    if endpoint := settings.get("endpoint_override"):
        options["endpoint_url"] = endpoint if "://" in endpoint else f"{settings.get('scheme', 'https')}://{endpoint}"
    if region := settings.get("region"):
        options["client_kwargs"] = {"region_name": region}
    return options


def _gcs(settings: Mapping[str, Any]) -> dict[str, Any]:
    if "access_token" in settings or "target_service_account" in settings:
        raise InvalidInput("Ray's GcsFileSystem has a token that ends, or acts for another account", hint=_GIVE_OPTIONS)
    options: dict[str, Any] = {"token": "anon"} if settings.get("anonymous") else {}
    if endpoint := settings.get("endpoint_override"):
        options["endpoint_url"] = endpoint if "://" in endpoint else f"{settings.get('scheme', 'https')}://{endpoint}"
    if project := settings.get("project_id"):
        options["project"] = project
    return options


def _azure(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("blob_storage_authority") not in (None, ".blob.core.windows.net"):
        raise InvalidInput("Ray's AzureFileSystem has an authority of its own", hint=_GIVE_OPTIONS)
    names = ("account_name", "account_key", "sas_token", "client_id", "client_secret", "tenant_id")
    return {name: settings[name] for name in names if name in settings}


_OPTIONS_OF = {
    "AzureFileSystem": ("abfs", _azure),
    "GcsFileSystem": ("gs", _gcs),
    "S3FileSystem": ("s3", _s3),
}
"""The scheme, and a function that returns its options under fsspec's names."""
