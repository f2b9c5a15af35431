"""Nodes as processes that read one checkpoint at once: what the bucket has to send, and what the loss of one costs."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import ckptstore
from ckptstore.testing.s3_server import Link, S3Server, s3_server

pytestmark = pytest.mark.slow

NODE = Path(__file__).parent / "peer_node.py"
URI = "s3://test/runs/the first"
SIZES_BYTES = [9 << 20, 0, *[1 << 19] * 62]
FILES = {f"part-{number}.bin": random.Random(number).randbytes(size + 1001) for number, size in enumerate(SIZES_BYTES)}
"""So many that each of a few nodes owns some, whatever their ports are."""
TOTAL_BYTES = sum(map(len, FILES.values()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    source = tmp_path_factory.mktemp("source")
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    with s3_server(buckets=["test"]) as server:
        with ckptstore.open_store(URI, storage_options=server.storage_options) as store:
            store.save_directory(1, str(source))
        yield server


class Node:
    """One process."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process, self.directory, self.num_read = process, directory, 0

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def check(self) -> None:
        """The files of the last turn are those of the store."""
        assert self.hear() == "done"
        for name, data in FILES.items():
            assert (self.directory / str(self.num_read) / name).read_bytes() == data
        self.num_read += 1


@contextmanager
def running(server: S3Server, tmp_path: Path, ports: Sequence[int], num_nodes: int) -> Iterator[list[Node]]:
    """Start nodes that have opened the store."""
    environment = os.environ | {
        "CKPTSTORE_PEERS": ",".join(f"127.0.0.1:{port}" for port in ports),
        "CKPTSTORE_PEERS_TOKEN": "a token of sixteen characters",
        "CKPTSTORE_PEERS_TIMEOUT_SECONDS": "20",
    }
    with ExitStack() as stack:
        nodes = []
        for number in range(num_nodes):
            directory = tmp_path / f"node-{number}"
            command = [sys.executable, str(NODE), URI, str(directory), json.dumps(server.storage_options)]
            process = stack.enter_context(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            nodes.append(Node(process, directory))
        for node in nodes:
            assert node.hear() == "ready"
        yield nodes


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def sent_bytes(server: S3Server, since: int) -> float:
    """What the bucket sent of files, in times of the checkpoint."""
    return sum(request.sent_bytes for request in server.log[since:] if ".bin" in request.path) / TOTAL_BYTES


def check_one_read_of_the_bucket(server: S3Server, nodes: Sequence[Node]) -> None:
    """Let all nodes read everything at once, and compare what they have and what it cost."""
    since = len(server.log)
    for node in nodes:
        node.say("*")
    for node in nodes:
        node.check()
    assert 1.0 <= sent_bytes(server, since) < 1.2


@pytest.mark.parametrize("num_nodes", [4, pytest.param(16, marks=pytest.mark.long)])
def test_nodes_take_each_byte_from_the_bucket_once(server: S3Server, tmp_path: Path, num_nodes: int) -> None:
    with running(server, tmp_path, free_ports(num_nodes), num_nodes) as nodes:
        check_one_read_of_the_bucket(server, nodes)
        since = len(server.log)
        nodes[0].say("*")
        nodes[0].check()
        assert sent_bytes(server, since) == 0, "they have it all in memory"
        for node in nodes:
            node.say("end")
        assert [node.hear() for node in nodes] == ["[]"] * num_nodes
        assert [node.process.wait(60) for node in nodes] == [0] * num_nodes


def test_two_processes_of_a_node_share_its_port(server: S3Server, tmp_path: Path) -> None:
    """Four processes and two nodes: two of the processes only ask."""
    with running(server, tmp_path, free_ports(2), 4) as nodes:
        check_one_read_of_the_bucket(server, nodes)


def test_a_node_that_is_killed_in_the_middle_costs_its_own_part(server: S3Server, tmp_path: Path) -> None:
    """The bucket is so slow that the node owes some of its part when it is killed, however busy the machine is."""
    server.link = Link(bytes_per_second=5e6)
    try:
        with running(server, tmp_path, free_ports(4), 4) as nodes:
            since = len(server.log)
            for node in nodes:
                node.say("*")
            while sent_bytes(server, since) < 0.1:
                time.sleep(0.01)
            nodes[1].process.kill()
            server.link = Link()
            for node in (nodes[0], *nodes[2:]):
                node.check()
            assert sent_bytes(server, since) < 2.2, "others own them now, and each byte is read once more at most"
            for node in (nodes[0], *nodes[2:]):
                node.say("end")
            troubles = [json.loads(node.hear()) for node in (nodes[0], *nodes[2:])]
            assert all(len(found) <= 1 for found in troubles), "it is told once"
            assert any(troubles)
    finally:
        server.link = Link()


def test_a_node_that_comes_later_takes_its_part(server: S3Server, tmp_path: Path) -> None:
    ports = free_ports(2)
    with running(server, tmp_path / "first", ports, 1) as (first,):
        first.say("*")
        first.check()
        time.sleep(1.1)  # the other one is asked again
        with running(server, tmp_path / "second", ports, 1) as (second,):
            since = len(server.log)
            for node in (first, second):
                node.say("*")
                node.check()
            assert sent_bytes(server, since) <= 1.0
            second.say("end")
            assert second.hear() == "[]"
