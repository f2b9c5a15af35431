"""Bodies over HTTPS by several clients, to and from the S3 server in memory: what ckptstore sends by, and what it could
send by instead. Each runs on as many threads, and moves the same parts; the server is a process of its own."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
from ranks import run_ranks
from sizes import FULL, ROUNDS, Take, group, turns

from ckptstore.storage.open import open_storage
from ckptstore.tools.bench.destination import Place, opened_place
from ckptstore.tools.bench.figures.report import OURS, S3_SINK_TLS, Sample, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter

pytestmark = pytest.mark.long

MIB = 1 << 20
SIZE_BYTES = (512 if FULL else 64) * MIB
PART_BYTES = 16 * MIB
THREADS = 4
STARTS = range(0, SIZE_BYTES, PART_BYTES)

Ways = dict[str, Callable[[], object]]
"""What is timed: "save" and "load"."""


def of_ckptstore(place: Place, view: memoryview, pool: ThreadPoolExecutor) -> Iterator[Ways]:
    """Parts and reads of large ranges."""
    with closing(open_storage(place.uri, storage_options=place.storage_options)) as storage:

        def save() -> None:
            writer, size_bytes = storage.open_parts("parts", SIZE_BYTES), storage.part_bytes(SIZE_BYTES)
            each = range(0, SIZE_BYTES, size_bytes)
            list(pool.map(lambda start: writer.write_part(start, [view[start : start + size_bytes]]), each))
            writer.finish()

        def read(start: int) -> None:
            storage.read_into("parts", start, [view[start : start + PART_BYTES]])

        yield {"save": save, "load": lambda: list(pool.map(read, STARTS))}


def of_obstore(place: Place, view: memoryview, pool: ThreadPoolExecutor) -> Iterator[Ways]:
    """An object for each part, since it sends no parts; ranges of one object, copied from its chunks."""
    import obstore

    assert place.authority is not None
    store = obstore.store.S3Store(
        "bench",
        endpoint=place.endpoint_url,
        region="us-east-1",
        access_key_id="test",
        secret_access_key="testsecret",
        unsigned_payload=True,
        checksum_algorithm="crc64nvme",
        client_options={"root_certificate": Path(place.authority).read_bytes()},
    )

    def put(start: int) -> None:
        obstore.put(store, f"part-{start}", view[start : start + PART_BYTES], use_multipart=False)

    def get(start: int) -> None:
        for chunk in obstore.get(store, f"part-{start}").stream(min_chunk_size=256 << 10):
            view[start : start + len(chunk)] = memoryview(chunk)
            start += len(chunk)

    yield {"save": lambda: list(pool.map(put, STARTS)), "load": lambda: list(pool.map(get, STARTS))}


def of_ssl_sockets(place: Place, view: memoryview, pool: ThreadPoolExecutor) -> Iterator[Ways]:
    """Python's own client, on which the SDKs build: `ssl.SSLSocket`, neither digests nor signatures."""
    url, context = urlsplit(str(place.endpoint_url)), ssl.create_default_context(cafile=place.authority)

    def connections(use: Callable[[HTTPConnection, int], None]) -> None:
        def on(number: int) -> None:
            with closing(HTTPSConnection(url.hostname or "", url.port, context=context)) as connection:
                for start in STARTS[number::THREADS]:
                    use(connection, start)

        list(pool.map(on, range(THREADS)))

    def put(connection: HTTPConnection, start: int) -> None:
        connection.request("PUT", f"/bench/raw-{start}", body=view[start : start + PART_BYTES])
        connection.getresponse().read()

    def get(connection: HTTPConnection, start: int) -> None:
        connection.request("GET", f"/bench/raw-{start}")
        with connection.getresponse() as answer:
            end = start + PART_BYTES
            while start < end and (count := answer.readinto(view[start : min(end, start + MIB)])):
                start += count

    yield {"save": lambda: connections(put), "load": lambda: connections(get)}


