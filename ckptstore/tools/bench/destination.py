"""Create a new prefix for a benchmark, remove it at the end, and check that the benchmark fits there."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ckptstore.errors import InvalidInput, StorageFull
from ckptstore.storage.disk import posix
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.figures.report import S3_SERVERS, S3_TEST, S3_TEST_TLS

_BUCKET = "bench"
_SPARE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A prefix that belongs to one run, pickled into the ranks' processes. Never shown: options may hold secrets."""

    uri: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    endpoint_url: str | None = None
    """Endpoint of the test server, which counts requests."""
    authority: str | None = None
    """The file of the certificate that its clients have to trust; None without TLS."""

    @property
    def is_local(self) -> bool:
        """True for a directory."""
        return not parse_uri(self.uri).scheme

    @property
    def is_s3(self) -> bool:
        """True for an S3 bucket."""
        return parse_uri(self.uri).kind == "s3"

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(parse_uri(self.uri).prefix)

    def remove(self, uri: str) -> None:
        """Remove everything below a part of this place."""
        if uri != self.uri and not uri.startswith(f"{self.uri}/"):
            raise ValueError(f"{uri} is not below {self.uri}")
        if self.is_local:
            shutil.rmtree(uri, ignore_errors=True)
            return
        storage = open_storage(uri, storage_options=self.storage_options)
        try:
            keys = [file.key for file in storage.list("")]
            for start in range(0, len(keys), 1000):
                storage.delete(keys[start : start + 1000])
        finally:
            storage.close()

    def counts(self) -> tuple[int, int, int]:
        """Return the number of requests so far, and the bytes sent to and received from the test server."""
        if self.endpoint_url is None:
            return 0, 0, 0
        context = ssl.create_default_context(cafile=self.authority) if self.authority else None
        with urllib.request.urlopen(f"{self.endpoint_url}/_control/log", timeout=60, context=context) as answer:
            log = json.load(answer)
        return len(log), sum(one["received_bytes"] for one in log), sum(one["sent_bytes"] for one in log)


def is_disk(to: str | None) -> bool:
    """True if a benchmark to that target writes to a disk of this machine."""
    return to is None or not (to in S3_SERVERS or parse_uri(to).scheme)


@contextmanager
def opened_place(
    to: str | None,
    storage_options: Mapping[str, Any],
    *,
    latency_seconds: float = 0.0,
    bytes_per_second: float | None = None,
) -> Iterator[Place]:
    """Create a new prefix below `to`; at the end everything below it is removed, and nothing else.

    The latency of each request and the speed of the line are those of a test server.
    """
    name = f"ckptstore-bench-{uuid.uuid4().hex[:12]}"
    if to in S3_SERVERS:
        line = ["--latency-seconds", str(latency_seconds)]
        line += [] if bytes_per_second is None else ["--bytes-per-second", str(bytes_per_second)]
        with tempfile.TemporaryDirectory(prefix="ckptstore-bench-tls-") as directory:
            authority = str(Path(directory, "authority.pem")) if to.endswith("-tls") else None
            line += [] if authority is None else ["--tls", directory]
            with _test_server(*line, keeps_bodies=to in (S3_TEST, S3_TEST_TLS)) as endpoint_url:
                options = {
                    "key": "test",
                    "secret": "testsecret",
                    "endpoint_url": endpoint_url,
                    "client_kwargs": {"region_name": "us-east-1", **({"verify": authority} if authority else {})},
                }
                uri = f"s3://{_BUCKET}/{name}"
                yield Place(uri=uri, storage_options=options, endpoint_url=endpoint_url, authority=authority)
        return
    location = parse_uri(tempfile.gettempdir() if to is None else to)
    if location.scheme == "memory":
        raise InvalidInput(
            f"{to} lives in one process, and a benchmark has several", hint="Take a directory, or s3-test"
        )
    if not location.scheme:
        above = Path(location.prefix)
        had = next(path for path in (above, *above.parents) if path.exists())
        above.mkdir(parents=True, exist_ok=True)
        place = Place(uri=str(above / name))
        place.path.mkdir()
        posix.spread_directories(str(place.path))  # no turn pays for the deletions of another one
        try:
            yield place
        finally:
            shutil.rmtree(place.path, ignore_errors=True)
            while above != had:  # parents made above go too, if they are empty
                try:
                    above.rmdir()
                except OSError:
                    break
                above = above.parent
        return
    place = Place(uri=f"{location.uri}/{name}", storage_options=dict(storage_options))
    try:
        yield place
    finally:
        place.remove(place.uri)


@contextmanager
def _test_server(*line: str, keeps_bodies: bool) -> Iterator[str]:
    """Run the S3 server in memory, in a process of its own, so that its work does not count as the client's.

    Without `keeps_bodies` it receives large bodies into the same memory again and again.
    """
    # New memory can cost a server several times the transfer, and SHA-256 even more for some clients.
    command = [sys.executable, "-m", "ckptstore.testing.s3_server", "--bucket", _BUCKET]
    command += [*line] if keeps_bodies else [*line, "--no-verify", "--no-bodies"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            endpoint_url = server.stdout.readline().strip()
            if not endpoint_url:
                raise RuntimeError("The S3 test server did not start")
            yield endpoint_url
        finally:
            server.kill()


def check_room(place: Place, *, disk_bytes: int, memory_bytes: int) -> None:
    """Raise StorageFull unless the disk, or the memory for the test server, and the memory for the states suffice."""
    if place.endpoint_url is not None:
        memory_bytes += disk_bytes
    elif place.is_local:
        free_bytes = posix.free_bytes(str(place.path))
        if disk_bytes * _SPARE > free_bytes:
            raise StorageFull(
                f"The benchmark writes up to {disk_bytes} bytes, and {free_bytes} are free at {place.path.parent}",
                hint="Give a smaller --size, fewer --peers, or another --to",
            )
    available_bytes = psutil.virtual_memory().available
    if memory_bytes * _SPARE > available_bytes:
        raise StorageFull(
            f"The benchmark takes up to {memory_bytes} bytes of memory, and {available_bytes} are available",
            hint="Give a smaller --size",
        )


def drop_caches() -> None:
    """Have the kernel forget the page cache. Raises InvalidInput without permission."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise InvalidInput(f"--drop-caches needs root: {error}") from error


def read_through(directory: Path) -> None:
    """Read all files into the page cache."""
    chunk = bytearray(4 << 20)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(chunk):
                    pass
