"""S3 through botocore, SDK of s3fs: the calls that the engines make on S3 by themselves. The only importer of botocore.

Requests run on the calling thread, not on s3fs' one event loop: sockets send from views and the interpreter lock is
free meanwhile. The body of an upload carries its CRC32C, which the server checks, and is not signed as well (SHA-256
would cost more than the transfer); without that checksum it is signed over plain HTTP.
"""

from __future__ import annotations

import base64
import functools
import http.client
import struct
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ckptstore.errors import CkptstoreError, StorageUnavailable
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.client_options import CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS, Environment
from ckptstore.storage.uri import Location

_MAX_CONNECTIONS = 64


class AwsConnection:
    """A botocore client made from the options of s3fs, in the process that uses it, when it is first used."""

    def __init__(self, location: Location, options: Mapping[str, Any], environ: Environment) -> None:
        self.bucket = location.container
        self._options = {name: value for name, value in options.items() if value is not None}
        self._lock = threading.Lock()
        self._client: Any = None
        self._renewal = foreign.Renewal()
        config = self._options.get("config_kwargs") or {}
        when = config.get("request_checksum_calculation") or environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "")
        self.sends_checksum = str(when).lower() != "when_required"
        self.put_options: dict[str, Any] = dict(self._options.get("s3_additional_kwargs") or {})
        self.every: dict[str, Any] = {"Bucket": self.bucket}
        if self._options.get("requester_pays"):
            self.every["RequestPayer"] = "requester"

    @property
    def client(self) -> Any:
        """The client; safe for threads."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        """Give back the connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def succeeded(self) -> None:
        """A request went through."""
        self._renewal.succeeded()

    def seam(self, what: str, key: str) -> AbstractContextManager[None]:
        """Turns foreign errors into ours."""
        return foreign.seam(lambda error: self._translated(error, what=what, key=key))

    def _connect(self) -> Any:
        import botocore
        import botocore.handlers
        import botocore.session
        from botocore.config import Config

        options = self._options
        client_options = dict(options.get("client_kwargs") or {})
        config = {
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "max_pool_connections": _MAX_CONNECTIONS,
            "request_checksum_calculation": "when_required",  # ours goes along as a value of its own
            "response_checksum_validation": "when_required",
            **(options.get("config_kwargs") or {}),
        }
        config["retries"] = {"total_max_attempts": 1}  # there is one layer of retries, above
        endpoint = options.get("endpoint_url") or client_options.pop("endpoint_url", None)
        is_plain = str(endpoint or "").startswith("http://")
        s3 = {"payload_signing_enabled": is_plain and not self.sends_checksum, **config.get("s3", {})}
        config["s3"] = s3
        credentials = {
            "aws_access_key_id": options.get("key") or options.get("username"),
            "aws_secret_access_key": options.get("secret") or options.get("password"),
            "aws_session_token": options.get("token"),
        }
        if options.get("anon"):
            config["signature_version"] = botocore.UNSIGNED
            credentials = {}
        session = botocore.session.Session(profile=options.get("profile"))
        session.register_component("data_loader", _loader())
        client = session.create_client(
            "s3",
            endpoint_url=endpoint,
            config=Config(**config),
            **{"use_ssl": options.get("use_ssl", True), **credentials, **client_options},
        )
        # "Expect: 100-continue" would cost every part one more round trip.
        client.meta.events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        return client

    def _translated(self, error: Exception, *, what: str, key: str) -> CkptstoreError | foreign.ConditionFailed:
        from botocore import exceptions

        if isinstance(error, exceptions.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(error.response.get("Error", {}).get("Code", ""))
            code = "" if code.isdigit() else code
            if code in foreign.EXPIRED_CODES and self._renewal.begin():
                self._forget()
                return StorageUnavailable(f"{what}: the credentials had expired and were looked up anew", file=key)
            return foreign.from_status(status, code, key=key, what=what)
        refused = chains.aws_refusal(error, what=what, key=key, profile=self._options.get("profile"))
        if refused is not None:
            self._forget()  # it found no credentials when it was made, and would not look again
            return refused
        broken = (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
            exceptions.FlexibleChecksumError,
            http.client.HTTPException,
            OSError,
        )
        if isinstance(error, broken) or type(error).__module__.startswith("urllib3"):
            url = self._client.meta.endpoint_url if self._client is not None else None
            return foreign.broken_off(error, what=what, key=key, url=url)
        return foreign.unexpected(error, what=what, key=key)

    def _forget(self) -> None:
        with self._lock:
            self._client = None


@functools.cache
def _loader() -> Any:
    """What reads the descriptions of services: 0.2 s the first time, nothing for every later client."""
    from botocore.loaders import create_loader

    return create_loader()


def crc32c_header(value: int) -> str:
    """A CRC32C as S3 writes it."""
    return base64.b64encode(struct.pack(">I", value)).decode()
