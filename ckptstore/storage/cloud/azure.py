"""Azure Blob Storage through its SDK.

Beside `chains` the only importer of azure, the SDK of adlfs. Requests run on the calling thread, not on adlfs' one
event loop. Over HTTPS the transport protects a body in transit; bodies have no checksum, as the only one that the SDK
offers, MD5, costs more than the transfer. ckptstore's own digests find bytes that arrived damaged.

Blocks that were never committed are dropped by Azure after a week.
"""

from __future__ import annotations

import base64
import http.client
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

from ckptstore.errors import CkptstoreError, FileMissing, InvalidInput, StorageUnavailable
from ckptstore.format.digest import Digest
from ckptstore.storage.base import PartWriter, StoredFile
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.answers import check_head
from ckptstore.storage.cloud.bodies import Filling, ViewsBody, part_bytes, total_bytes
from ckptstore.storage.cloud.files import CloudFiles, OpenedAs
from ckptstore.storage.cloud.routes import CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS, requests_route
from ckptstore.storage.uri import Location

VARIABLES = {
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
    "tenant_id": "AZURE_STORAGE_TENANT_ID",
}
_MAX_PUT_BYTES = 5000 << 20
_MAX_GET_BYTES = 1 << 40
"""More than any blob has: the SDK reads each range in one request, of which nothing is left for it (`_checking`)."""
_COPY_POLL_SECONDS = 0.5


