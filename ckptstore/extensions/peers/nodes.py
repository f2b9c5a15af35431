"""Find the nodes that were named as peers, and which of them this process runs on."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ckptstore.errors import InvalidInput
from ckptstore.extensions.peers.line_client import Address

_ENTRY = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:,\[\]]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class PeerNode:
    """One node that serves blocks."""

    name: str
    """The same on all nodes, which choose the owner of a block by it."""
    addresses: tuple[Address, ...]
    """Empty where the name leads nowhere at the moment."""

    @property
    def own_addresses(self) -> list[Address]:
        """The addresses to listen at, if they are those of this machine."""
        return [_reachable(self.name, host, port) for host, port in self.addresses if _is_own(host)]


def parse_peers(text: str) -> tuple[Address, ...]:
    """Return the hosts and ports of a list with commas. Raises InvalidInput, also for one that names a node twice."""
    found: list[Address] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or not 0 < int(match[3]) < 65536:
            raise InvalidInput(
                f"peers has {entry.strip()!r}, which is no host and port",
                hint="Write host:port,host:port, [fd00::1]:port for IPv6, or a DNS name of all nodes: name:port",
            )
        found.append((match[1] or match[2], int(match[3])))
    if len(set(found)) < len(found):
        raise InvalidInput(f"peers names a node twice: {text}")
    return tuple(found)


def find_nodes(entries: tuple[Address, ...]) -> list[PeerNode]:
    """Look the names up. Of several entries each is a node; all addresses of a single one are nodes of their own."""
    if len(entries) > 1:
        return [PeerNode(_shown(host, port), tuple(_addresses(host, port))) for host, port in entries]
    ((host, port),) = entries
    found = [*_addresses(host, port)]
    plain = [address for address in found if ":" not in address[0]]
    return [PeerNode(_shown(*address), (address,)) for address in plain or found]  # not twice for both families


def _addresses(host: str, port: int) -> Iterator[Address]:
    """List the addresses of a host, each once; none while it cannot be found."""
    with suppress(OSError, UnicodeError):
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        yield from ((address, port) for address in sorted(found, key=lambda item: (":" in item, item)))


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_own(host: str) -> bool:
    """Return True for an address of this machine: the system would also send from it."""
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0]) == host
    return False


def _reachable(name: str, host: str, port: int) -> Address:
    """Return the address to listen at: every one of this machine where its own table of hosts leads to the loopback, as
    on Debian, for the other nodes do not come from there."""
    is_name = not name.startswith(("localhost:", "127.", "[")) and name != _shown(host, port)
    return ("", port) if is_name and ipaddress.ip_address(host).is_loopback else (host, port)
