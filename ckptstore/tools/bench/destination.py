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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from ckptstore.errors import InvalidInput, StorageFull
from ckptstore.storage.base import Bucket
from ckptstore.storage.disk import posix
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.figures.report import S3_SERVERS

_BUCKET = "bench"
_SPARE = 1.1
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


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
        """Remove everything below a part of this place, and what uploads that were cut off have left there."""
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
            if isinstance(storage, Bucket):
                for upload in storage.unfinished(""):
                    storage.abort_unfinished(*upload)
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
    if storage_options and (to in S3_SERVERS or is_disk(to)):
        raise InvalidInput("--storage-option has no effect here", hint="It is for a bucket of your own")
    if to in S3_SERVERS:
        line = ["--latency-seconds", str(latency_seconds)]
        line += [] if bytes_per_second is None else ["--bytes-per-second", str(bytes_per_second)]
        with tempfile.TemporaryDirectory(prefix="ckptstore-bench-tls-") as directory:
            authority = str(Path(directory, "authority.pem")) if to.endswith("-tls") else None
            line += [] if authority is None else ["--tls", directory]
            # New memory can cost a server several times the transfer, and SHA-256 even more for some clients.
            line += ["--no-verify", "--no-bodies"] if "sink" in to else []
            with _test_server(*line) as endpoint_url:
                client = {"region_name": "us-east-1", **({"verify": authority} if authority else {})}
                options = {"key": "test", "secret": "testsecret", "endpoint_url": endpoint_url, "client_kwargs": client}
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
        made = [*takewhile(lambda path: not os.path.lexists(path), (above, *above.parents))]
        place = Place(uri=str(above / name))
        try:
            try:
                place.path.mkdir(parents=True)
            except OSError as error:
                what = f"Creating a directory in {above}"
                raise posix.translate(error, what=what, file=place.uri, directory=str(above)) from error
            posix.spread_directories(place.uri)  # no turn pays for the deletions of another one
            yield place
        finally:
            shutil.rmtree(place.path, ignore_errors=True)
            for parent in made:  # they go too, if they are empty
                with suppress(OSError):
                    parent.rmdir()
        return
    place = Place(uri=f"{location.uri}/{name}", storage_options=dict(storage_options))
    try:
        yield place
    finally:
        place.remove(place.uri)


@contextmanager
def _test_server(*line: str) -> Iterator[str]:
    """Run the S3 server in memory, in a process of its own, so that its work does not count as the client's."""
    command = [sys.executable, "-m", "ckptstore.testing.s3_server", "--bucket", _BUCKET, *line]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if endpoint_url := server.stdout.readline().strip():
                yield endpoint_url
            else:
                raise RuntimeError("The S3 test server did not start")
        finally:
            server.kill()


def check_room(place: Place, *, disk_bytes: int, memory_bytes: int, temporary_bytes: int = 0) -> None:
    """Raise StorageFull unless the disk, or the memory for the test server, and the memory for the states suffice.

    Beside a bucket, `temporary_bytes` are written to the temporary directory.
    """
    if place.endpoint_url is not None:
        memory_bytes += disk_bytes
    directory = place.path.parent if place.is_local else Path(tempfile.gettempdir())
    needed_bytes, free_bytes = disk_bytes if place.is_local else temporary_bytes, posix.free_bytes(str(directory))
    if needed_bytes * _SPARE > free_bytes:
        raise StorageFull(
            f"The benchmark writes up to {needed_bytes} bytes, and {free_bytes} are free at {directory}",
            hint="Give a smaller --size, fewer --peers, or another --to"
            if place.is_local
            else "Give a smaller --size, or a larger disk as TMPDIR",
        )
    available_bytes = psutil.virtual_memory().available
    if memory_bytes * _SPARE > available_bytes:
        raise StorageFull(
            f"The benchmark takes up to {memory_bytes} bytes of memory, and {available_bytes} are available",
            hint="Give a smaller --size",
        )


def check_caches() -> None:
    """Raise InvalidInput if this user may not have the kernel forget the page cache."""
    if not os.access(_DROP_CACHES, os.W_OK):
        raise InvalidInput("--drop-caches needs root, which may write to /proc/sys/vm/drop_caches")


def drop_caches() -> None:
    """Have the kernel forget the page cache."""
    os.sync()
    _DROP_CACHES.write_text("3")


def read_through(directory: Path) -> None:
    """Read all files into the page cache."""
    chunk = bytearray(4 << 20)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(chunk):
                    pass
