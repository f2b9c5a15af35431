"""Whatever says where it is, and how it is reached, holds for every request.

Each case is tried with each operation. A server that nobody may ask, and a proxy, count who comes.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from loopback import answering
from tls_front import behind_tls

from ckptstore import open_store
from ckptstore.errors import InvalidInput, StorageError
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3.messages import Answer
from ckptstore.testing.s3_server import S3Server, s3_server

pytestmark = pytest.mark.slow

LARGE = memoryview(bytes(17 << 20))


class Counting:
    """A server that notes who comes. As a proxy it passes on what it gets, tunnels too; `hidden` is a name that only
    it knows, of a server."""

    def __init__(self, *, forwards: bool = False, hidden: Mapping[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.url = ""
        self._forwards = forwards
        self._hidden = hidden or {}

    def serve(self, connection: socket.socket, _number: int) -> None:
        """Answer on a connection."""
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                data = connection.recv(1 << 16)
                if not data:
                    return
                head += data
            line, _, rest = head.partition(b"\r\n")
            self.lines.append(line.decode())
            method, target, _ = line.decode().split(" ")
            if not self._forwards:
                connection.sendall(b"HTTP/1.1 500 Trap\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            server = target if method == "CONNECT" else target.split("/")[2]
            host, _, port = self._hidden.get(server, server).rpartition(":")
            with socket.create_connection((host, int(port))) as onward:
                if method == "CONNECT":
                    connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:
                    line = f"{method} /{target.split('/', 3)[3]} HTTP/1.1\r\n"
                    onward.sendall(line.encode() + rest)
                self._pass_on(connection, onward, is_tunnel=method == "CONNECT")

    @staticmethod
    def _pass_on(one: socket.socket, other: socket.socket, *, is_tunnel: bool) -> None:
        """Through a tunnel all that comes; else most clients send one request, so that it is counted."""
        ends, is_first = {one: other, other: one}, not is_tunnel
        while True:
            for end in select.select(list(ends), [], [])[0]:
                data = end.recv(1 << 18)
                if not data:
                    return
                if end is other and is_first:
                    line, line_end, rest = data.partition(b"\r\n")
                    data, is_first = b"".join((line, line_end, b"Connection: close", line_end, rest)), False
                ends[end].sendall(data)


@contextmanager
def counting(*, forwards: bool = False, hidden: Mapping[str, str] | None = None) -> Iterator[Counting]:
    server = Counting(forwards=forwards, hidden=hidden)
    with answering(server.serve) as server.url:
        yield server


@contextmanager
def credentials_server(key: str) -> Iterator[str]:
    """A service of credentials for containers."""
    found = {"AccessKeyId": key, "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
    body = json.dumps(found).encode()

    def serve(connection: socket.socket, _number: int) -> None:
        with connection:
            connection.recv(1 << 16)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)

    with answering(serve) as url:
        yield f"{url}/credentials"


@contextmanager
def token_service(key: str) -> Iterator[str]:
    """A service that gives credentials for a role, for the token of a web identity, and for one of single sign-on."""
    until = "2099-01-01T00:00:00Z"
    parts = f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
    found = {"accessKeyId": key, "secretAccessKey": "s", "sessionToken": "t", "expiration": 4070908800000}

    def answer(head: bytes, body: bytes) -> str:
        if b"/federation/credentials" in head:
            assert b"x-amz-sso_bearer_token: signed-on" in head.lower()
            return json.dumps({"roleCredentials": found})
        action = "AssumeRoleWithWebIdentity" if b"WebIdentityToken=somebody" in body else "AssumeRole"
        assert f"Action={action}&".encode() in body + b"&"
        credentials = f"<Credentials>{parts}<Expiration>{until}</Expiration></Credentials>"
        arn = "arn:aws:sts::123456789012:assumed-role/train/x"
        user = f"<AssumedRoleUser><AssumedRoleId>i:x</AssumedRoleId><Arn>{arn}</Arn></AssumedRoleUser>"
        space = "https://sts.amazonaws.com/doc/2011-06-15/"
        return (
            f'<{action}Response xmlns="{space}"><{action}Result>{credentials}{user}</{action}Result></{action}Response>'
        )

    def serve(connection: socket.socket, _number: int) -> None:
        with connection, connection.makefile("rb") as coming:
            head = b"".join(iter(coming.readline, b"\r\n"))
            sizes = [line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length:")]
            body = answer(head, coming.read(int(sizes[0])) if sizes else b"").encode()
            first = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(first.encode() + body)

    with answering(serve) as url:
        yield url


def every_operation(uri: str, engine: str | None, options: Mapping[str, Any] | None) -> None:
    """All that a store does with its storage: on S3 small and large things go through two clients."""
    with closing(open_storage(uri, storage_options=options, engine=engine)) as storage:
        storage.write("a", [memoryview(b"small")])
        assert storage.create("log/1", b"first")
        assert not storage.create("log/1", b"second")
        writer = storage.open_parts("large", len(LARGE))
        size = storage.part_bytes(len(LARGE))
        for offset in range(0, len(LARGE), size):
            writer.write_part(offset, [LARGE[offset : offset + size]])
        writer.finish()
        storage.copy("a", "b")
        for size_bytes in (1000, 8 << 20):
            view = memoryview(bytearray(b"x" * size_bytes))
            storage.read_into("large", 5, [view], version=storage.stat("large").version)
            assert view[-1] == 0
        assert storage.read("b") == b"small"
        assert {file.key for file in storage.list("")} == {"a", "b", "large", "log/1"}
        if hasattr(storage, "unfinished"):
            assert not list(storage.unfinished(""))
            storage.rules()
        storage.delete(["a", "b", "large", "log/1"])
        assert not list(storage.list(""))


@dataclass
class Case:
    """What a user sets; `{s3}`, `{trap}` and so on stand for what is there."""

    environ: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    """The AWS configuration."""
    key: str = "right"
    """The access key that the server lets in."""
    proxy: bool = False
    """Whether all requests go through the proxy: the name of the server is known to nobody else."""


KEYS = {"AWS_ACCESS_KEY_ID": "right", "AWS_SECRET_ACCESS_KEY": "s"}
OPTION_KEYS = {"key": "right", "secret": "s"}
REGION = {"AWS_REGION": "eu-west-3"}
HERE = {"AWS_ENDPOINT_URL": "{s3}", **KEYS, **REGION}
HIDDEN = "s3.nowhere.invalid:9000"
THERE = {**HERE, "AWS_ENDPOINT_URL": f"http://{HIDDEN}"}
PROFILE = "[profile onprem]\nregion = eu-west-3\naws_access_key_id = right\naws_secret_access_key = s\n"

ROLE = "arn:aws:iam::123456789012:role/train"

CASES: dict[str, Case] = {
    "variables": Case(HERE),
    "the endpoint in the profile": Case({"AWS_PROFILE": "onprem"}, config=f"{PROFILE}endpoint_url = {{s3}}\n"),
    "the endpoint in a service of the profile": Case(
        {"AWS_PROFILE": "onprem"}, config=f"{PROFILE}services = x\n[services x]\ns3 =\n  endpoint_url = {{s3}}\n"
    ),
    "a profile as an option": Case(options={"profile": "onprem"}, config=f"{PROFILE}endpoint_url = {{s3}}\n"),
    "an option before variables": Case(
        {"AWS_ENDPOINT_URL": "{trap}", "AWS_ENDPOINT_URL_S3": "{trap}", **KEYS, **REGION}, {"endpoint_url": "{s3}"}
    ),
    "an option before the profile": Case(
        {"AWS_PROFILE": "onprem"}, {"endpoint_url": "{s3}"}, config=f"{PROFILE}endpoint_url = {{trap}}\n"
    ),
    "variables of other clients": Case(
        {
            **HERE,
            "AWS_ENDPOINT": "{trap}",
            "AWS_PROXY_URL": "{trap}",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
            "AWS_S3_EXPRESS": "true",
            "AWS_BUCKET": "other",
            "AWS_ALLOW_HTTP": "false",
        }
    ),
    "keys as options before variables": Case(
        {
            "AWS_ENDPOINT_URL": "{s3}",
            "AWS_ACCESS_KEY_ID": "wrong",
            "AWS_SECRET_ACCESS_KEY": "w",
            "AWS_SESSION_TOKEN": "w",
        },
        {**OPTION_KEYS, "client_kwargs": {"region_name": "eu-west-3"}},
    ),
    "a profile before keys of variables": Case(
        {"AWS_ACCESS_KEY_ID": "wrong", "AWS_SECRET_ACCESS_KEY": "wrong"},
        {"profile": "onprem"},
        config=f"{PROFILE}endpoint_url = {{s3}}\n",
    ),
    "the default profile before the other": Case(
        {"AWS_DEFAULT_PROFILE": "onprem", "AWS_PROFILE": "elsewhere"},
        config=f"{PROFILE}endpoint_url = {{s3}}\n[profile elsewhere]\nendpoint_url = {{trap}}\n",
    ),
    "keys of variables before the profile": Case(
        {"AWS_PROFILE": "onprem", **KEYS},
        config=PROFILE.replace("right", "wrong") + "endpoint_url = {s3}\n",
    ),
    "a process that gives credentials": Case(
        {"AWS_ENDPOINT_URL": "{s3}", "AWS_PROFILE": "process"},
        config="[profile process]\nregion = eu-west-3\ncredential_process = {process}\n",
    ),
    "credentials of the container": Case(
        {"AWS_ENDPOINT_URL": "{s3}", **REGION, "AWS_CONTAINER_CREDENTIALS_FULL_URI": "{container}"}
    ),
    "a role of a profile": Case(
        {"AWS_ENDPOINT_URL": "{s3}", "AWS_ENDPOINT_URL_STS": "{tokens}", "AWS_PROFILE": "role"},
        config=f"[profile role]\nregion = eu-west-3\nrole_arn = {ROLE}\nsource_profile = onprem\n"
        + PROFILE.replace("right", "base"),
    ),
    "a web identity": Case(
        {
            "AWS_ENDPOINT_URL": "{s3}",
            "AWS_ENDPOINT_URL_STS": "{tokens}",
            **REGION,
            "AWS_ROLE_ARN": ROLE,
            "AWS_WEB_IDENTITY_TOKEN_FILE": "{identity}",
        }
    ),
    "single sign-on": Case(
        {"AWS_ENDPOINT_URL": "{s3}", "AWS_ENDPOINT_URL_SSO": "{tokens}", "AWS_PROFILE": "sso"},
        config="[profile sso]\nregion = eu-west-3\nsso_session = corp\nsso_account_id = 123456789012\n"
        "sso_role_name = train\n[sso-session corp]\nsso_region = eu-west-3\nsso_start_url = https://corp.invalid/start\n",
    ),
    "path-style addresses": Case(HERE, {"config_kwargs": {"s3": {"addressing_style": "path"}}}),
    "path-style addresses in the profile": Case(
        {"AWS_PROFILE": "onprem"}, config=f"{PROFILE}endpoint_url = {{s3}}\ns3 =\n  addressing_style = path\n"
    ),
    "checksums where required, in the profile": Case(
        {"AWS_PROFILE": "onprem"},
        config=f"{PROFILE}endpoint_url = {{s3}}\nrequest_checksum_calculation = when_required\n",
    ),
    "no proxy for a network": Case({**HERE, "HTTP_PROXY": "{trap}", "NO_PROXY": "10.0.0.0/8,127.0.0.0/8"}),
    "no proxy for anything": Case({**HERE, "http_proxy": "{trap}", "NO_PROXY": "*"}),
    "no proxy for the address": Case({**HERE, "ALL_PROXY": "{trap}", "no_proxy": "127.0.0.1"}),
    "a proxy of https alone": Case({**HERE, "HTTPS_PROXY": "{trap}", "https_proxy": "{trap}"}),
    "a proxy": Case({**THERE, "HTTP_PROXY": "{proxy}"}, proxy=True),
    "a proxy in small letters": Case({**THERE, "http_proxy": "{proxy}", "HTTP_PROXY": "{trap}"}, proxy=True),
    "a proxy of all": Case({**THERE, "ALL_PROXY": "{proxy}", "NO_PROXY": "10.0.0.0/8"}, proxy=True),
    "a proxy without a scheme": Case({**THERE, "HTTP_PROXY": "{proxy_host}"}, proxy=True),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The right server, one that nobody may ask, a proxy, and two sources of credentials."""
    found = {"Version": 1, "AccessKeyId": "right", "SecretAccessKey": "s"}
    path = tmp_path_factory.mktemp("process") / "give.py"
    path.write_text(f"print({json.dumps(found)!r})")
    home = tmp_path_factory.mktemp("home")
    (home / "identity").write_text("somebody")
    token = home / ".aws/sso/cache" / f"{hashlib.sha1(b'corp').hexdigest()}.json"
    token.parent.mkdir(parents=True)
    token.write_text(json.dumps({"accessToken": "signed-on", "expiresAt": "2099-01-01T00:00:00Z"}))
    with (
        s3_server(buckets=["test"], access_keys=["right"], verify=False) as server,
        counting() as trap,
        counting(forwards=True, hidden={HIDDEN: server.endpoint_url.partition("://")[2]}) as proxy,
        credentials_server("right") as container,
        token_service("right") as tokens,
    ):
        yield {
            "server": server,
            "s3": server.endpoint_url,
            "trap": trap.url,
            "traps": trap,
            "proxy": proxy.url,
            "proxy_host": proxy.url.partition("://")[2],
            "proxies": proxy,
            "process": f"{sys.executable} {path}",
            "container": container,
            "tokens": tokens,
            "identity": str(home / "identity"),
            "home": str(home),
        }


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_goes_one_way(
    name: str, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, server, trap, proxy = CASES[name], places["server"], places["traps"], places["proxies"]
    for variable, value in case.environ.items():
        monkeypatch.setenv(variable, value.format(**places))
    for where in ("tokens.SSOTokenProvider", "credentials.SSOProvider"):  # they looked for a home when they were loaded
        monkeypatch.setattr(f"botocore.{where}._SSO_TOKEN_CACHE_DIR", f"{places['home']}/.aws/sso/cache")
    (tmp_path / "config").write_text(case.config.format(**places))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {key: value.format(**places) if isinstance(value, str) else value for key, value in case.options.items()}
    for counted in (server.log, trap.lines, proxy.lines):
        counted.clear()
    every_operation("s3://test/one", None, options)
    assert not trap.lines
    assert len(server.log) >= 12
    assert {request.status for request in server.log} <= {200, 204, 206, 404, 412, 501}
    assert bool(proxy.lines) == case.proxy


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "no such profile": (
        {**HERE, "AWS_PROFILE": "nobody"},
        {},
        "AWS_PROFILE names a profile that is not there: 'nobody'",
    ),
    "no such default profile": (
        {**HERE, "AWS_DEFAULT_PROFILE": "nobody", "AWS_PROFILE": "default"},
        *({}, "AWS_DEFAULT_PROFILE names a profile that is not there: 'nobody'"),
    ),
    "no such profile as an option": (HERE, {"profile": "canary"}, "'profile'. names a profile that is not there"),
    "no such style": (HERE, {"config_kwargs": {"s3": {"addressing_style": "host"}}}, "InvalidS3AddressingStyle"),
    "a proxy of another kind": ({**HERE, "ALL_PROXY": "socks5://user:canary@h:1"}, {}, "ALL_PROXY names a proxy"),
    "a proxy that is none": ({**HERE, "http_proxy": "http://user:canary@:x"}, {}, "http_proxy names a proxy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_neither_can_honour_is_refused_by_name(
    name: str, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ, options, text = REFUSED[name]
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value.format(**places))
    with pytest.raises(InvalidInput, match=text) as caught:
        open_storage("s3://test/one", storage_options=options)
    assert "canary" not in str(caught.value)


def test_a_proxy_that_is_not_there_is_named(places: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in HERE.items():
        monkeypatch.setenv(variable, value.format(**places))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        monkeypatch.setenv("HTTP_PROXY", f"http://user:canary@127.0.0.1:{port}")
        with closing(open_storage("s3://test/one")) as storage:
            for act in OPERATIONS.values():
                with pytest.raises(StorageError, match=rf"through the proxy 127.0.0.1:{port} \(HTTP_PROXY\)") as caught:
                    act(storage)
                assert "canary" not in str(caught.value)


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "small": lambda storage: storage.write("a", [memoryview(b"x")]),
    "large": lambda storage: storage.open_parts("b", len(LARGE)),
    "read": lambda storage: storage.read_into("a", 0, [memoryview(bytearray(8 << 20))]),
}


OF_AWS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "a region": ({}, {}, "test.s3.eu-west-3.amazonaws.com"),
    "dual stack": ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, {}, "test.s3.dualstack.eu-west-3.amazonaws.com"),
    "FIPS": ({"AWS_USE_FIPS_ENDPOINT": "true", "AWS_REGION": "us-east-2"}, {}, "test.s3-fips.us-east-2.amazonaws.com"),
    "dual stack as an option": (
        *({}, {"config_kwargs": {"use_dualstack_endpoint": True}}),
        "test.s3.dualstack.eu-west-3.amazonaws.com",
    ),
    "no configured endpoint": (
        {"AWS_ENDPOINT_URL": "{trap}", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
        *({}, "test.s3.eu-west-3.amazonaws.com"),
    ),
}


