"""The same page, served to this machine alone and kept up to date.

Whoever knows the address may read, and nobody may do more. The address has a random token, so other users of the
machine and other pages in the browser cannot ask. The Host header is checked, so that no other name can lead here.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from waitress.server import create_server

from ckptstore.errors import InvalidInput
from ckptstore.tools.report.overview import Overview
from ckptstore.tools.report.page import page

HOST = "127.0.0.1"
FRESH_SECONDS = 2.0
"""The age up to which a document is served again, however many want it."""
LISTING_REST_SECONDS = 15.0
"""The least pause between two listings of all files. New records are read before that."""

_HEADERS = [
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "; ".join(
            [
                "default-src 'none'",
                "script-src 'unsafe-inline'",
                "style-src 'unsafe-inline'",
                "img-src data:",
                "connect-src 'self'",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        ),
    ),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
]
"""With these a page that a hostile store has got past every escape could still send nothing anywhere else."""

StartResponse = Callable[[str, list[tuple[str, str]]], object]


@dataclass(slots=True)
class Served:
    """The page and the document to serve, renewed when they are old."""

    overview: Overview
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    hosts: frozenset[str] = frozenset()
    """The values that the Host header may have."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made_at: float = -FRESH_SECONDS
    _value: dict[str, Any] = field(default_factory=dict)

    def __call__(self, request: Mapping[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Return the response to one request, as WSGI has it."""
        method, path = request["REQUEST_METHOD"], request["PATH_INFO"]
        status, kind, body, more = self._answer(method, request.get("HTTP_HOST", ""), path)
        headers = [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))), *more, *_HEADERS]
        start_response(status, headers)
        return [b"" if method == "HEAD" else body]

    def _answer(self, method: str, host: str, path: str) -> tuple[str, str, bytes, list[tuple[str, str]]]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"this can only be read\n", [("Allow", "GET, HEAD")]
        token, _, name = path.removeprefix("/").partition("/")
        is_known = hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())
        if not is_known or host not in self.hosts:
            return "403 Forbidden", "text/plain", b"forbidden\n", []
        if name == "" and path.endswith("/"):
            return "200 OK", "text/html", page(self._document()).encode("utf-8", "replace"), []
        if name == "document.json":
            return "200 OK", "application/json", json.dumps(self._document(), allow_nan=False).encode(), []
        return "404 Not Found", "text/plain", b"there is no such page\n", []

    def _document(self) -> dict[str, Any]:
        """Return the document, one caller at a time: others wait meanwhile, and get the same."""
        with self._lock:
            if time.monotonic() - self._made_at >= FRESH_SECONDS:
                value = self.overview.look().to_json()
                if value["stores"] != self._value.get("stores"):
                    self._value = value
                self._made_at = time.monotonic()
            return self._value


def serve(served: Served, port: int, *, tell: Callable[[str], None]) -> None:
    """Serve on this machine's loopback until KeyboardInterrupt, which is raised. Port 0 takes a free one.

    `tell` is called with the address when the server is ready. Raises InvalidInput when the port cannot be taken.
    """
    listening = _bound(port)
    # A thread that has only just started counts as busy: waitress would warn of a queue at the first request.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server = create_server(
        served,
        sockets=[listening],
        ident=None,
        threads=4,
        max_request_body_size=1024,
        clear_untrusted_proxy_headers=True,
    )
    try:
        taken = listening.getsockname()[1]
        names = (HOST, "localhost")
        served.hosts = frozenset([f"{name}:{taken}" for name in names] + (list(names) if taken == 80 else []))
        tell(f"http://{HOST}:{taken}/{served.token}/")
        server.run()  # it ends at KeyboardInterrupt, without raising it
    finally:
        server.close()
    raise KeyboardInterrupt


def _bound(port: int) -> socket.socket:
    """Bind a socket of our own: waitress leaves the one that it makes open where the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        hint = "Give another port, or 0"
        raise InvalidInput(f"Nothing can be served at {HOST}:{port}: {error}", hint=hint) from error
    return listening