def of_awscrt(place: Place, view: memoryview, pool: ThreadPoolExecutor) -> Iterator[Ways]:
    """The S3 client of the AWS Common Runtime, from and to a file in memory: from Python's memory it is slower."""
    from awscrt import auth, http, io, s3

    group = io.EventLoopGroup()
    options = io.TlsContextOptions()
    options.override_default_trust_store_from_path(None, place.authority)
    to = io.ClientTlsContext(options).new_connection_options()
    host = str(place.endpoint_url).partition("://")[2]
    to.set_server_name(host.partition(":")[0])
    client = s3.S3Client(
        bootstrap=io.ClientBootstrap(group, io.DefaultHostResolver(group)),
        region="us-east-1",
        credential_provider=auth.AwsCredentialsProvider.new_static("test", "testsecret"),
        part_size=8 * MIB,
        throughput_target_gbps=10,
        tls_mode=s3.S3RequestTlsMode.ENABLED,
        tls_connection_options=to,
    )
    path = Path("/dev/shm", f"ckptstore-{Path(str(place.authority)).parent.name}")

    def ask(method: str, kind: Any, headers: list[tuple[str, str]], **more: Any) -> None:
        request = http.HttpRequest(method, "/bench/crt", http.HttpHeaders([("host", host), *headers]))
        client.make_request(request=request, type=kind, **more).finished_future.result(600)

    def save() -> None:
        kind, length = s3.S3RequestType.PUT_OBJECT, [("content-length", str(SIZE_BYTES))]
        trailer = s3.S3ChecksumConfig(algorithm=s3.S3ChecksumAlgorithm.CRC32C, location=s3.S3ChecksumLocation.TRAILER)
        ask("PUT", kind, length, send_filepath=str(path), checksum_config=trailer)

    try:
        path.write_bytes(view)
        yield {"save": save, "load": lambda: ask("GET", s3.S3RequestType.GET_OBJECT, [], recv_filepath=str(path))}
    finally:
        path.unlink(missing_ok=True)


KINDS = {OURS: of_ckptstore, "obstore": of_obstore, "ssl.SSLSocket": of_ssl_sockets, "awscrt": of_awscrt}


def all_turns(place: Place) -> dict[tuple[str, str], list[Sample]]:
    """All rounds in one process; the first turn of each client makes its connections, and is not counted."""
    view = memoryview(bytearray(b"x" * SIZE_BYTES))
    found: dict[tuple[str, str], list[Sample]] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        opened = {name: kind(place, view, pool) for name, kind in KINDS.items()}
        ways = {name: next(each) for name, each in opened.items()}
        for number in range(ROUNDS + 1):
            for name in Random(number).sample([*KINDS], len(KINDS)):
                for way, call in ways[name].items():
                    with Meter() as meter:
                        call()
                    if number:
                        found.setdefault((name, way), []).append(meter.sample())
        for each in opened.values():
            next(each, None)
    return found


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], list[Sample]]:
    """All turns of all clients."""
    for package in ("awscrt", "obstore", "cryptography"):
        pytest.importorskip(package)
    with opened_place(S3_SINK_TLS, {}) as place:
        env = {"SSL_CERT_FILE": str(place.authority)}
        (found,) = run_ranks(1, all_turns, place, timeout_seconds=600, env=env)
    return found


def outcome(samples: list[Sample], name: str, turn: int) -> tuple[WorkloadOutcome, int]:
    role = OURS if name == OURS else "peer"
    return WorkloadOutcome.of(name, [samples[turn]], role=role, family=name), SIZE_BYTES


@group(f"To S3 in memory over HTTPS, by {THREADS} threads")
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("name", KINDS)
def test_to_https(take: Take, measured: dict[tuple[str, str], list[Sample]], name: str, turn: int) -> None:
    take(lambda: outcome(measured[name, "save"], name, turn))


@group(f"From S3 in memory over HTTPS, by {THREADS} threads")
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("name", KINDS)
def test_from_https(take: Take, measured: dict[tuple[str, str], list[Sample]], name: str, turn: int) -> None:
    take(lambda: outcome(measured[name, "load"], name, turn))