@pytest.mark.parametrize("name", OF_AWS)
def test_small_and_large_ask_the_same_host_of_aws(
    name: str, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy hears which host each request is for, and lets nothing through."""
    environ, options, host = OF_AWS[name]
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    with counting() as proxy:
        for variable, value in {**KEYS, **REGION, "HTTPS_PROXY": proxy.url, **environ}.items():
            monkeypatch.setenv(variable, value.format(**places))
        places["traps"].lines.clear()
        with closing(open_storage("s3://test/one", storage_options=options)) as storage:
            for act in OPERATIONS.values():
                proxy.lines.clear()
                with pytest.raises(StorageError):
                    act(storage)
                assert {line.split(" ")[1] for line in proxy.lines} == {f"{host}:443"}
    assert not places["traps"].lines


TRUSTED = {
    "AWS_CA_BUNDLE": "AWS_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE": "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE": "SSL_CERT_FILE",
    "the profile": "",
    "a file as an option": "",
    "no verification": "",
}


@pytest.mark.parametrize("through_proxy", [False, True])
@pytest.mark.parametrize("how", TRUSTED)
def test_certificates(
    how: str,
    through_proxy: bool,
    places: dict[str, Any],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    variable = TRUSTED[how]
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    server, proxy = places["server"], places["proxies"]
    with behind_tls(certificate, server.endpoint_url) as url:
        for name, value in {**KEYS, **REGION, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        if through_proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        proxy.lines.clear()
        with closing(open_storage("s3://test/tls")) as storage:
            for act in OPERATIONS.values():
                with pytest.raises(StorageError, match="certificate"):
                    act(storage)
        assert bool(proxy.lines) == through_proxy
        options: dict[str, Any] = {}
        if variable:
            monkeypatch.setenv(variable, str(certificate))
        elif how == "the profile":
            (tmp_path / "config").write_text(f"[default]\nca_bundle = {certificate}\n")
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        else:
            options = {"client_kwargs": {"verify": str(certificate) if how.startswith("a file") else False}}
        every_operation("s3://test/tls", None, options)


@pytest.mark.parametrize("code", ["PermanentRedirect", "AuthorizationHeaderMalformed"])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_a_bucket_in_another_region(
    engine: str, is_named: bool, code: str, fast_s3: S3Server, two_tries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers so, to who asks for the region as well; some gateways do not say which it is."""
    for name, value in {**KEYS, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    service = fast_s3._shared.service
    serve = service.answer
    named = {"x-amz-bucket-region": "eu-west-1"} if is_named else {}
    body = f"<Error><Code>{code}</Code><Region>{'eu-west-1' if is_named else ''}</Region></Error>".encode()

    def answer(request: Any) -> Answer:
        if "/eu-west-1/" in request.headers.get("authorization", ""):
            return serve(request)
        status = 301 if code == "PermanentRedirect" else 400
        return Answer.of(b"" if request.method == "HEAD" else body, status=status, headers=named)

    monkeypatch.setattr(service, "answer", answer)
    options = {"endpoint_url": fast_s3.endpoint_url}
    with open_store("s3://test/tokenizer", storage_options=options, engine=engine, group="solo") as store:
        if is_named:
            store.save(1, {"w": 1})
            assert store.load({"w": 0}).step == 1
        elif engine == "native":
            with pytest.raises(StorageError, match="not in the region us-east-1") as caught:
                store.save(1, {"w": 1})
            assert not caught.value.retryable
            assert "AWS_REGION" in str(caught.value.hint)


OTHER_CLOUDS: dict[str, tuple[dict[str, str], bool]] = {
    "no proxy for a network": ({"HTTP_PROXY": "{trap}", "NO_PROXY": "127.0.0.0/8"}, False),
    "no proxy for anything": ({"ALL_PROXY": "{trap}", "NO_PROXY": "*"}, False),
    "a proxy": ({"HTTP_PROXY": "{proxy}", "NO_PROXY": "10.0.0.0/8"}, True),
    "a proxy of all": ({"ALL_PROXY": "{proxy}"}, True),
    "variables of other clients": (
        {
            "GOOGLE_BASE_URL": "{trap}",
            "GOOGLE_PROXY_URL": "{trap}",
            "GOOGLE_BUCKET": "other",
            "AZURE_STORAGE_ENDPOINT": "{trap}",
            "AZURE_ENDPOINT": "{trap}",
            "AZURE_PROXY_URL": "{trap}",
            "AZURE_SKIP_SIGNATURE": "true",
            "AZURE_STORAGE_SAS_KEY": "sv=1",
            "AZURE_STORAGE_TOKEN": "wrong",
            "AZURE_CONTAINER_NAME": "other",
        },
        False,
    ),
}


@pytest.mark.parametrize("name", OTHER_CLOUDS)
@pytest.mark.parametrize("cloud", ["gs", "az"])
def test_every_operation_goes_one_way_elsewhere(
    cloud: str, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = request.getfixturevalue("fake_gcs" if cloud == "gs" else "azurite")
    environ, through_proxy = OTHER_CLOUDS[name]
    with counting() as trap, counting(forwards=True) as proxy:
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value.format(trap=trap.url, proxy=proxy.url))
        every_operation(f"{cloud}://test/one-{name.replace(' ', '-')}", None, server.storage_options)
        assert not trap.lines
        assert (len(proxy.lines) >= 4) if through_proxy else not proxy.lines, proxy.lines


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_certificates_on_azure(variable: str, azurite: Any, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    server = azurite.url.partition("://")[2].partition("/")[0]
    with behind_tls(certificate, f"http://{server}") as url:
        connection = azurite.storage_options["connection_string"].replace("http;", "https;")
        options = {"connection_string": connection.replace(f"http://{server}", url.rstrip("/"))}
        with closing(open_storage("az://test/tls", storage_options=options)) as storage:
            for name in ("small", "read"):
                with pytest.raises(StorageError, match="certificate of the server is not trusted"):
                    OPERATIONS[name](storage)
        monkeypatch.setenv(variable, str(certificate))
        every_operation("az://test/tls", None, options)
