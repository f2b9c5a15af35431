"""Send the requests of requests' sessions, which the SDKs of Google and Azure use, by `http_client`."""

from __future__ import annotations

import http.client
from typing import Any

import requests
import requests.adapters
import requests.certs
import requests.structures

from ckptstore.storage.cloud.bodies import ViewsBody
from ckptstore.storage.cloud.routes import MAX_CONNECTIONS, Route
from ckptstore.storage.cloud.wire.http_client import HttpClient
from ckptstore.storage.cloud.wire.line import trusting


def mounted(session: requests.Session, route: Route, *, connect_seconds: float, read_seconds: float) -> None:
    """Have a session send its requests along a route; what goes to a proxy by TLS is left to requests."""
    session.trust_env = False  # the settings of the environment are in the route
    adapter: requests.adapters.BaseAdapter
    if (route.proxy_url or "http://").startswith("http://"):
        adapter = _Adapter(route, connect_seconds=connect_seconds, read_seconds=read_seconds)
    else:
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=MAX_CONNECTIONS, max_retries=0)
    for scheme in ("https://", "http://"):
        session.mount(scheme, adapter)


class _Adapter(requests.adapters.BaseAdapter):
    """Sends by `HttpClient`. The timeouts, the proxy and the certificates are those of the route, for all requests."""

    def __init__(self, route: Route, *, connect_seconds: float, read_seconds: float) -> None:
        super().__init__()
        bundle: Any = requests.certs.where() if route.verify is True else route.verify  # type: ignore[attr-defined]
        self._http_client = HttpClient(
            connect_seconds=connect_seconds,
            read_seconds=read_seconds,
            trust=lambda: trusting(bundle),
            proxy_url=route.proxy_url,
        )

    def send(self, request: requests.PreparedRequest, *_: Any, stream: bool = False, **__: Any) -> requests.Response:
        body: Any = request.body
        if not isinstance(body, ViewsBody | bytes | bytearray | str | None):
            body = body.read()
        if isinstance(body, str):
            body = body.encode()
        views = body.views if isinstance(body, ViewsBody) else [memoryview(body or b"")]
        try:
            answer = self._http_client.send(str(request.method), str(request.url), request.headers, views)
        except (OSError, http.client.HTTPException) as error:
            raise requests.ConnectionError(error, request=request) from error
        response = requests.Response()
        response.status_code, response.url, response.request = answer.status, str(request.url), request
        response.headers = requests.structures.CaseInsensitiveDict(answer.headers.items())
        response.raw = answer
        return response

    def close(self) -> None:
        self._http_client.close()
