"""Names of nodes that lead elsewhere later: nodes come and go while others read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.config import PeerConfig
from ckptstore.peers import peers as module
from ckptstore.peers.extents import EXTENT_BYTES
from ckptstore.peers.peers import Peers
from ckptstore.storage.memory import MemoryStorage

FILE = "checkpoints/step-0000000001-e0001-00000000/model"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the name `all`, which is looked up at once whenever there is time for it."""
    found: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in found]

    def run(function: Callable[[], None], *, name: str) -> None:
        function()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(module, "started", run)
    return found


def peers_at(port: int) -> Peers:
    config = PeerConfig(peers=f"all:{port}", peers_token="a token of sixteen characters")
    return Peers(MemoryStorage("memory://peers"), config, num_reads=1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_a_node_that_joins_in_the_middle_of_a_read(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts[:] = ["127.0.0.1", "127.0.0.2"]
    peers = peers_at(free_port())
    hosts.append("127.0.0.3")
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    stretches = [(FILE, number * EXTENT_BYTES, EXTENT_BYTES) for number in range(40)]
    assert sorted(peers.order(stretches)) == list(range(40))
    peers.close()
