"""The route to a server: its proxy, and the trusted certificates. Resolved once, for all clients.

The libraries below read the same variables with different rules: whether `ALL_PROXY` counts, whether `NO_PROXY` may
hold networks or "*", whether `SSL_CERT_FILE` counts, and which certificates they trust by default. So none of them is
allowed to look for itself.

The proxy is that of `http_proxy` or `https_proxy`, by the scheme of the server, else that of `all_proxy`; small letters
go before capital ones. `no_proxy` holds hosts, domains, addresses and networks, each with a port or without, or "*".
The trusted certificates are those of the client's own variables, of `SSL_CERT_FILE`, or else of this machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInput
from ckptstore.storage.cloud.foreign import server_of

READ_TIMEOUT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 10.0
MAX_CONNECTIONS = 64

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""The files in which systems keep the certificates that they trust."""


@dataclass(frozen=True, slots=True)
class Route:
    """The route to one server."""

    proxy_url: str | None = field(default=None, repr=False)
    """The proxy with its user and password; None if there is none."""
    proxy_from: str = ""
    """The variable that names the proxy."""
    verify: bool | str = True
    """A file of trusted certificates, True for those that the client brings along, False to trust all."""
    verify_from: str = ""
    """The option or variable that names the certificates; "" for those of this machine, which every client trusts."""

    @property
    def proxy(self) -> str:
        """The host and port of the proxy, and the variable that names it, for messages; "" without one."""
        return f"{server_of(self.proxy_url)} ({self.proxy_from})" if self.proxy_url else ""

    @property
    def through(self) -> str:
        """The words about the proxy for a message, "" without one."""
        return self.proxy and f" through the proxy {self.proxy}"

    def told(self, url: str) -> dict[str, str]:
        """Return the route to a URL, in words."""
        found = {"proxy": self.proxy or "none"}
        if urlsplit(url).scheme == "https":
            if self.verify is False:
                found["trusted certificates"] = f"all ({self.verify_from})"
            else:
                own = "those of this machine" if self.verify is not True else "those of the client"
                found["trusted certificates"] = f"those of {self.verify_from}" if self.verify_from else own
        return found

    def proxies(self, url: str) -> dict[str, str]:
        """Return the proxy in the form for urllib3, requests and botocore."""
        return {urlsplit(url).scheme: self.proxy_url} if self.proxy_url else {}


def check_endpoint(endpoint: str | None) -> None:
    """Raise InvalidInput, without the value, for an endpoint that is no URL of a server."""
    if not endpoint:
        return
    try:
        split = urlsplit(endpoint)
        is_good = split.scheme in ("http", "https") and split.hostname and (split.port is None or split.port > 0)
    except ValueError:
        is_good = False
    if not is_good or re.search(r"[\s<>{}|^`\\\"]", endpoint):
        raise InvalidInput("The URL of the endpoint cannot be used", hint="Write http://host:port or https://host")


DIRECT = Route()
"""The route without a proxy."""


def route_to(url: str, bundles: Sequence[tuple[str, str | None]], *, verify: bool | str | None = None) -> Route:
    """Return the route to the server of a URL.

    `bundles` are the settings for certificates of its SDK, each with the file that it names, in order of precedence;
    `verify` is the option for them. A server that is reached without TLS needs none. Raises InvalidInput for a proxy
    of a kind that no client supports.
    """
    proxy_url, proxy_from = _proxy_of(url)
    if urlsplit(url).scheme != "https":
        return Route(proxy_url, proxy_from)
    if verify is not None and verify is not True:
        return Route(proxy_url, proxy_from, verify, "verify")
    system = next((path for path in _BUNDLES if os.path.isfile(path)), None)  # what this machine trusts
    for name, path in (*bundles, ("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE"))):
        if path:
            return Route(proxy_url, proxy_from, path, "" if _is_same_file(path, system) else name)
    return Route(proxy_url, proxy_from, system or True)


def variables(*names: str) -> list[tuple[str, str | None]]:
    """Return variables with their values, as `route_to` takes them."""
    return [(name, os.environ.get(name)) for name in names]


def requests_route(url: str) -> Route:
    """Return the route to GCS or Azure, whose SDKs use requests. Raises InvalidInput as `route_to` does."""
    return route_to(url, variables("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))


def _is_same_file(path: str, other: str | None) -> bool:
    """Return True if two paths lead to one existing file or directory."""
    with suppress(OSError):
        return other is not None and os.path.samefile(path, other)
    return False


def _proxy_of(url: str) -> tuple[str | None, str]:
    """Return the proxy for a URL and the variable that names it; (None, "") without one. Raises InvalidInput."""
    split = urlsplit(url)
    value, name = _named(f"{split.scheme}_proxy")
    if not name:
        value, name = _named("all_proxy")
    if not value or _is_excluded(split.hostname or "", split.port or {"https": 443}.get(split.scheme, 80)):
        return None, ""
    proxy_url = value if "://" in value else f"http://{value}"
    with suppress(ValueError):
        proxy = urlsplit(proxy_url)
        if proxy.scheme in ("http", "https") and proxy.hostname and (proxy.port is None or proxy.port):
            return proxy_url, name
    raise InvalidInput(
        f"{name} names a proxy that cannot be used: only http:// and https:// ones can",
        hint=f"Give another one, or name {split.hostname} in NO_PROXY",
    )


def _named(name: str) -> tuple[str, str]:
    """Return the value of a variable in small letters or capital ones, and its spelling; ("", "") if it is not set."""
    if name in os.environ:
        return os.environ[name].strip(), name
    capital = name.upper()
    is_untrusted = capital == "HTTP_PROXY" and "REQUEST_METHOD" in os.environ  # in CGI it is a header of the request
    return ("", "") if is_untrusted or capital not in os.environ else (os.environ[capital].strip(), capital)


def _is_excluded(host: str, port: int) -> bool:
    host = host.lower().rstrip(".")
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    with suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
    for entry, entry_port in _excluded():
        if entry_port is not None and entry_port != port:
            continue
        if entry == "*":
            return True
        if address is not None:
            with suppress(ValueError):
                if address in ipaddress.ip_network(entry, strict=False):
                    return True
        elif host == entry.lstrip(".") or host.endswith(f".{entry.lstrip('.')}"):
            return True
    return False


def _excluded() -> Iterator[tuple[str, int | None]]:
    value, _ = _named("no_proxy")
    for entry in value.lower().replace(",", " ").split():
        if match := re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+):(\d+)", entry):
            yield (match[1] or match[3]).removeprefix("*."), int(match[2] or match[4]) if match[2] or match[4] else None
        else:
            yield entry.removeprefix("*.").rstrip("."), None
