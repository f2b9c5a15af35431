"""The client of S3: botocore, SDK of s3fs, as `aws_settings` makes it.

Requests run on the calling thread, not on s3fs' one event loop. botocore makes and signs all of them, and parses the
responses. It also sends those that go through TLS or a proxy; plain HTTP goes through `plain_http`.
"""

from __future__ import annotations

import functools
import http.client
from collections.abc import Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, StorageUnavailable
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.aws_settings import AwsSettings
from ckptstore.storage.cloud.bodies import ViewsBody
from ckptstore.storage.cloud.lazy_client import LazyClient
from ckptstore.storage.cloud.plain_http import PlainHttp


class AwsConnection(LazyClient):
    """A botocore client made from the settings of a bucket."""

    def __init__(self, settings: AwsSettings) -> None:
        super().__init__()
        self.settings = settings
        self.bucket = settings.bucket
        self._plain: PlainHttp | None = None
        self.sends_checksum = settings.sends_checksum
        self.put_options: dict[str, Any] = dict(settings.options.get("s3_additional_kwargs") or {})
        self.every: dict[str, Any] = {"Bucket": self.bucket}
        if settings.options.get("requester_pays"):
            self.every["RequestPayer"] = "requester"

    def renew_connections(self) -> None:
        super().renew_connections()
        with self._lock:
            plain = self._plain
        if plain is not None:
            plain.drop_idle()

    def resolved(self) -> dict[str, str]:
        return self.settings.resolved()

    def giver(self) -> chains.Giver:
        """See `LazyClient.giver`; the credentials are looked up again."""
        self.settings.forget_credentials()
        return chains.aws_giver(self.settings.credentials())

    def _connect(self) -> Any:
        client = self.settings.client()
        if self._plain is None:
            self._plain = _plain_http(client.meta)
        if self._plain is not None:
            client.meta.events.register_first("before-send.s3", functools.partial(_sent, self._plain))
        return client

    def _forget_credentials(self) -> None:
        """Look up the credentials again, for a new client."""
        self.settings.forget_credentials()
        self.renew_connections()

    def close(self) -> None:
        super().close()
        with self._lock:
            plain, self._plain = self._plain, None
        if plain is not None:
            plain.close()

    def _translated(self, error: Exception, *, what: str, key: str) -> CkptstoreError:
        from botocore import exceptions

        if isinstance(error, exceptions.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(error.response.get("Error", {}).get("Code", ""))
            code = "" if code.isdigit() else code
            if code in foreign.EXPIRED_CODES and self._renewal.begin():
                self._forget_credentials()
                return StorageUnavailable(f"{what}: the credentials had expired and were looked up anew", file=key)
            storage_class = str(error.response.get("Error", {}).get("StorageClass", ""))
            return foreign.from_status(status, code, key=key, what=what, storage_class=storage_class)
        refused = chains.aws_refusal(error, what=what, key=key, profile=self.settings.profile)
        if refused is not None:
            self._forget_credentials()  # the client found no credentials when it was made, and would not look again
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
            settings = self.settings
            return foreign.broken_off(
                error, what=what, key=key, url=settings.address.endpoint_url, through=settings.route.through
            )
        return foreign.unexpected(error, what=what, key=key)


def _plain_http(meta: Any) -> PlainHttp | None:
    """Return the sender of a client's requests; None if they go through TLS or a proxy, which botocore handles."""
    config = meta.config
    if not meta.endpoint_url.startswith("http://") or (config.proxies or {}).get("http"):
        return None
    return PlainHttp(
        connect_seconds=config.connect_timeout, read_seconds=config.read_timeout, keepalive=bool(config.tcp_keepalive)
    )


def _sent(plain: PlainHttp, request: Any, **_: Any) -> Any:
    """Return the response to a request that botocore is about to send; None if botocore must send it itself, for
    instance after a redirect to TLS."""
    from botocore.awsrequest import AWSResponse

    views = _views_of(request.body)
    if views is None or not request.url.startswith("http://"):
        return None
    answer = plain.send(request.method, request.url, request.headers, views)
    response = AWSResponse(request.url, answer.status, answer.headers, answer)
    if not request.stream_output:
        _ = response.content  # read now, as botocore's own session does, so that a break is an error of the request
    return response


def _views_of(body: Any) -> Sequence[memoryview] | None:
    if body is None:
        return ()
    if isinstance(body, ViewsBody):
        return body.views
    return (memoryview(body),) if isinstance(body, bytes | bytearray) else None
