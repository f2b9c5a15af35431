"""Sixteen nodes that read one checkpoint: what the bucket has to send, whatever some of them do."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_peer_processes import URI, Node, free_ports, running

from ckptstore import open_store
from ckptstore.config import PeerConfig
from ckptstore.format.digest import Digest
from ckptstore.peers.channel import AUTHENTICATED_BYTES, Channel, token_keys
from ckptstore.peers.extents import EXTENT_BYTES
from ckptstore.peers.line_server import LineServer
from ckptstore.peers.peer_server import GROUP
from ckptstore.peers.peers import Peers
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import Link, S3Server, s3_server

NUM_NODES = 16
TOKEN = "a token of sixteen characters"
SIZES_BYTES = {"big.bin": 5 * EXTENT_BYTES + 77} | {f"{number:02}.bin": 60_000 * number for number in range(1, 20)}
TOTAL_BYTES = sum(SIZES_BYTES.values())

pytestmark = pytest.mark.long


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server(buckets=["test"]) as server:
        yield server


def save(server: S3Server, tmp_path: Path, step: int) -> dict[str, bytes]:
    """Save a checkpoint, and return its files."""
    files = {name: random.Random(f"{step} {name}").randbytes(size) for name, size in SIZES_BYTES.items()}
    source = tmp_path / f"source-{step}"
    source.mkdir()
    for name, data in files.items():
        (source / name).write_bytes(data)
    with open_store(URI, storage_options=server.storage_options) as store:
        store.save_directory(step, str(source))
    shutil.rmtree(source)
    return files


def sent(server: S3Server, since: int) -> float:
    """What the bucket sent of files, in times of the checkpoint."""
    sent_bytes = sum(request.sent_bytes for request in server.log[since:] if ".bin" in request.path)
    return sent_bytes / TOTAL_BYTES


def check(nodes: Sequence[Node], files: Mapping[str, bytes]) -> None:
    """All have the files of the last turn, which are removed."""
    for node in nodes:
        assert node.hear() == "done"
        directory = node.directory / str(node.num_read)
        assert all((directory / name).read_bytes() == data for name, data in files.items())
        shutil.rmtree(directory)
        node.num_read += 1


def left_out(nodes: Sequence[Node]) -> list[str]:
    """End the nodes, and return the reasons why they left others out."""
    for node in nodes:
        node.say("end")
    return [reason for node in nodes for reason in json.loads(node.hear())]


def tell(text: str, ratio: float, began: float) -> float:
    print(f"{NUM_NODES} nodes, {text}: the bucket sent {ratio:.2f} times the checkpoint, {time.time() - began:.1f} s")
    return ratio


def read_by_all(text: str, server: S3Server, nodes: Sequence[Node], files: Mapping[str, bytes]) -> float:
    """Have all nodes read the newest checkpoint at once, and return what the bucket sent for it."""
    since, began = len(server.log), time.time()
    for node in nodes:
        node.say("*")
    check(nodes, files)
    return tell(text, sent(server, since), began)


def test_sixteen_nodes_take_each_byte_from_the_bucket_about_once(server: S3Server, tmp_path: Path) -> None:
    files = save(server, tmp_path, 1)
    with running(server, tmp_path, free_ports(NUM_NODES), NUM_NODES) as nodes:
        assert 1.0 <= read_by_all("at once", server, nodes, files) < 1.1

        files = save(server, tmp_path, 2)
        nodes[3].process.send_signal(signal.SIGSTOP)
        threading.Timer(3.0, nodes[3].process.send_signal, (signal.SIGCONT,)).start()
        assert 1.0 <= read_by_all("one stands still for 3 s", server, nodes, files) < 1.1

        files, since, began = save(server, tmp_path, 3), len(server.log), time.time()
        server.link = Link(bytes_per_second=20e6)
        for node in nodes:
            node.say("*")
        while sent(server, since) < 0.4:
            time.sleep(0.01)
        dead, alive = nodes[:3], nodes[3:]
        for node in dead:
            node.process.kill()
        check(alive, files)
        server.link = Link()
        assert 1.0 <= tell("three are killed", sent(server, since), began) < 1.5, (
            "what the dead had read, and what they were reading"
        )
        assert not any("not those stored" in reason for reason in left_out(alive))


def test_sixteen_nodes_that_begin_one_after_another(server: S3Server, tmp_path: Path) -> None:
    """Each is ready for itself, and begins without a look at the others. The bucket is so slow that all have begun
    before the first one has read much: who is alone reads by itself."""
    files = save(server, tmp_path, 1)
    server.link = Link(bytes_per_second=TOTAL_BYTES / 25)
    with running(server, tmp_path, free_ports(NUM_NODES), NUM_NODES, first_line="*") as nodes:
        began = time.time()
        check(nodes, files)
        assert 1.0 <= tell("at different moments", sent(server, 0), began) < 2.0
        left_out(nodes)


class Liar(LineServer):
    """A node that knows the token, and gives other bytes than asked for."""

    serves = "lies"

    def __init__(self, port: int) -> None:
        self.num_lies = 0
        listener = socket.create_server(("127.0.0.1", port), backlog=256)
        super().__init__(listener, token_keys(TOKEN), node=GROUP, timeout_seconds=5)

    def answer(self, channel: Channel, request: Mapping[str, Any]) -> None:
        self.num_lies += 1
        data = bytes(request["size_bytes"])
        channel.send({"size_bytes": len(data), "digest": str(Digest.of(data))})
        channel.line.sendall(data)
        if len(data) <= AUTHENTICATED_BYTES:
            channel.prove([memoryview(data)])


def ports_with_an_owner_of_the_big_file(uri: str) -> list[int]:
    """Ports of which the last one owns an extent of the big file."""
    while True:
        ports = free_ports(NUM_NODES)
        config = PeerConfig(peers=",".join(f"127.0.0.1:{port}" for port in ports), peers_token=TOKEN)
        peers = Peers(open_storage("s3://test/x", storage_options={"key": "k", "secret": "s"}), config, num_reads=1)
        owners = [peers._owner(f"{uri}/big.bin", index) for index in range(5)]
        peers.close()
        if f"127.0.0.1:{ports[-1]}" in [owner.name for owner in owners if owner]:
            return ports


def test_one_that_lies_is_left_out_and_nobody_else(server: S3Server, tmp_path: Path) -> None:
    files = save(server, tmp_path, 1)
    with open_store(URI, storage_options=server.storage_options) as store:
        ports = ports_with_an_owner_of_the_big_file(store[1].uri)
    liar = Liar(ports[-1])
    with running(server, tmp_path, ports, NUM_NODES - 1) as nodes:
        ratio = read_by_all("one lies", server, nodes, files)
        assert liar.num_lies >= NUM_NODES - 1
        assert ratio < 2.5, "a second owner reads what is in the files that it spoiled, for all"
        files, num_lies = save(server, tmp_path, 2), liar.num_lies
        assert 1.0 <= read_by_all("one has lied", server, nodes, files) < 1.1
        assert liar.num_lies == num_lies
        reasons = left_out(nodes)
        assert len(reasons) == NUM_NODES - 1, "each left out one node, once"
        assert all("not those stored" in reason for reason in reasons)
    liar.close()
