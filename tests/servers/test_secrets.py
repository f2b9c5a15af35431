"""No secret leaves: not in an error, its chain of causes, a log line, an event or a readable form, on any engine."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ckptstore import open_store
from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError, to_wire
from ckptstore.events import Event, listening
from ckptstore.storage.cloud.chains import AzureTokens
from ckptstore.storage.open import choose_engine, open_storage
from ckptstore.storage.retry import with_retries

pytestmark = pytest.mark.slow

CANARY = "canary7secret"
KEY = base64.b64encode(f"{CANARY}, and so on to have the 64 bytes that storage accounts have".encode()).decode()
QUICK = RetryConfig(retry_attempts=2, retry_wait_max_seconds=0.01)

SELDOM = (*(pytest.param(how, marks=pytest.mark.slow) for how in ("no such name", 400)),)
SELDOM += (*(pytest.param(how, marks=pytest.mark.long) for how in (404, 500)),)

OPERATIONS: dict[str, Callable[[Any], object]] = {
    "write": lambda storage: storage.write("k", [memoryview(b"x")]),
    "create": lambda storage: storage.create("k", b"x"),
    "read": lambda storage: storage.read("k"),
    "read_into": lambda storage: storage.read_into("k", 0, [memoryview(bytearray(9))]),
    "stat": lambda storage: storage.stat("k"),
    "list": lambda storage: list(storage.list("")),
    "delete": lambda storage: storage.delete(["k", "l"]),
    "copy": lambda storage: storage.copy("k", "l"),
    "open_parts": lambda storage: storage.open_parts("k", 17 << 20).write_part(0, [memoryview(bytes(1 << 20))]),
    "rules": lambda storage: storage.rules(),
}


class Handler(BaseHTTPRequestHandler):
    """Refuses with the status that the path's first part says; tells what it was sent, as some servers do."""

    def answer(self) -> None:
        with contextlib.suppress(OSError):
            if self.headers.get("expect") == "100-continue":  # s3fs sends no body before it has this
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.rfile.read(int(self.headers.get("content-length") or 0))
            told = f"{self.path} {self.headers}"
            status = self.server.status  # type: ignore[attr-defined]
            if "/storage/v1" in self.path:
                body = json.dumps({"error": {"code": status, "message": told, "errors": [{"reason": "r"}]}})
            else:
                body = f"<?xml version='1.0'?><Error><Code>Refused</Code><Message>{told[:2000]}</Message></Error>"
            self.send_response(status)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, format: str, *args: Any) -> None:
        """The tests say what matters."""