class AzureFiles(CloudFiles):
    """Files below a prefix of a container."""

    def __init__(self, location: Location, settings: Mapping[str, Any], opened_as: OpenedAs) -> None:
        super().__init__(location, settings, opened_as)
        self._names = azure_names(location, settings)
        self._route = requests_route(azure_url(self._names))

    def blob(self, key: str) -> Any:
        """Return the SDK's client of one blob."""
        return self.client.get_blob_client(self.full(key))

    def _put(self, key: str, views: Sequence[memoryview], *, new: bool) -> None:
        # The SDK sends a whole blob from bytes alone; parts go out as views.
        with self.seam(foreign.sized("create" if new else "write", total_bytes(views)), key):
            self.blob(key).upload_blob(b"".join(views), overwrite=not new)

    def read(self, key: str) -> bytes:
        with self.seam("read", key):
            return bytes(self.blob(key).download_blob(raw_response_hook=_checking(key)).readall())

    def _fill(self, key: str, filling: Filling, offset: int, version: str | None) -> int | None:
        from azure.core import MatchConditions

        pin: dict[str, Any] = {"offset": offset, "length": filling.missing_bytes}
        if version:
            pin |= {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}
        with self.seam("read", key):
            answer = self.blob(key).download_blob(raw_response_hook=_checking(key, version, filling), **pin)
        return int(answer.properties.size)

    def stat(self, key: str) -> StoredFile:
        with self.seam("stat", key):
            return _stored(key, self.blob(key).get_blob_properties())

    def list(self, prefix: str) -> Iterator[StoredFile]:
        cut = len(self.full(""))
        with self.seam("list", prefix):
            found = iter(self.client.list_blobs(name_starts_with=self.full(prefix), include=["metadata"]))
        while True:
            with self.seam("list", prefix):
                item = next(found, None)
            if item is None:
                return
            if not item.name.endswith("/") and not (item.metadata or {}).get("hdi_isfolder"):
                yield _stored(item.name[cut:], item)

    def _delete_one(self, key: str) -> None:
        with suppress(FileMissing), self.seam("delete", key):
            self.blob(key).delete_blob()

    def copy(self, source_key: str, key: str, *, files: AzureFiles | None = None) -> None:
        with self.seam("copy", source_key):
            target = self.blob(key)
            status = target.start_copy_from_url((files or self).blob(source_key).url)["copy_status"]
            while status == "pending":
                time.sleep(_COPY_POLL_SECONDS)
                status = target.get_blob_properties().copy.status
        if status != "success":
            raise StorageUnavailable(f"The copy ended as {status}", file=source_key)

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        return _Blocks(self, key, size_bytes)

    def _connect(self) -> Any:
        import requests
        from azure.core.pipeline.transport import RequestsTransport
        from azure.storage.blob import ContainerClient

        from ckptstore.storage.cloud.wire.adapter import mounted

        names = self._names
        logging.getLogger("azure.core.pipeline.policies.http_logging_policy").setLevel(logging.WARNING)
        session = requests.Session()
        connect_seconds = float(names.get("connection_timeout") or CONNECT_TIMEOUT_SECONDS)
        read_seconds = float(names.get("read_timeout") or READ_TIMEOUT_SECONDS)
        mounted(session, self._route, connect_seconds=connect_seconds, read_seconds=read_seconds)
        # A transport of our own ignores the options of the client.
        transport = RequestsTransport(
            session=session,
            session_owner=True,
            connection_timeout=connect_seconds,
            read_timeout=read_seconds,
            connection_verify=self._route.verify,
        )
        options = {
            "raw_request_hook": self._dated,
            "retry_total": 0,  # there is one layer of retries, above
            "max_single_put_size": _MAX_PUT_BYTES,
            "max_single_get_size": _MAX_GET_BYTES,
            "proxies": self._route.proxies(azure_url(names)),
            "transport": transport,
        }
        # not from a client of the whole account: that would own the session
        if names.get("connection_string"):
            return ContainerClient.from_connection_string(
                names["connection_string"], self._location.container, **options
            )
        return ContainerClient(names["account_url"], self._location.container, credential=self._credential(), **options)

    def _dated(self, request: Any) -> None:
        """Give a request, before it is signed, the time by the clock of the server."""
        if self._clock.ahead_seconds:
            date = formatdate(time.time() + self._clock.ahead_seconds, usegmt=True)
            request.http_request.headers["x-ms-date"] = date

    def resolved(self) -> dict[str, str]:
        names, url = self._names, azure_url(self._names)
        given = ("connection_string", "credential", "account_key", "sas_token", "client_secret")
        said = next((name for name in given if names.get(name)), "")
        return {
            "endpoint": foreign.server_of(url),
            "credentials": said or ("none: anon" if names.get("anon") else "the SDK's own chain"),
            **self._route.told(url),
        }

    def _credential(self) -> Any:
        names = self._names
        for name in ("credential", "account_key", "sas_token"):
            if names.get(name):
                return names[name]
        if names.get("anon"):
            return None
        from azure.identity import ClientSecretCredential, DefaultAzureCredential

        if names.get("client_secret"):
            secret = ClientSecretCredential(
                names["tenant_id"],
                names["client_id"],
                names["client_secret"],
                retry_total=0,  # there is one layer of retries, above
            )
            return chains.AzureTokens(secret)
        return chains.AzureTokens(DefaultAzureCredential())

    def _translated(self, error: Exception, *, what: str, key: str, number: int) -> CkptstoreError:
        from azure.core import exceptions

        if isinstance(error, exceptions.ClientAuthenticationError) and error.status_code is None:
            return chains.azure_refusal(error, what=what, key=key)
        if isinstance(error, exceptions.HttpResponseError) and error.status_code is not None:
            code = getattr(error, "error_code", None)
            code = str(getattr(code, "value", None) or code or "")
            if code == "BlobAlreadyExists":
                return foreign.ConditionFailed(f"{what}: {code}", file=key)
            date = getattr(error.response, "headers", {}).get("date")
            status, text = error.status_code, str(error)
            again = self.remedy(status, code, text, what=what, key=key, number=number, date=date)
            return again or foreign.from_status(status, code, key=key, what=what, text=text)
        of_network = (exceptions.AzureError, OSError, http.client.HTTPException)
        if isinstance(error, of_network) or type(error).__module__.startswith(("urllib3", "requests")):
            url, through = azure_url(self._names), self._route.through
            return foreign.broken_off(error, what=what, key=key, url=url, through=through)
        return foreign.unexpected(error, what=what, key=key)


