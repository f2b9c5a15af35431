"""`ckptstore serve` as a process of its own, asked over HTTP as a browser asks, and as others do."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from seeing import checked, everything, files

from ckptstore import open_store
from ckptstore.errors import StorageError
from ckptstore.testing import Call, CountCalls, with_faults
from ckptstore.tools.cli import main
from ckptstore.tools.report.gather import Sighting
from ckptstore.tools.report.overview import Overview
from ckptstore.tools.report.serving import Served

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 120.0


class Server:
    """A server that runs."""

    def __init__(self, process: Any, url: str) -> None:
        self.process, self.port, self.path = process, urlsplit(url).port, urlsplit(url).path

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        try:
            connection.putrequest(method, path, skip_host=host is not None)
            if host:
                connection.putheader("Host", host)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


@contextmanager
def serving(*arguments: object) -> Iterator[Server]:
    command = [sys.executable, "-m", "ckptstore.tools.cli", "serve", *map(str, arguments)]
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()  # it ends when the process ends
        assert line.startswith("http://127.0.0.1:"), process.stderr.read()
        yield Server(process, line.strip())
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serving") / "store"
    with open_store(root) as store:
        store.save_directory(1, files(root.parent / "source"), metrics={"loss": 0.5})
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with serving(root) as found:
        yield found


def test_the_page_and_the_document_are_served(server: Server, root: Path) -> None:
    before = everything(root)
    status, headers, body = server.ask(server.path)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"step-0000000001" in body
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(item.split(" ", 1) for item in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "Server" not in headers
    status, headers, body = server.ask(f"{server.path}document.json")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    document = checked(json.loads(body))
    assert document["live"] is True
    assert [item["step"] for item in document["stores"][0]["checkpoints"]] == [1]
    status, headers, head = server.ask(f"{server.path}document.json", "HEAD")
    assert (status, headers["Content-Length"], head) == (200, str(len(body)), b"")
    assert everything(root) == before


def test_who_does_not_know_the_token_or_comes_by_another_name_is_told_nothing(server: Server) -> None:
    token = server.path.strip("/")
    bodies = set()
    paths = (
        "/",
        "/document.json",
        f"/{token[:-1]}/",
        f"/{token}x/",
        f"/{token.swapcase()}/",
        "//",
        "/%00/",
        "/%C3%A9/",
    )
    for path in paths:
        status, headers, body = server.ask(path)
        assert status == 403, path
        assert "Location" not in headers
        bodies.add(body)
    assert bodies == {b"forbidden\n"}
    assert server.ask(f"{server.path}other")[0] == 404
    assert server.ask(f"{server.path}../{token}/")[0] in (403, 404)
    others = (
        "evil.example",
        f"evil.example:{server.port}",
        "127.0.0.1",
        "127.0.0.1:1",
        f"127.0.0.1.evil:{server.port}",
    )
    for host in others:
        assert server.ask(server.path, host=host)[0] == 403, host
    assert server.ask(server.path, host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    for path in (server.path, "/"):
        status, headers, body = server.ask(path, method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert body == b"this can only be read\n"


def test_it_keeps_up_with_the_store(tmp_path: Path) -> None:
    root, source = tmp_path / "store", files(tmp_path / "source")
    with open_store(root) as store:
        store.save_directory(1, source)
        with serving(root, "--port", 0) as server:
            path = f"{server.path}document.json"
            first = json.loads(server.ask(path)[2])
            store.save_directory(2, source)
            found: list[int] = []
            while found != [1, 2]:  # the test's own timeout ends it
                now = json.loads(server.ask(path)[2])
                found = [item["step"] for item in now["stores"][0]["checkpoints"]]
            assert now["created_at"] > first["created_at"]
            again = json.loads(server.ask(path)[2])
            (root / "store.json").rename(root / "gone.json")
            assert again["stores"][0]["checkpoints"] == now["stores"][0]["checkpoints"]


def test_many_who_ask_at_once_cost_one_look(root: Path) -> None:
    counted = CountCalls()
    with with_faults(open_store(root), counted) as store:
        overview = Overview([Sighting(store, rest_seconds=3600)], command="test", is_live=True)
        served = Served(overview, hosts=frozenset("h"))
        statuses: list[str] = []

        def ask() -> bytes:
            path = f"/{served.token}/document.json"
            request = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "HTTP_HOST": "h"}
            return b"".join(served(request, lambda status, headers: statuses.append(status)))

        ask()
        counted.clear()
        with ThreadPoolExecutor(16) as pool:
            bodies = set(pool.map(lambda _: ask(), range(64)))
        assert len(bodies) == 1
        assert set(statuses) == {"200 OK"}
        looks = counted.counts["read"]
        assert looks <= 8, "64 questions, and a look every two seconds at most"
        assert set(counted.counts) <= {"read"}


def test_a_store_that_is_lost_while_it_is_served(root: Path) -> None:
    is_lost = False

    def lose(call: Call) -> None:
        if is_lost:
            raise StorageError("gone")

    with with_faults(open_store(root), lose) as store:
        overview = Overview([Sighting(store)], command="test", is_live=True)
        before = overview.look().stores[0]
        is_lost = True
        after = overview.look().stores[0]
        is_lost = False
        assert overview.look().stores[0] == before
    assert after.checkpoints == before.checkpoints
    assert "now the store cannot be read: gone" in after.health.trouble[0]


def test_a_store_in_the_place_of_another_is_not_taken_for_it(root: Path) -> None:
    with open_store(root) as store:
        overview = Overview([Sighting(store)], command="test", is_live=True)
        overview.look()
        shutil.rmtree(root)
        with open_store(root) as other:
            other.save_directory(1, files(root.parent / "source"))
        assert "Another store is at" in overview.look().stores[0].health.trouble[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly(root: Path, server: Server, number: signal.Signals) -> None:
    known = server.path
    with serving(root) as server:
        assert server.ask(server.path)[0] == 200
        assert len(server.path) > 40
        assert server.ask(known)[0] == 403, "each start has a token of its own"
        server.process.send_signal(number)
        out, error = server.process.communicate(timeout=DEADLINE_SECONDS)
        assert (server.process.returncode, out, error) == (130, "", "interrupted\n")


def test_what_cannot_be_served_is_told(root: Path, server: Server, tmp_path: Path) -> None:
    def failed(*arguments: Any, code: int) -> str:
        done = CliRunner().invoke(main, ["serve", *map(str, arguments)])
        assert done.exit_code == code, done.output
        assert done.stdout == ""
        return done.stderr

    assert "Nothing can be served at 127.0.0.1:" in failed(root, "--port", server.port, code=2)
    assert "There is no store" in failed(tmp_path / "nothing", code=10)
    assert "Missing argument" in failed(code=2)
    assert "means nothing for" in failed(root, "--storage-option", "key=x", code=2)
