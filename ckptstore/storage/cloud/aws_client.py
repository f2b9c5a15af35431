"""The client of S3: botocore, SDK of s3fs, with the environment and the options of s3fs.

Beside `chains` the only importer of botocore. Requests run on the calling thread, not on s3fs' one event loop. botocore
makes and signs all of them, and understands the answers. It also sends those that go through TLS or a proxy; plain HTTP
goes through `plain_http`.
"""

from __future__ import annotations

import functools
import http.client
from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, StorageUnavailable
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.cloud.bodies import ViewsBody
from ckptstore.storage.cloud.client_options import CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS, Environment
from ckptstore.storage.cloud.lazy_client import MAX_CONNECTIONS, LazyClient
from ckptstore.storage.cloud.plain_http import PlainHttp
from ckptstore.storage.uri import Location


class AwsConnection(LazyClient):
    """A botocore client made from the options of s3fs."""

    def __init__(self, location: Location, options: Mapping[str, Any], environ: Environment) -> None:
        super().__init__()
        self.bucket = location.container
        self._plain: PlainHttp | None = None
        self._options = {name: value for name, value in options.items() if value is not None}
        config = self._options.get("config_kwargs") or {}
        when = config.get("request_checksum_calculation") or environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "")
        self.sends_checksum = str(when).lower() != "when_required"
        self.put_options: dict[str, Any] = dict(self._options.get("s3_additional_kwargs") or {})
        self.every: dict[str, Any] = {"Bucket": self.bucket}
        if self._options.get("requester_pays"):
            self.every["RequestPayer"] = "requester"

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
            "max_pool_connections": MAX_CONNECTIONS,
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
        if self._plain is None:
            self._plain = _plain_http(client.meta)
        if self._plain is not None:
            client.meta.events.register_first("before-send.s3", functools.partial(_sent, self._plain))
        return client

    def close(self) -> None:
        super().close()
        with self._lock:
            plain, self._plain = self._plain, None
        if plain is not None:
            plain.close()

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


def _plain_http(meta: Any) -> PlainHttp | None:
    """What sends the requests of a client; None where they go through TLS or a proxy, which botocore knows."""
    from botocore.utils import get_environ_proxies

    config = meta.config
    proxies = get_environ_proxies(meta.endpoint_url) if config.proxies is None else config.proxies
    if not meta.endpoint_url.startswith("http://") or proxies.get("http"):
        return None
    return PlainHttp(
        connect_seconds=config.connect_timeout, read_seconds=config.read_timeout, keepalive=bool(config.tcp_keepalive)
    )


def _sent(plain: PlainHttp, request: Any, **_: Any) -> Any:
    """The answer to a request that botocore is about to send; None for one that it shall send itself, such as one that
    was redirected to TLS."""
    from botocore.awsrequest import AWSResponse

    views = _views_of(request.body)
    if views is None or not request.url.startswith("http://"):
        return None
    answer = plain.send(request.method, request.url, request.headers, views)
    response = AWSResponse(request.url, answer.status, answer.headers, answer)
    if not request.stream_output:
        _ = response.content  # read here, as botocore's own session does, so that what breaks off is its error
    return response


def _views_of(body: Any) -> Sequence[memoryview] | None:
    if body is None:
        return ()
    if isinstance(body, ViewsBody):
        return body.views
    return (memoryview(body),) if isinstance(body, bytes | bytearray) else None


@functools.cache
def _loader() -> Any:
    """What reads the descriptions of services: 0.2 s the first time, nothing for every later client."""
    from botocore.loaders import create_loader

    return create_loader()
