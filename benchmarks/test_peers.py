"""Nodes that read one checkpoint at once through a bucket of limited bandwidth, by themselves and as peers.

    pytest benchmarks/test_peers.py

Each node is a process. The time is that of the last one, `received_bytes` are those that the bucket sent for files.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sizes import FULL, Take, group, turns

import ckptstore
from ckptstore.testing.s3_server import Link, S3Server, s3_server
from ckptstore.tools.bench.figures.report import Sample, WorkloadOutcome

NODE = Path(__file__).parents[1] / "tests/flow/peer_node.py"
URI = "s3://test/run"
NUM_NODES = 4
NUM_FILES = 8
FILE_BYTES = (32 if FULL else 1) << 20
BYTES_PER_SECOND = 50e6 if FULL else 20e6
LATENCY_SECONDS = 0.01


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with one checkpoint, behind a slow line."""
    source = tmp_path_factory.mktemp("source")
    for number in range(NUM_FILES):
        (source / f"{number}.bin").write_bytes(random.Random(number).randbytes(FILE_BYTES))
    with s3_server(buckets=["test"]) as server:
        with ckptstore.open_store(URI, storage_options=server.storage_options) as store:
            store.save_directory(1, str(source))
        server.link = Link(bytes_per_second=BYTES_PER_SECOND, latency_seconds=LATENCY_SECONDS)
        yield server


def read_by_all(server: S3Server, tmp_path: Path, *, are_peers: bool) -> Sample:
    """Have all nodes read the checkpoint at once."""
    environment = os.environ | {"CKPTSTORE_DURABLE": "0"}  # all nodes have the same disk here
    with ExitStack() as stack:
        if are_peers:
            with ExitStack() as free:
                found = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(NUM_NODES)]
                peers = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in found)
            environment |= {"CKPTSTORE_PEERS": peers, "CKPTSTORE_PEERS_TOKEN": "of this benchmark alone"}
        nodes = []
        for number in range(NUM_NODES):
            command = [sys.executable, str(NODE), URI, str(tmp_path / f"{number}"), json.dumps(server.storage_options)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            nodes.append(stack.enter_context(subprocess.Popen(command, env=environment, text=True, **pipes)))  # type: ignore[call-overload]
            stack.callback(nodes[-1].kill)
        for node in nodes:
            assert node.stdout.readline() == "ready\n"
        first, began = len(server.log), time.monotonic()
        for node in nodes:
            node.stdin.write("*\n")
            node.stdin.flush()
        for node in nodes:
            assert node.stdout.readline() == "done\n"
        seconds = time.monotonic() - began
    requests = [request for request in server.log[first:] if ".bin" in request.path]
    return Sample(
        blocked_seconds=seconds,
        total_seconds=seconds,
        cpu_seconds=0.0,
        peak_bytes=None,
        requests=len(requests),
        received_bytes=sum(request.sent_bytes for request in requests),
    )


@pytest.mark.parametrize("turn", turns(3))
@pytest.mark.parametrize("way", ["ckptstore", "each node by itself"])
@group("Read by four nodes at once")
def test_read_by_four_nodes(way: str, turn: int, server: S3Server, tmp_path: Path, take: Take) -> None:
    def read() -> tuple[WorkloadOutcome, int]:
        sample = read_by_all(server, tmp_path, are_peers=way == "ckptstore")
        role = "ckptstore" if way == "ckptstore" else "peer"
        return WorkloadOutcome.of(way, [sample], role=role), NUM_FILES * FILE_BYTES  # type: ignore[arg-type]

    outcome = take(read)
    times = (outcome.samples[-1].received_bytes or 0) / (NUM_FILES * FILE_BYTES)
    assert 1.0 <= times < 1.2 if way == "ckptstore" else times >= NUM_NODES
