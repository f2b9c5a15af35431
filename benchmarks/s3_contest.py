"""Benchmarks against an S3 server in memory, in a process of its own: contenders in turns, seconds and processor time.

The server shares the machine, so seconds depend on both. What a client spends itself is its processor time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from told import tell
from versus import ROUNDS

from ckptstore.storage.open import open_storage

GIB = 1 << 30
ROOT = "s3://bench/root"
LATENCY_SECONDS = 0.03


class Server:
    """Where the server is, and what it saw."""

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url
        self.storage_options: dict[str, Any] = {
            "key": "test",
            "secret": "testsecret",
            "endpoint_url": endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def ask(self, what: str, body: object = None) -> Any:
        """A request to the server's own controls."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.endpoint_url}/_control/{what}", data=data) as answer:
            return json.load(answer)

    def delay(self, seconds: float) -> None:
        """From now on every request waits so long before anything is done; 0 for no wait."""
        self.ask("faults", [{"action": "delay", "seconds": seconds, "times": None}] if seconds else [])

    def late(self, body: Callable[[], object], seconds: float = LATENCY_SECONDS) -> Callable[[], None]:
        """The same, while every request waits so long."""

        def run() -> None:
            self.delay(seconds)
            try:
                body()
            finally:
                self.delay(0)

        return run

    def clear(self, prefix: str = "") -> None:
        """Delete everything below a prefix of the root."""
        with closing(open_storage(ROOT, storage_options=self.storage_options)) as storage:
            storage.delete([file.key for file in storage.list(prefix)])


@contextmanager
def serving(*, keeps_bodies: bool = True) -> Iterator[Server]:
    """A server that believes all digests: SHA-256 would cost it more for some clients than for others.

    One that keeps no bodies receives them into the same memory again and again. Memory that is new to it can cost it
    several times what the transfer costs, now more and now less.
    """
    module = "ckptstore.testing.s3_server"
    command = [sys.executable, "-m", module, "--port", "0", "--bucket", "bench", "--no-verify"]
    command += [] if keeps_bodies else ["--no-bodies"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(process.stdout.readline().strip())
        finally:
            process.terminate()


def contest(
    benchmark: Any,
    bodies: Mapping[str, Callable[[], object]],
    *,
    size_bytes: int,
    prepare: Callable[[], object] = lambda: None,
    **facts: Any,
) -> None:
    """Run all bodies in turns, round by round; the first one is ckptstore's. `prepare` runs untimed before each."""
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    processor: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(ROUNDS + (ROUNDS > 1)):
        for name, body in bodies.items():
            prepare()
            started, used = time.perf_counter(), time.process_time()
            body()
            if number or ROUNDS == 1:
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - used)
    cost = {name: round(statistics.median(used) / size_bytes * GIB, 2) for name, used in processor.items()}
    tell(benchmark, seconds, size_bytes=size_bytes, client_processor_seconds_per_gib=cost, **facts)