@pytest.fixture(params=["refused", 403, *SELDOM])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The host and port of a server in trouble."""
    if request.param == "no such name":
        yield "nowhere.invalid:80"
    elif request.param == "refused":
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{bound.getsockname()[1]}"
    else:
        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as refusing:
            refusing.daemon_threads = True
            refusing.status = request.param  # type: ignore[attr-defined]
            thread = threading.Thread(target=refusing.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            yield f"127.0.0.1:{refusing.server_address[1]}"
            refusing.shutdown()
            thread.join()


def s3_options(**more: Any) -> dict[str, Any]:
    return {"key": "K", "secret": CANARY, "client_kwargs": {"region_name": "us-east-1"}, **more}


def cases(host: str) -> dict[str, tuple[str, dict[str, Any]]]:
    url = f"http://{host}"
    with_user = f"http://user:{CANARY}@{host}"
    return {
        "s3 keys": ("s3://test/run", s3_options(endpoint_url=url, token=CANARY)),
        "s3 user info": ("s3://test/run", s3_options(endpoint_url=with_user)),
        "s3 query": ("s3://test/run", s3_options(endpoint_url=f"{url}/?token={CANARY}")),
        "s3 uri": (f"s3://key:{CANARY}@test/run", s3_options(endpoint_url=url)),
        "s3 region": ("s3://test/run", {**s3_options(endpoint_url=url), "client_kwargs": {"region_name": CANARY}}),
        "s3 bad region": ("s3://test/run", {**s3_options(), "client_kwargs": {"region_name": f"_{CANARY} /"}}),
        "s3 profile": ("s3://test/run", {"endpoint_url": url, "profile": CANARY}),
        "s3 bad endpoint": ("s3://test/run", s3_options(endpoint_url=f"http://{CANARY}:not-a-port/")),
        "s3 no endpoint": ("s3://test/run", s3_options(endpoint_url=CANARY)),
        "s3 config": ("s3://test/run", s3_options(endpoint_url=url, config_kwargs={"read_timeout": CANARY})),
        "gs dict": ("gs://test/run", {"endpoint_url": url, "token": {"type": "service_account", "x": CANARY}}),
        "gs file": ("gs://test/run", {"endpoint_url": url, "token": f"/nowhere/{CANARY}.json"}),
        "gs raw": ("gs://test/run", {"endpoint_url": url, "token": CANARY}),
        "gs user info": ("gs://test/run", {"endpoint_url": with_user, "token": "anon"}),
        "gs bad endpoint": ("gs://test/run", {"endpoint_url": f"http://{CANARY}:no/", "token": "anon"}),
        "az key": ("az://test/run", {"connection_string": f"AccountName=acc;AccountKey={KEY};BlobEndpoint={url}/acc"}),
        "az sas": ("az://test/run", {"account_name": "acc", "account_host": url, "sas_token": f"sv=1&sig={CANARY}"}),
        "az sas string": (
            "az://test/run",
            {"connection_string": f"BlobEndpoint={url}/acc;SharedAccessSignature=sv=1&sig={CANARY}"},
        ),
        "az bad key": (
            "az://test/run",
            {"connection_string": f"AccountName=acc;AccountKey={CANARY}!;BlobEndpoint={url}/acc"},
        ),
        "az bad string": ("az://test/run", {"connection_string": f"{CANARY}"}),
        "az user info": ("az://test/run", {"account_name": "acc", "account_host": with_user, "anon": True}),
        "az client": (
            "az://test/run",
            {"account_name": "acc", "tenant_id": f"{CANARY} /", "client_id": "c", "client_secret": CANARY},
        ),
        "other": (f"http://user:{CANARY}@{host}/run?sig={CANARY}", {"headers": {"Authorization": CANARY}}),
        "sftp": (f"ftp://user:{CANARY}@127.0.0.1:1/run", {}),
        "unknown": (f"nosuch://user:{CANARY}@host/run", {"token": CANARY}),
        "odd": (f"http://user:{CANARY}@[half/run", {}),
    }


CASES = list(cases("h"))


def shown(error: BaseException) -> str:
    """Everything that can be printed of an error: also contexts that Python itself would leave out."""
    text, seen, chain = "", set(), [error]
    for item in chain:
        if id(item) not in seen:
            seen.add(id(item))
            text += "".join(traceback.format_exception(item)) + repr(item) + str(item) + repr(getattr(item, "args", ""))
            chain += [other for other in (item.__cause__, item.__context__) if other is not None]
    return text + json.dumps(to_wire(error, rank=0), default=str)


def tried_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options, with which s3fs and its client try each request once; else they wait for minutes."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    config = {"connect_timeout": 2, "retries": {"total_max_attempts": 1}, **options.get("config_kwargs", {})}
    return {**options, "config_kwargs": config}


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *((case, "native") for case in CASES),
        *(pytest.param(case, "fsspec", marks=pytest.mark.slow) for case in CASES if case.startswith("s3 ")),
    ],
)
def test_no_error_log_or_event_has_a_secret(
    server: str, case: str, engine: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, options = cases(server)[case]
    if engine == "fsspec":
        options = tried_once(options, monkeypatch)
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="ckptstore")
    texts: list[str] = []
    events: list[Event] = []
    found = 0
    with listening(events.append):
        try:
            texts.append(str(choose_engine(uri, storage_options=options, engine=engine)))
            storage = with_retries(open_storage(uri, storage_options=options, engine=engine), QUICK)
        except CkptstoreError as error:
            texts.append(shown(error))
        else:
            texts += [storage.uri, repr(storage), str(storage)]
            for name, operation in OPERATIONS.items():
                if name == "rules" and not hasattr(storage, "rules"):
                    continue
                try:
                    operation(storage)
                except CkptstoreError as error:
                    found += 1
                    texts.append(shown(error))
                except AttributeError:
                    assert not hasattr(storage, "open_parts")
            storage.close()
            assert found
    texts += [f"{record.getMessage()} {record.exc_text} {vars(record)}" for record in caplog.records]
    texts += [repr(event) for event in events]
    for text in texts:
        assert CANARY not in text.lower().replace("%20", " ")
        assert KEY not in text


SCOPE = "https://storage.azure.com/.default"


@pytest.mark.parametrize("server", [400], indirect=True)
def test_azure_identity_does_not_warn_with_what_a_service_answers(
    server: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from azure.core.exceptions import AzureError
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://{server}/token")  # a machine in Azure; it tells what it was sent
    monkeypatch.setenv("IDENTITY_HEADER", CANARY)
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"https://{server}")
    caplog.set_level(logging.INFO)
    secret = ClientSecretCredential("00000000-0000-0000-0000-000000000000", "client", CANARY, retry_total=0)
    for credential in (DefaultAzureCredential(), secret):
        with pytest.raises(AzureError):
            AzureTokens(credential).get_token(SCOPE)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert CANARY not in caplog.text
    with pytest.raises(AzureError):
        DefaultAzureCredential().get_token(SCOPE)
    assert CANARY in caplog.text, "what others ask for is theirs"


@pytest.mark.parametrize("engine", ["native", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_a_whole_save_shows_none_either(
    engine: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    caplog.set_level(logging.DEBUG, logger="ckptstore")
    options = s3_options(endpoint_url=f"http://user:{CANARY}@127.0.0.1:1")
    options = tried_once(options, monkeypatch) if engine == "fsspec" else options
    with open_store("s3://test/run", storage_options=options, engine=engine) as store:
        with pytest.raises(CkptstoreError) as caught:
            store.save(1, {"epoch": 1})
        assert CANARY not in shown(caught.value) + caplog.text + repr(store) + store.uri