class _Blocks:
    """Blocks of a blob, invisible until they are committed."""

    def __init__(self, files: AzureFiles, key: str, size_bytes: int) -> None:
        self._files = files
        self._key = key
        self._part_bytes = part_bytes(size_bytes)
        self._writer_id = uuid.uuid4().hex[:16]
        self._block_ids: dict[int, str] = {}

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        number = offset // self._part_bytes
        block_id = base64.b64encode(f"{self._writer_id}-{number:06d}".encode()).decode()
        with self._files.seam(foreign.sized("write", total_bytes(views)), self._key):
            self._files.blob(self._key).stage_block(block_id, ViewsBody(views), length=total_bytes(views))
        self._block_ids[number] = block_id

    def finish(self) -> None:
        """Commit the blocks. May be called again after an error: the same blocks are committed again."""
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id) for _, block_id in sorted(self._block_ids.items())]
        with self._files.seam("finish", self._key):
            self._files.blob(self._key).commit_block_list(blocks)

    def abort(self) -> None:
        """Do nothing: Azure drops the blocks by itself."""


def _checking(key: str, version: str | None = None, filling: Filling | None = None) -> Callable[[Any], None]:
    """Return a hook that checks the response to a download, and takes its body from the socket if views are to be
    filled: the SDK would copy it twice."""

    def check(response: Any) -> None:
        answer, asked = response.http_response, response.http_request.headers
        if answer.status_code >= 300:
            return
        match = re.match(r"bytes=(\d+)-", asked.get("x-ms-range") or asked.get("Range") or "")
        try:
            if match and answer.status_code == 200:  # the SDK wants a range if it requested one
                raise StorageUnavailable("The answer is not one to the request: it is the whole file", file=key)
            offset = int(match[1]) if match else 0
            check_head(key, answer.status_code, answer.headers, offset=offset, version=version)
            if filling is not None:
                filling.read_from(answer.internal_response.raw.readinto, filling.missing_bytes)
        except StorageUnavailable:
            answer.internal_response.close()
            raise

    return check


def _stored(key: str, properties: Any) -> StoredFile:
    etag = str(properties.etag or "").strip('"')  # a listing has it without quotes
    return StoredFile(key, int(properties.size), properties.last_modified.timestamp(), etag or None)


def azure_names(location: Location, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return adlfs' options, completed from the environment and the URI, with the URL of the account. Raises
    InvalidInput if URI and options name different accounts."""
    names: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    account = location.account.partition(".")[0]
    if account and "account_name" not in names:
        names["account_name"] = account
    for name, variable in VARIABLES.items():
        if name not in names and os.environ.get(variable):
            names[name] = os.environ[variable]
    connected = from_connection_string(names.get("connection_string") or "").get("account_name")
    for other in (names.get("account_name"), connected):
        if account and other and other != account:
            hint = "Leave one of them out; a connection string may be in the environment"
            raise InvalidInput(f"{location.uri} names the account {account}, its options name {other}", hint=hint)
    if os.environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f", ""):
        names.setdefault("anon", True)
    host = names.get("account_host") or f"{names.get('account_name', '')}.blob.core.windows.net"
    names["account_url"] = host if "://" in host else f"https://{host}"
    return names


def azure_url(names: Mapping[str, Any]) -> str:
    """Return the URL of an account, from the result of `azure_names`."""
    connected = from_connection_string(names.get("connection_string") or "")
    return str(connected.get("endpoint") or names["account_url"])


_DEVELOPMENT = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "endpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
"""The account of every emulator, as Azure documents it."""


def from_connection_string(text: str) -> dict[str, Any]:
    """Return the account, the key or SAS, and the endpoint of an Azure connection string."""
    pairs = (item.partition("=") for item in text.split(";") if item.strip())
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return dict(_DEVELOPMENT)
    config: dict[str, Any] = {}
    for name, target in (("accountname", "account_name"), ("accountkey", "account_key")):
        if name in fields:
            config[target] = fields[name]
    if "sharedaccesssignature" in fields:
        config["sas_token"] = fields["sharedaccesssignature"].removeprefix("?")
    if "blobendpoint" in fields:
        config["endpoint"] = fields["blobendpoint"].rstrip("/")
        config.setdefault("account_name", urlsplit(config["endpoint"]).netloc.partition(".")[0])
    elif "account_name" in config:
        suffix = fields.get("endpointsuffix", "core.windows.net")
        protocol = fields.get("defaultendpointsprotocol", "https")
        config["endpoint"] = f"{protocol}://{config['account_name']}.blob.{suffix}"
    return config
