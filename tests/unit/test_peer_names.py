"""Names of nodes that lead elsewhere later: nodes come and go while others read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.config import PeerConfig
from ckptstore.extensions.peers import peers as module
from ckptstore.extensions.peers.peers import Peers
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer.moves import EXTENT_BYTES

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


@pytest.mark.parametrize("at_first", [["127.0.0.1"], []])
def test_a_node_that_is_alone_at_first_finds_those_that_come_later(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_first: list[str]
) -> None:
    hosts[:] = at_first
    peers = peers_at(port := free_port())
    assert [record.getMessage() for record in caplog.records] == (
        [] if at_first else [f"no node is found behind the peers all:{port}: the name is looked up again"]
    )
    hosts[:] = ["127.0.0.1", "127.0.0.2"]
    assert not peers.are_several
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    assert peers.are_several
    assert is_taken(port)
    peers.close()


def is_taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_a_look_up_that_ends_late_serves_no_closed_store(hosts: list[str]) -> None:
    hosts[:] = ["127.0.0.1", "127.0.0.2"]
    peers = peers_at(port := free_port())
    assert is_taken(port)
    peers.close()
    peers._look_up()
    assert not is_taken(port)
