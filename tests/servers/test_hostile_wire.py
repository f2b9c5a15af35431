"""Servers and proxies that break HTTP itself: early and endless answers, wrong frames, resets, redirects. Whatever they
do, a call returns what is right or fails in time with a StorageError, and the next one is served."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_front import (
    Front,
    OnWire,
    Wire,
    answers_to_a_condition,
    answers_twice,
    ends_with_103,
    goes_on_with_100,
    has_a_head_without_end,
    hints_first,
    hostile_front,
    options_behind,
    resets_in_the_body,
    says_an_impossible_status,
    says_length_and_chunks,
    says_no_status,
    says_nothing_of_the_file,
    says_ok_and_drops_the_body,
    says_ok_before_the_body,
    says_two_lengths,
)
from loopback import answering
from tls_front import behind_tls

import ckptstore
from ckptstore.errors import (
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    StorageError,
    StorageUnavailable,
    StoreMissing,
)
from ckptstore.storage.open import open_storage

SMALL, LARGE = os.urandom(4 << 10), os.urandom(9 << 20)
OTHER = b"of somebody else"
LONGEST_SECONDS = 30.0
MANNERS: list[OnWire] = [
    goes_on_with_100,
    hints_first,
    ends_with_103,
    resets_in_the_body,
    says_two_lengths,
    says_length_and_chunks,
    says_no_status,
    says_an_impossible_status,
    says_nothing_of_the_file,
    answers_to_a_condition,
    has_a_head_without_end,
]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_tries")]
ENGINES = ["native", pytest.param("fsspec", marks=pytest.mark.long)]
"""The generic engine has the client of s3fs, which is neither ours nor a part of a usual installation."""


CLOUDS = {"gs": "fake_gcs", "az": "azurite"}


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any], Front]]:
    """A bucket or container behind a front: its URI, options and the front."""
    cloud: str = request.param
    with options_behind(request.getfixturevalue(CLOUDS[cloud])) as (options, front):
        times = {"timeout": 2} if cloud == "gs" else {"read_timeout": 2, "connection_timeout": 2}
        yield f"{cloud}://test/{os.urandom(4).hex()}", {**options, **times}, front


@pytest.fixture
def front(fast_s3: Any) -> Iterator[tuple[dict[str, Any], Front]]:
    """The options that lead to a bucket through a front, and the front."""
    with hostile_front(fast_s3.endpoint_url) as (url, front):
        options = {**fast_s3.storage_options, "endpoint_url": url}
        yield {**options, "config_kwargs": {"read_timeout": 2, "connect_timeout": 2}}, front


def calls(storage: Any) -> dict[str, Callable[[], Any]]:
    """Reads and writes of each size, by the method of HTTP; each returns what is then so of its file."""

    def read(key: str, offset: int, size_bytes: int) -> bytes:
        view = memoryview(bytearray(size_bytes))
        storage.read_into(key, offset, [view])
        return bytes(view)

    def write(key: str, data: bytes) -> bytes:
        storage.write(key, [memoryview(data)])
        return data

    return {
        "GET a small file": lambda: storage.read("small"),
        "GET a small range": lambda: read("large", 1000, 500),
        "GET a large range": lambda: read("large", 1000, 6 << 20),
        "GET a listing": lambda: sorted(file.key for file in storage.list("")),
        "HEAD a file": lambda: storage.stat("large").size_bytes,
        "PUT a small file": lambda: write("new", SMALL),
        "PUT a large file": lambda: write("new", LARGE),
    }


def twice(call: Callable[[], Any]) -> Any:
    """What a call returns at its second try at the latest: a connection that was kept may be of no use any more."""
    try:
        return call()
    except StorageUnavailable:
        return call()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engine", "manner"),
    [
        *(("native", manner) for manner in MANNERS),
        *(pytest.param("fsspec", manner, marks=pytest.mark.long) for manner in MANNERS[1:]),
    ],
)
def test_a_call_is_right_or_fails_in_time(front: tuple[dict[str, Any], Front], engine: str, manner: OnWire) -> None:
    """aiohttp, below s3fs, waits as long as a server says 100, so it does not meet the first manner."""
    options, place = front
    check_calls(f"s3://test/{os.urandom(4).hex()}", options, place, engine, manner)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "manner", [pytest.param(manner, marks=() if manner is hints_first else pytest.mark.slow) for manner in MANNERS]
)
def test_a_call_is_right_or_fails_in_time_over_tls(fast_s3: Any, certificate: Path, manner: OnWire) -> None:
    with hostile_front(fast_s3.endpoint_url) as (plain_url, place), behind_tls(certificate, plain_url) as url:
        options = {**fast_s3.storage_options, "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}
        options["client_kwargs"]["verify"] = str(certificate)
        options["config_kwargs"] = {"read_timeout": 2, "connect_timeout": 2}
        check_calls(f"s3://test/{os.urandom(4).hex()}", options, place, "native", manner)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("other", "manner"),
    [
        pytest.param(cloud, manner, marks=pytest.mark.slow if number // 2 % 2 == place else pytest.mark.long)
        for number, manner in enumerate(MANNERS)
        for place, cloud in enumerate(CLOUDS)
    ],
    indirect=["other"],
)
def test_other_clouds_are_right_or_fail(other: tuple[str, dict[str, Any], Front], manner: OnWire) -> None:
    """In CI each manner meets one cloud: who speaks HTTP is the same."""
    check_calls(*other, "native", manner)


def check_calls(uri: str, options: dict[str, Any], place: Front, engine: str, manner: OnWire) -> None:
    """Make each call while a front misbehaves, and again when it does not any more."""
    with closing(open_storage(uri, storage_options=options, engine=engine)) as storage:
        storage.write("small", [memoryview(SMALL)])
        storage.write("large", [memoryview(LARGE)])
        storage.write("new", [memoryview(OTHER)])
        found = {name: call() for name, call in calls(storage).items()}
        for name, call in calls(storage).items():
            right = found[name]
            if name.startswith("HEAD") and manner in (says_two_lengths, says_length_and_chunks):
                continue  # there is no body that they could part from what follows
            place.misbehave_on_wire(manner, name.partition(" ")[0], "", times=3)
            began = time.monotonic()
            try:
                assert call() == right, name
            except (StorageError, CheckpointDamaged):
                """It says that it has failed."""
            assert place.done or not uri.startswith("s3"), name  # others write with POST, and read for HEAD
            assert time.monotonic() - began < LONGEST_SECONDS, name
            place.behave()
            for other, again in calls(storage).items():
                if other.startswith(("GET", "HEAD")):
                    assert twice(again) == found[other], (name, other)
            assert twice(call) == right, name


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["GET", pytest.param("HEAD", marks=pytest.mark.slow), "PUT"])
def test_an_answer_too_many_is_not_believed(front: tuple[dict[str, Any], Front], engine: str, method: str) -> None:
    """The next request on the connection gets it, with every client. No byte of it ends up in a state."""
    options, place = front
    uri = f"s3://test/{os.urandom(4).hex()}"
    state = {"w": torch.randn(600_000), "small": torch.arange(10)}
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        store.save(1, state)
    place.misbehave_on_wire(answers_twice, method, "")
    for step in (2, 3):
        with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
            found = {"w": torch.zeros(600_000), "small": torch.zeros(10, dtype=torch.int64)}
            try:
                assert store.resume(found) is not None
                assert all(torch.equal(found[key], state[key]) for key in state)
                store.save(step, state)
            except CkptstoreError:
                """It says that it has failed."""
    assert place.done
    place.behave()
    for _ in range(20 if engine == "fsspec" else 0):  # aiohttp keeps connections that have an answer too many
        with (
            suppress(CkptstoreError),
            ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store,
        ):
            store.resume(state)
            break
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        assert store.resume(state) is not None
        assert all(checkpoint.verify().ok for checkpoint in store)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("manner", [says_ok_before_the_body, says_ok_and_drops_the_body])
@pytest.mark.parametrize(
    "match",
    [*("distcp", "ckptstore.json"), *(pytest.param(key, marks=pytest.mark.slow) for key in ("tensors.index", "log/"))],
)
def test_an_ok_for_what_was_not_stored_is_no_commit(
    front: tuple[dict[str, Any], Front], engine: str, manner: OnWire, match: str
) -> None:
    options, place = front
    uri = f"s3://test/{os.urandom(4).hex()}"
    state = {"w": torch.randn(600_000)}
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        store.save(1, state)
        place.misbehave_on_wire(manner, "PUT", match)
        try:
            store.save(2, state)
            claimed = True
        except CkptstoreError as error:
            claimed = error.committed is True
        assert place.done
        place.behave()
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        newest = store.latest()
        assert newest is not None
        assert newest.verify().ok
        assert newest.step == (2 if claimed else 1)
        store.save(3, state)
        assert store.latest() is not None


def saved_and_verified(store: Any, step: int, state: Any) -> None:
    store.save(step, state)
    assert store[step].verify().ok


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "status", [301, pytest.param(302, marks=pytest.mark.slow), 307, pytest.param(308, marks=pytest.mark.slow)]
)
def test_who_redirects_learns_no_secret(front: tuple[dict[str, Any], Front], engine: str, status: int) -> None:
    """s3fs follows a redirect, which it cannot be told not to. So another server may get what the first
    one has sent there, as any gateway could; neither credentials nor a signature; its answer has no right digest.
    """
    options, place = front
    asked: list[bytes] = []

    def trap(connection: socket.socket, _number: int) -> None:
        with connection:
            asked.append(connection.recv(65536))
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 4096\r\n\r\n' + bytes(4096))

    uri, state = f"s3://test/{os.urandom(4).hex()}", {"w": torch.randn(600_000)}
    with answering(trap) as elsewhere:

        def redirects(wire: Wire) -> None:
            wire.drop()
            head = f"HTTP/1.1 {status} Moved\r\nLocation: {elsewhere}/x\r\nContent-Length: 0\r\n\r\n"
            wire.line.sendall(head.encode())

        with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
            store.save(1, state)
            for step, method in enumerate(("GET", "HEAD", "PUT"), 2):
                place.misbehave_on_wire(redirects, method, "step-")
                with pytest.raises(CkptstoreError):
                    saved_and_verified(store, step, state)
                assert place.done, method
                place.behave()
    heads = b"".join(asked).lower()
    assert b"authorization" not in heads
    assert b"testsecret" not in heads
    assert engine != "native" or not asked
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        found = {"w": torch.zeros(600_000)}
        assert store.resume(found) is not None
        assert torch.equal(found["w"], state["w"])


@pytest.mark.parametrize("asked_for", [{"w": torch.zeros(3)}, None], ids=["a state", "a checkpoint"])
def test_a_store_that_only_seems_empty_is_not_begun_anew(
    fast_s3: Any, asked_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the commit seems missing, and the claim in its place seems written, until another connection is
    used: as when one gives each request the answer to another."""
    uri, state = f"s3://test/{os.urandom(4).hex()}", {"w": torch.ones(3)}
    options = fast_s3.storage_options
    with ckptstore.open_store(uri, group="solo", storage_options=options) as store:
        store.save(1, state)
        commit = store.latest()
    assert commit is not None
    key = f"log/{commit.number:010}.json"
    with closing(open_storage(uri, storage_options=options)) as storage:
        kind = type(storage)
    read, create, doubt = kind.read, kind.create, kind.doubt
    pretended: list[bytes] = []
    is_doubted: list[bool] = []

    def misread(self: Any, asked: str) -> bytes:
        if asked != key or is_doubted:
            return bytes(read(self, asked))
        if not pretended:
            raise FileMissing("it is not there", file=asked)
        return pretended[0]

    def pretend(self: Any, asked: str, data: bytes) -> bool:
        if asked == key:
            pretended.append(data)
        return asked == key or bool(create(self, asked, data))

    def reconnect(self: Any, asked: str, *place: Any) -> None:
        is_doubted.extend([True] * (asked == key))
        doubt(self, asked, *place)

    for name, method in (("read", misread), ("create", pretend), ("doubt", reconnect)):
        monkeypatch.setattr(kind, name, method)
    with (
        ckptstore.open_store(uri, group="solo", storage_options=options) as store,
        pytest.raises(StoreMissing, match="another one"),
    ):
        store.resume(asked_for)
    assert pretended
